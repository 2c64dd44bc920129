"""The evaluation of the registered version, before its aliases move."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.contract import PodError, TerminationMessage
from finetune_crds.evaluation import EvaluatedMetric, EvaluationResult, EvaluationStatus
from finetune_crds.status import FineTuneJobStatus, MlflowStatus, ModelStatus
from finetune_operator import names
from finetune_operator.errors import Problem
from finetune_operator.finetunejob.decision import Decision, Deletion, LogMetrics, SetAlias, TagVersion
from finetune_operator.finetunejob.model import Mlflow, QueueState
from finetune_operator.registry.base import RegisteredVersion
from fixtures.operator_in_memory.decisions import (
    ACCEPTED,
    EVALUATED,
    LEFT,
    NOW,
    PREPARED,
    SETTINGS,
    TRAINED,
    applied,
    child,
    conclude,
    condition,
    deleted,
    ended,
    failure_of,
    ftj,
    later,
    lost,
    observed,
    pod,
    said,
    status,
    tracked,
)

Json = dict[str, Any]
JOB = "tune-evaluate"
EVALUATING = condition(ConditionType.EVALUATED, "False", ConditionReason.EVALUATING)
MODEL = ModelStatus(name="tuned", version="4", uri="models:/tuned/4", summary="tuned/4")
KNOWN: Json = {"attempt": 1, "start_time": NOW, "mlflow": MlflowStatus(experiment_id="e1", run_id="r1")}
BEFORE = status(ACCEPTED, PREPARED, TRAINED, **KNOWN)
AT_WORK = status(ACCEPTED, PREPARED, TRAINED, EVALUATING, **KNOWN, model=MODEL)
VERSION = RegisteredVersion("tuned", "4")
AWAY = Mlflow(problem=Problem(ConditionReason.MLFLOW_UNREACHABLE, "MLflow at http://m cannot be reached: no"))
RESULT = EvaluationResult(
    rows=50, digest="d1", metrics={"eval_accuracy": 0.75, "eval_f1": 1 / 3}, base={"eval_accuracy": 0.5}
)
DONE = TerminationMessage(evaluation=RESULT)
FOUND = EvaluationStatus(
    rows=50,
    digest="d1",
    metrics=[
        EvaluatedMetric(name="eval_accuracy", value=0.75, base=0.5),
        EvaluatedMetric(name="eval_f1", value=1 / 3),
    ],
)
NUMBERS = {"eval_accuracy": 0.75, "eval_f1": 1 / 3, "base_eval_accuracy": 0.5}
TAGS = {
    "eval_accuracy": "0.75",
    "eval_f1": "0.333333333333333",
    "base_eval_accuracy": "0.5",
    "finetune_evaluation_data": "d1",
}
COMMAND: Json = {"command": ["judge"]}


def evaluating(ended: str = "", version: str = "4", **more: Any) -> Json:
    annotations = {names.ANNOTATION_VERSION: version, names.ANNOTATION_DIGEST: "d2"}
    return child(JOB, ended, "it was over", annotations=annotations, **more)


def its_pod(**more: Any) -> Json:
    return pod(JOB, component=names.EVALUATE, **more)


def its_end(code: int, message: TerminationMessage | str = "", index: int = 0, **more: Any) -> Json:
    return ended(JOB, index, code, message, container="evaluate", component=names.EVALUATE, **more)


def evaluate(
    *jobs: Json,
    pods: list[Json] | None = None,
    mlflow: Mlflow | None = None,
    before: Any = AT_WORK,
    evaluation: Json | None = None,
    template: Json | None = None,
    queue_state: QueueState | None = None,
    **parts: Any,
) -> Decision:
    settings = {"evaluate": {"template": template}}
    job = ftj(before, register={"model": "tuned"}, evaluation=evaluation or {}, pods=settings, **parts)
    observation = observed(*jobs, pods=pods, mlflow=mlflow or tracked(VERSION), queue_state=queue_state)
    return conclude(job, observation, at=later(5), settings=SETTINGS)


def test_it_waits_in_the_queue_of_its_job() -> None:
    queue: Json = {"runPolicy": {"queueName": "gpus"}}
    (body,) = (item for item in evaluate(**queue).apply if item["kind"] == "Job")
    assert (body["metadata"]["labels"][names.LABEL_QUEUE], body["spec"]["suspend"]) == ("gpus", True)
    suspended = evaluating(creationTimestamp="2026-08-01T12:00:00Z")
    suspended["spec"]["suspend"], suspended["metadata"]["labels"][names.LABEL_QUEUE] = True, "gpus"
    decision = evaluate(
        suspended, queue_state=QueueState(reason="Pending", message="no quota", position=2), **queue
    )
    waiting = (
        "False",
        ConditionReason.QUEUED,
        "the evaluation waits in Kueue's queue gpus at position 2: no quota",
    )
    assert (told(decision), said(decision, ConditionType.READY)) == (waiting, waiting)
    assert (decision.status.phase, decision.requeue_seconds) == ("Queued", 5.0)


def told(decision: Decision) -> tuple[str, str, str] | None:
    return said(decision, ConditionType.EVALUATED)


def waits(message: str) -> tuple[str, str, str]:
    return "False", ConditionReason.EVALUATING, message


def has_alias(decision: Decision) -> bool:
    return any(isinstance(action, SetAlias) for action in decision.actions)


def test_it_starts_when_the_version_exists() -> None:
    waiting = evaluate(mlflow=tracked(), before=BEFORE)
    assert (told(waiting), applied(waiting), waiting.status.phase) == (None, [], "Registering")
    assert said(waiting, ConditionType.REGISTERED) == (
        "False",
        ConditionReason.REGISTERING,
        "waiting for a version of tuned",
    )
    told_of = evaluate(before=waiting.status)
    assert (applied(told_of), told_of.requeue_seconds) == ([], 0)
    assert told(told_of) == waits("the evaluation pod is starting")
    started = evaluate(before=told_of.status)
    assert applied(started) == ["ConfigMap/tune-evaluate", "Job/tune-evaluate"]
    assert told(started) == waits("the evaluation pod is starting")
    assert said(started, ConditionType.REGISTERED) is None
    assert (started.status.phase, started.actions, started.status.model) == ("Evaluating", (), MODEL)


def test_without_it_the_aliases_are_set_at_once() -> None:
    decision = conclude(
        ftj(BEFORE, register={"model": "tuned"}), observed(mlflow=tracked(VERSION)), settings=SETTINGS
    )
    assert (told(decision), decision.actions) == (None, (SetAlias("tuned", "candidate", "4"),))


FOLLOWED: dict[str, tuple[list[Json], Mlflow, str]] = {
    "no pod yet": (
        [],
        tracked(VERSION),
        "the evaluation pod is starting; kubectl logs job/tune-evaluate shows its progress",
    ),
    "a pod at work": (
        [its_pod()],
        tracked(VERSION),
        "version 4 is being evaluated; kubectl logs job/tune-evaluate shows its progress",
    ),
    "a pod at work while MLflow is away": (
        [its_pod()],
        AWAY,
        "version 4 is being evaluated; kubectl logs job/tune-evaluate shows its progress",
    ),
}


@pytest.mark.parametrize(("pods", "mlflow", "message"), FOLLOWED.values(), ids=FOLLOWED)
def test_it_is_followed(pods: list[Json], mlflow: Mlflow, message: str) -> None:
    decision = evaluate(evaluating(), pods=pods, mlflow=mlflow)
    assert told(decision) == waits(message)
    assert (decision.status.phase, decision.requeue_seconds) == ("Evaluating", SETTINGS.poll_seconds)
    assert (applied(decision), decision.actions) == ([], ())


def test_a_pod_that_does_not_start_explains_more_than_the_phase() -> None:
    waiting = {"name": "evaluate", "image": "mine:1", "state": {"waiting": {"reason": "ErrImagePull"}}}
    decision = evaluate(evaluating(), pods=[its_pod(phase="Pending", containerStatuses=[waiting])])
    message = "pod tune-evaluate-0-abcde cannot pull mine:1: ErrImagePull: ErrImagePull"
    refused = ("False", ConditionReason.IMAGE_PULL_FAILED, message)
    assert said(decision, ConditionType.PODS_HEALTHY) == refused
    assert said(decision, ConditionType.READY) == refused


def test_its_numbers_are_written_to_the_run_and_to_the_version_then_the_aliases_move() -> None:
    jobs, pods = evaluating("Complete"), [its_end(0, DONE)]
    first = evaluate(jobs, pods=pods)
    assert first.status.evaluation == FOUND
    assert first.actions == (LogMetrics("r1", NUMBERS, 1), TagVersion("tuned", "4", TAGS))
    assert told(first) == waits("writing the metrics of tuned version 4 to its tags and its run")
    # The pod is not needed any more.
    tagged = dataclasses.replace(VERSION, tags=TAGS)
    second = evaluate(mlflow=tracked(tagged, metrics=NUMBERS), before=first.status)
    message = "tuned version 4 on 50 rows: eval_accuracy 0.75 (base model 0.5), eval_f1 0.333333"
    assert told(second) == ("True", ConditionReason.EVALUATED, message)
    assert second.actions == (SetAlias("tuned", "candidate", "4"),)
    assert second.status.phase == "Registering"
    done = evaluate(
        mlflow=tracked(dataclasses.replace(tagged, aliases=frozenset({"candidate"}))), before=second.status
    )
    assert (done.status.phase, done.status.evaluation) == ("Succeeded", FOUND)


PART: dict[str, tuple[dict[str, str], dict[str, float], list[Any]]] = {
    "a pass that ended after the metrics": ({}, NUMBERS, [TagVersion("tuned", "4", TAGS)]),
    "a pass that ended among the tags": (
        {"eval_accuracy": "0.75"},
        NUMBERS,
        [TagVersion("tuned", "4", {key: value for key, value in TAGS.items() if key != "eval_accuracy"})],
    ),
    "numbers of something else": (
        {**TAGS, "eval_f1": "1"},
        {**NUMBERS, "eval_f1": 1.0},
        [LogMetrics("r1", {"eval_f1": 1 / 3}, 1), TagVersion("tuned", "4", {"eval_f1": TAGS["eval_f1"]})],
    ),
    "everything, and the trainer's": ({**TAGS, "eval_loss": "2"}, NUMBERS, []),
}


@pytest.mark.parametrize(("tags", "metrics", "actions"), PART.values(), ids=PART)
def test_only_what_is_missing_is_written(
    tags: dict[str, str], metrics: dict[str, float], actions: list[Any]
) -> None:
    before = AT_WORK.model_copy(update={"evaluation": FOUND})
    decision = evaluate(
        mlflow=tracked(dataclasses.replace(VERSION, tags=tags), metrics=metrics), before=before
    )
    assert [item for item in decision.actions if not isinstance(item, SetAlias)] == actions
    assert has_alias(decision) == (not actions)


def test_its_numbers_come_after_those_of_the_training_which_a_run_has_by_steps() -> None:
    decision = evaluate(
        evaluating("Complete"), pods=[its_end(0, DONE)], mlflow=tracked(VERSION, step=40, eval_f1=1)
    )
    assert decision.actions[0] == LogMetrics("r1", NUMBERS, 41)


def test_the_numbers_wait_for_mlflow_and_are_kept_meanwhile() -> None:
    decision = evaluate(evaluating("Complete"), pods=[its_end(0, DONE)], mlflow=AWAY)
    assert told(decision) == waits(
        "the metrics are written when MLflow responds: MLflow at http://m cannot be reached: no"
    )
    again = evaluate(evaluating("Complete"), mlflow=AWAY, before=decision.status)
    assert (again.status.evaluation, again.status.phase, again.actions) == (FOUND, "Evaluating", ())


def test_what_the_evaluation_waits_for_stays_until_mlflow_was_read_again() -> None:
    decision = evaluate(evaluating("Complete"), pods=[its_end(0, DONE)], mlflow=AWAY)
    unread = look(decision.status, None, 5)
    assert (told(unread), unread.actions) == (told(decision), ())


def test_a_result_that_went_with_its_pod_is_asked_for_again() -> None:
    lost = evaluate(evaluating("Complete"))
    assert (deleted(lost), lost.status.evaluation) == ([JOB], None)
    assert told(lost) == waits(
        "the evaluation pod's result was lost with its node: the evaluation runs again"
    )
    assert applied(evaluate(before=lost.status)) == ["ConfigMap/tune-evaluate", "Job/tune-evaluate"]


def test_it_is_done_when_its_container_is_also_where_another_one_keeps_the_pod() -> None:
    ended_pod = its_end(0, DONE)
    proxy = {"name": "istio-proxy", "state": {"running": {}}}
    ended_pod["status"] |= {
        "phase": "Running",
        "containerStatuses": [*ended_pod["status"]["containerStatuses"], proxy],
    }
    decision = evaluate(evaluating(), pods=[ended_pod])
    assert (decision.status.evaluation, deleted(decision)) == (FOUND, [])
    again = evaluate(evaluating(), pods=[ended_pod], before=decision.status)
    assert deleted(again) == [JOB]


def test_a_version_that_was_registered_later_is_evaluated_in_its_place() -> None:
    later_one = tracked(RegisteredVersion("tuned", "5", tags=TAGS))
    stopped = evaluate(evaluating(), pods=[its_pod()], mlflow=later_one)
    assert deleted(stopped) == [JOB]
    assert told(stopped) == waits(
        "the evaluation of version 4 is replaced by that of version 5, which the job has registered since"
    )
    evaluated = status(ACCEPTED, PREPARED, TRAINED, EVALUATED, **KNOWN, model=MODEL, evaluation=FOUND)
    again = evaluate(mlflow=later_one, before=evaluated)
    assert (again.status.evaluation, has_alias(again)) == (None, False)
    assert applied(evaluate(mlflow=later_one, before=again.status)) == [
        "ConfigMap/tune-evaluate",
        "Job/tune-evaluate",
    ]


def test_an_evaluation_that_is_lost_with_its_node_starts_again_elsewhere() -> None:
    lost_pod = lost(its_pod(node="n"))
    decision = evaluate(evaluating(), pods=[lost_pod])
    assert (deleted(decision), applied(decision)) == ([JOB], [])
    assert told(decision) == waits(
        f"pod tune-evaluate-0-abcde {LEFT.format('n')}; the evaluation starts again"
    )
    assert decision.status.last_failure is not None
    assert (decision.status.last_failure.reason, decision.status.last_failure.node) == ("NodeLost", "n")
    freed = evaluate(evaluating(deletionTimestamp="t"), pods=[lost_pod])
    assert (freed.delete, applied(freed)) == ((Deletion(JOB, f"uid-of-{JOB}", frees_name=True),), [])
    assert told(freed) == waits("the evaluation waits for Job tune-evaluate to be deleted")
    assert applied(evaluate(pods=[lost_pod])) == ["ConfigMap/tune-evaluate", "Job/tune-evaluate"]


def test_it_waits_for_pods_of_an_earlier_one() -> None:
    decision = evaluate(pods=[its_pod(owner="earlier")])
    assert applied(decision) == []
    assert told(decision) == waits("the evaluation waits for pod tune-evaluate-0-abcde to stop")


def test_it_does_not_start_again_without_mlflow_from_which_its_pod_fetches_the_version() -> None:
    decision = evaluate(mlflow=AWAY)
    assert applied(decision) == []
    assert told(decision) == waits(
        "the evaluation starts when MLflow responds: MLflow at http://m cannot be reached: no"
    )


def test_a_template_that_was_changed_is_read_before_each_pod() -> None:
    template = {"spec": {"containers": [{"name": "main", "env": [{"name": "MODEL_PATH", "value": "a"}]}]}}
    decision = evaluate(template=template)
    assert applied(decision) == []
    assert told(decision) == waits("the evaluation waits for a correction of spec.pods")
    message = "spec.pods.evaluate.template sets MODEL_PATH, which the operator sets: remove the variable"
    wrong = ConditionReason.POD_TEMPLATE_INVALID
    assert said(decision, ConditionType.PODS_HEALTHY) == ("False", wrong, message)
    assert said(decision, ConditionType.STALLED) == ("True", wrong, message)
    corrected = evaluate(before=decision.status)
    assert said(corrected, ConditionType.PODS_HEALTHY) is None
    assert applied(corrected) == ["ConfigMap/tune-evaluate", "Job/tune-evaluate"]


def error(reason: str, message: str) -> TerminationMessage:
    return TerminationMessage(error=PodError(reason=reason, message=message))


STAYS = "; version 4 of tuned remains, without aliases"
FAILURES: dict[str, tuple[str, list[Json], Json, str, str]] = {
    "wrong data": (
        "Failed",
        [its_end(65, error("NoRows", "the test split is empty"), node="node-1")],
        {},
        ConditionReason.DATA_WRONG,
        "evaluation failed in pod tune-evaluate-0-abcde on node node-1: the test split is empty",
    ),
    "a wrong recipe": (
        "Failed",
        [its_end(64, error("Boom", "no"))],
        {},
        ConditionReason.RECIPE_WRONG,
        "evaluation failed in pod tune-evaluate-0-abcde: no",
    ),
    "crashes, and the last one counts": (
        "Failed",
        [its_end(1, "first", 1, at=1), its_end(137, reason="OOMKilled", at=2)],
        {},
        ConditionReason.EVALUATION_FAILED,
        "evaluation failed in pod tune-evaluate-0-abcde: the container used more memory than its limit: raise the "
        "limit, or create a FineTuneJob with another name and a lower evaluation.batchSize",
    ),
    "no pod is left": ("Failed", [], {}, ConditionReason.EVALUATION_FAILED, "evaluation failed: it was over"),
    "another program": (
        "Complete",
        [its_end(0, "bye")],
        {},
        ConditionReason.EVALUATION_FAILED,
        "evaluation failed: pod tune-evaluate-0-abcde succeeded and reported no result: create a FineTuneJob with "
        "another name and an image that runs finetune-evaluate, or with evaluation.command",
    ),
    "a command that writes no numbers": (
        "Complete",
        [its_end(0, '{"acc": "high"}')],
        COMMAND,
        ConditionReason.EVALUATION_FAILED,
        "evaluation failed: pod tune-evaluate-0-abcde wrote invalid metrics: acc is '\"high\"', which is not a finite number",
    ),
}


@pytest.mark.parametrize(("end", "pods", "parts", "reason", "message"), FAILURES.values(), ids=FAILURES)
def test_a_failure_ends_the_job_and_leaves_the_version(
    end: str, pods: list[Json], parts: Json, reason: str, message: str
) -> None:
    decision = evaluate(evaluating(end), pods=pods, evaluation=parts)
    assert failure_of(decision) == ("True", reason, f"{message}{STAYS}")
    assert told(decision) == ("False", reason, f"{message}{STAYS}")
    assert (decision.status.phase, has_alias(decision)) == ("Failed", False)
    assert not any(isinstance(action, TagVersion) for action in decision.actions)


def test_a_retry_is_told_of() -> None:
    decision = evaluate(evaluating(), pods=[its_end(1, "it broke", 1), its_pod()])
    assert decision.status.last_failure is not None
    assert (decision.status.last_failure.message, decision.status.phase) == ("it broke", "Evaluating")


def test_the_numbers_of_a_command_have_the_digest_that_its_job_was_made_with() -> None:
    decision = evaluate(evaluating("Complete"), pods=[its_end(0, '{"acc": 1}')], evaluation=COMMAND)
    assert decision.status.evaluation == EvaluationStatus(
        digest="d2", metrics=[EvaluatedMetric(name="acc", value=1.0)]
    )
    assert decision.actions == (
        LogMetrics("r1", {"acc": 1.0}, 1),
        TagVersion("tuned", "4", {"acc": "1", "finetune_evaluation_data": "d2"}),
    )


def test_suspension_stops_the_pod_and_it_starts_again_after_it() -> None:
    stopped = evaluate(evaluating(), pods=[its_pod()], suspend=True)
    assert (deleted(stopped), stopped.status.phase) == ([JOB], "Suspended")
    resumed = evaluate(before=stopped.status)
    assert applied(resumed) == ["ConfigMap/tune-evaluate", "Job/tune-evaluate"]
    assert (resumed.status.attempt, resumed.status.phase) == (1, "Evaluating")
    message = ("False", ConditionReason.RESUMED, "the job goes on")
    assert said(resumed, ConditionType.SUSPENDED) == message


DEADLINES: dict[str, tuple[list[Json], str]] = {
    "at work": ([evaluating()], "Failed"),
    "complete, and nobody was there to write it down": ([evaluating("Complete")], "Evaluating"),
}


@pytest.mark.parametrize(("jobs", "phase"), DEADLINES.values(), ids=DEADLINES)
def test_it_counts_towards_the_deadline(jobs: list[Json], phase: str) -> None:
    decision = evaluate(*jobs, pods=[its_end(0, DONE)], runPolicy={"activeDeadlineSeconds": 5})
    assert decision.status.phase == phase


LOST = "version 4 of tuned cannot be found from run r1"


def look(before: FineTuneJobStatus, mlflow: Mlflow | None, seconds: float) -> Decision:
    job = ftj(before, register={"model": "tuned"}, evaluation={})
    return conclude(job, observed(mlflow=mlflow), at=later(seconds), settings=SETTINGS)


@pytest.mark.parametrize("evaluation", [FOUND, None], ids=["evaluated", "not evaluated yet"])
def test_a_version_that_no_longer_exists_ends_the_job_but_one_answer_without_it_does_not(
    evaluation: EvaluationStatus | None,
) -> None:
    before = AT_WORK.model_copy(update={"evaluation": evaluation})
    waiting = look(before, tracked(), 3600)
    assert (told(waiting), waiting.status.phase) == (waits(f"{LOST}: retrying"), "Evaluating")
    assert said(waiting, ConditionType.READY) == told(waiting)
    found_again = look(waiting.status, tracked(VERSION), 3605)
    assert said(found_again, ConditionType.FAILED) is None
    assert told(look(found_again.status, tracked(), 7200)) == told(waiting)
    decision = look(waiting.status, tracked(), 3659)
    assert told(decision) == told(waiting)
    message = f"{LOST}: the version or the run was deleted; create a FineTuneJob with another name"
    failed = ("True", ConditionReason.REGISTRATION_FAILED, message)
    ended_job = look(decision.status, tracked(), 3660)
    assert said(ended_job, ConditionType.FAILED) == failed
    assert told(ended_job) == ("False", *failed[1:])


def test_a_version_that_is_lost_while_its_aliases_move_is_waited_for_too() -> None:
    setting = condition(ConditionType.REGISTERED, "False", ConditionReason.REGISTERING)
    before = status(ACCEPTED, PREPARED, TRAINED, EVALUATED, setting, **KNOWN, model=MODEL, evaluation=FOUND)
    waiting = look(before, tracked(), 3600)
    assert said(waiting, ConditionType.REGISTERED) == (
        "False",
        ConditionReason.REGISTERING,
        f"{LOST}: retrying",
    )
    assert said(waiting, ConditionType.FAILED) is None
    assert look(waiting.status, tracked(), 3660).status.phase == "Failed"


def test_an_outage_of_mlflow_is_in_the_condition_that_waits_for_it() -> None:
    writing = condition(
        ConditionType.EVALUATED, "False", ConditionReason.EVALUATING, "writing the metrics of tuned version 4"
    )
    before = status(ACCEPTED, PREPARED, TRAINED, writing, **KNOWN, model=MODEL, evaluation=FOUND)
    decision = look(before, AWAY, 5)
    assert told(decision) == waits(
        "the metrics are written when MLflow responds: MLflow at http://m cannot be reached: no"
    )
    assert said(decision, ConditionType.READY) == told(decision)
    assert said(decision, ConditionType.REGISTERED) is None
