"""The training pods are judged by a dry run before anything is created, again when refused or when the spec changes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from finetune_crds.base import API_VERSION
from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_crds.status import FineTuneJobStatus
from finetune_operator.defaults import Defaults
from finetune_operator.finetunejob.decision import Decision
from finetune_operator.finetunejob.model import DryRunAnswer, FineTuneJob
from fixtures.operator_in_memory.decisions import (
    ACCEPTED,
    ADMITTED,
    FINE,
    NO_MLFLOW,
    NOW,
    PREPARED,
    SETTINGS,
    SOURCE,
    UID,
    applied,
    child,
    conclude,
    condition,
    ftj,
    later,
    observed,
    pod,
    said,
    status,
)

Json = dict[str, Any]
QUOTA = condition(ConditionType.PODS_ADMITTED, "False", ConditionReason.QUOTA_EXCEEDED)
TYPO = condition(ConditionType.PODS_ADMITTED, "False", ConditionReason.POD_TEMPLATE_INVALID)
POLICY = condition(ConditionType.PODS_ADMITTED, "False", ConditionReason.POD_REJECTED)
NO_QUEUE = condition(ConditionType.PODS_ADMITTED, "False", ConditionReason.QUEUE_INADMISSIBLE)
UNCHECKED = condition(ConditionType.PODS_ADMITTED, "Unknown", ConditionReason.NOT_CHECKED)
BROKEN = condition(ConditionType.PODS_ADMITTED, "Unknown", ConditionReason.CHECK_FAILED)
PREPARING = condition(ConditionType.PREPARED, "False", ConditionReason.PREPARING)
POD, JOB = "Pod/tune-train-1-0", "Job/tune-train-1"


def asks(decision: Decision) -> list[str]:
    """What is to be created as a dry run, as kind/name."""
    return [f"{body['kind']}/{body['metadata']['name']}" for body in decision.dry_runs]


def changed(of: FineTuneJob) -> FineTuneJob:
    """The job after a change of its spec."""
    return dataclasses.replace(of, generation=2)


EVALUATED: Json = {"register": {}, "evaluation": {"command": ["judge"]}}
NEW = ftj(data=SOURCE)
STALLED = ftj(status(TYPO), data=SOURCE)
RUNNING = ftj(status(ACCEPTED, ADMITTED, PREPARING, start_time=NOW), data=SOURCE)
TRAINS = ftj(status(ACCEPTED, PREPARED, start_time=NOW), data=SOURCE)

ASKS: dict[str, tuple[FineTuneJob, list[str]]] = {
    "a new job": (NEW, [JOB, POD]),
    "a new job without a preparation": (ftj(), [POD]),
    "judged": (ftj(status(ADMITTED), data=SOURCE), []),
    "not checked": (ftj(status(UNCHECKED), data=SOURCE), []),
    "beyond a quota": (ftj(status(QUOTA), data=SOURCE), []),
    "a queue that is not there": (ftj(status(NO_QUEUE), data=SOURCE), [JOB, POD]),
    "a typo": (STALLED, [JOB, POD]),
    "a typo, and changed": (changed(STALLED), [JOB, POD]),
    "refused": (ftj(status(POLICY), data=SOURCE), [JOB, POD]),
    "refused without a preparation": (ftj(status(POLICY)), [POD]),
    "refused without a preparation, and changed": (changed(ftj(status(POLICY))), [POD]),
    "refused, and suspended": (ftj(status(POLICY), data=SOURCE, suspend=True), []),
    "the check failed": (ftj(status(BROKEN), data=SOURCE), [JOB, POD]),
    "preparing, and refused": (
        ftj(status(ACCEPTED, POLICY, PREPARING, start_time=NOW), data=SOURCE),
        [JOB, POD],
    ),
    "preparing": (RUNNING, []),
    "preparing, and changed": (changed(RUNNING), [JOB, POD]),
    "prepared, and changed": (changed(TRAINS), []),
    "suspended": (ftj(data=SOURCE, suspend=True), []),
    "not accepted": (ftj(register={"model": "m"}), []),
}


@pytest.mark.parametrize(("of", "expected"), ASKS.values(), ids=ASKS)
def test_what_the_api_server_is_asked(of: FineTuneJob, expected: list[str]) -> None:
    decision = conclude(of, answer=None)
    assert asks(decision) == expected
    if expected:
        assert (decision.apply, decision.actions) == ((), ())
        assert asks(conclude(of)) == []


def test_after_a_restart_of_the_operator_the_pods_of_a_job_that_prepares_are_checked_again() -> None:
    """The operator may have other defaults by now, and the preparation may run for hours before the pods are created."""
    restarted = dataclasses.replace(observed(child("tune-prep")), has_checked_pods=False)
    assert asks(conclude(RUNNING, restarted, answer=None)) == [JOB, POD]
    accepted = conclude(RUNNING, restarted)
    assert accepted.status.phase == "Preparing"
    refused = conclude(RUNNING, restarted, settings=SETTINGS, answer=WRONG)
    assert (refused.delete, refused.status.phase) == ((), "Preparing")
    assert said(refused, ConditionType.READY) == ("False", WRONG.reason, SAID.get(WRONG, WRONG.message))
    assert asks(conclude(TRAINS, restarted, answer=None)) == []


def test_the_pod_is_one_of_the_jobs_pods() -> None:
    template = {"metadata": {"annotations": {"a": "b"}}, "spec": {"nodeSelector": {"pool": "gpu"}}}
    job, pod = conclude(ftj(data=SOURCE, pods={"train": {"template": template}}), answer=None).dry_runs
    inner = job["spec"]["template"]
    index = {"batch.kubernetes.io/job-completion-index": "0"}
    of_its_job = {
        "batch.kubernetes.io/job-name": "tune-train-1",
        "batch.kubernetes.io/controller-uid": UID,
        "job-name": "tune-train-1",
        "controller-uid": UID,
    }
    owner = {
        "apiVersion": API_VERSION,
        "kind": "FineTuneJob",
        "name": "tune",
        "uid": UID,
        "controller": True,
    }
    assert pod == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "tune-train-1-0",
            "namespace": "team",
            "labels": {**inner["metadata"]["labels"], **of_its_job, **index},
            "annotations": {"a": "b", **index},
            "ownerReferences": [owner],
        },
        "spec": inner["spec"],
    }
    assert pod["spec"]["nodeSelector"] == {"pool": "gpu"}


def test_annotations_that_are_none_are_left_for_the_api_server_to_refuse() -> None:
    _, pod = conclude(
        ftj(data=SOURCE, pods={"train": {"template": {"metadata": {"annotations": ["a"]}}}}), answer=None
    ).dry_runs
    assert pod["metadata"]["annotations"] == ["a"]


UNKNOWN = DryRunAnswer(None, ConditionReason.NOT_CHECKED, "no right")
USED_UP = DryRunAnswer(False, ConditionReason.QUOTA_EXCEEDED, "exceeded quota")
WRONG = DryRunAnswer(False, ConditionReason.POD_TEMPLATE_INVALID, "unknown field", 30)
FORBIDDEN = DryRunAnswer(False, ConditionReason.POD_REJECTED, "violates PodSecurity", 30)
AWAY = DryRunAnswer(None, ConditionReason.CHECK_FAILED, "failed calling webhook", 30)
ABSENT = DryRunAnswer(False, ConditionReason.QUEUE_INADMISSIBLE, "queue reserch does not exist", 30)
QUEUED = ftj(data=SOURCE, runPolicy={"queueName": "reserch"})
SAID = {
    ABSENT: "queue reserch does not exist: correct or remove spec.runPolicy.queueName, or create the LocalQueue, and the job continues",
    WRONG: "unknown field: correct spec.pods.train, and the job continues",
    FORBIDDEN: "violates PodSecurity: correct spec.pods.train, or the policy, and the job continues",
}
"""What the condition says of an answer, where it says more."""

PREPARES = ["ConfigMap/tune-prep", "Job/tune-prep"]
TRAINED = ["Service/tune", "ConfigMap/tune-train", "NetworkPolicy/tune", "Job/tune-train-1"]
GOES_ON = (ConditionReason.PREPARING, "the prep pod is starting")
STARTS = (ConditionReason.STARTING, "attempt 1: 2 pods are starting")
# The job, the answer, PodsAdmitted, what is created, and the reason and message of Ready.
ANSWERS: dict[str, tuple[FineTuneJob, DryRunAnswer, str | None, list[str], tuple[str, str]]] = {
    "fine": (NEW, FINE, "True", PREPARES, GOES_ON),
    "not checked": (NEW, UNKNOWN, "Unknown", PREPARES, GOES_ON),
    "beyond a quota": (
        NEW,
        USED_UP,
        "False",
        PREPARES,
        (ConditionReason.QUOTA_EXCEEDED, "exceeded quota"),
    ),
    "a typo": (NEW, WRONG, "False", [], (ConditionReason.POD_TEMPLATE_INVALID, SAID[WRONG])),
    "a policy": (
        NEW,
        FORBIDDEN,
        "False",
        [],
        (ConditionReason.POD_REJECTED, SAID[FORBIDDEN]),
    ),
    "a queue that is not there": (
        QUEUED,
        ABSENT,
        "False",
        [],
        (ConditionReason.QUEUE_INADMISSIBLE, SAID[ABSENT]),
    ),
    "a queue that came": (
        dataclasses.replace(QUEUED, status=status(NO_QUEUE)),
        FINE,
        "True",
        PREPARES,
        (
            ConditionReason.QUEUED,
            "the preparation waits in Kueue's queue reserch: kubectl get workloads shows why",
        ),
    ),
    "the check failed": (NEW, AWAY, "Unknown", [], (ConditionReason.CHECK_FAILED, AWAY.message)),
    "the check failed without a preparation": (
        ftj(),
        AWAY,
        "Unknown",
        [],
        (ConditionReason.CHECK_FAILED, AWAY.message),
    ),
    "fine after a typo": (changed(STALLED), FINE, "True", PREPARES, GOES_ON),
    "fine after a typo in the installation": (STALLED, FINE, "True", PREPARES, GOES_ON),
    "fine after a failed check": (ftj(status(BROKEN), data=SOURCE), FINE, "True", PREPARES, GOES_ON),
    "fine without a preparation": (ftj(), FINE, None, TRAINED, STARTS),
    "not checked without a preparation": (ftj(), UNKNOWN, None, TRAINED, STARTS),
    "beyond a quota without a preparation": (ftj(), USED_UP, None, TRAINED, STARTS),
    "a policy without a preparation": (
        ftj(),
        FORBIDDEN,
        "False",
        [],
        (ConditionReason.POD_REJECTED, SAID[FORBIDDEN]),
    ),
    "fine after a policy, without a preparation": (
        changed(ftj(status(POLICY))),
        FINE,
        None,
        TRAINED,
        STARTS,
    ),
}


@pytest.mark.parametrize(("of", "answer", "admitted", "creates", "ready"), ANSWERS.values(), ids=ANSWERS)
def test_what_follows_from_the_answer(
    of: FineTuneJob,
    answer: DryRunAnswer,
    admitted: str | None,
    creates: list[str],
    ready: tuple[str, str],
) -> None:
    decision = conclude(of, answer=answer)
    expected = (admitted, answer.reason, SAID.get(answer, answer.message)) if admitted else None
    assert said(decision, ConditionType.PODS_ADMITTED) == expected
    assert (applied(decision), said(decision, ConditionType.READY)) == (creates, ("False", *ready))
    true = [item.type for item in decision.status.conditions if item.status == "True"]
    assert [kind for kind in ("Reconciling", "Stalled", "Finished") if kind in true] == [
        "Stalled" if answer is WRONG else "Reconciling"
    ]
    assert creates or decision.requeue_seconds == 30


@pytest.mark.parametrize("answer", [WRONG, FORBIDDEN], ids=lambda item: item.reason)
def test_a_refusal_names_every_place_that_the_pods_come_from(answer: DryRunAnswer) -> None:
    defaults = Defaults.model_validate(
        {"pods": {"train": {"template": {"spec": {"priorityClassName": "none"}}}}}
    )
    settings = dataclasses.replace(NO_MLFLOW, defaults=defaults)
    reported = said(conclude(NEW, settings=settings, answer=answer), ConditionType.PODS_ADMITTED)
    assert reported
    assert reported[2].startswith(
        f"{answer.message}: correct spec.pods.train or defaults.pods of the chart, "
    )


@pytest.mark.parametrize("answer", [WRONG, FORBIDDEN], ids=lambda item: item.reason)
def test_a_refusal_of_the_evaluation_names_its_field(answer: DryRunAnswer) -> None:
    settings = SETTINGS
    of_evaluation = dataclasses.replace(answer, component="evaluate")
    reported = said(
        conclude(ftj(data=SOURCE, **EVALUATED), settings=settings, answer=of_evaluation),
        ConditionType.PODS_ADMITTED,
    )
    assert reported
    assert reported[2].startswith(f"{answer.message}: correct spec.pods.evaluate, ")


def test_the_evaluation_is_judged_before_the_training_too() -> None:
    with_preparation = conclude(ftj(data=SOURCE, **EVALUATED), settings=SETTINGS, answer=None)
    assert asks(with_preparation) == [JOB, "Job/tune-evaluate", POD, "Pod/tune-evaluate-0"]
    without = conclude(ftj(**EVALUATED), settings=SETTINGS, answer=None)
    assert asks(without) == ["Job/tune-evaluate", POD, "Pod/tune-evaluate-0"]


def test_the_pod_of_the_evaluation_has_no_index() -> None:
    template = {"spec": {"nodeSelector": {"pool": "gpu"}}}
    given = ftj(**EVALUATED, pods={"evaluate": {"template": template}})
    job, _, pod = conclude(given, settings=SETTINGS, answer=None).dry_runs
    assert (pod["spec"], pod["spec"]["nodeSelector"]) == (job["spec"]["template"]["spec"], {"pool": "gpu"})
    assert "batch.kubernetes.io/job-completion-index" not in pod["metadata"]["labels"]
    assert pod["metadata"]["labels"]["finetune.dev/component"] == "evaluate"


STRANGE: list[Json] = [
    {"spec": {"containers": ["a"]}},
    {"spec": {"containers": "a"}},
    {"spec": {"volumes": "a"}},
]


@pytest.mark.parametrize("template", STRANGE, ids=str)
def test_a_template_of_the_evaluation_that_is_none_is_left_for_the_api_server_to_refuse(
    template: Json,
) -> None:
    given = ftj(**EVALUATED, pods={"evaluate": {"template": template}})
    decision = conclude(given, settings=SETTINGS, answer=None)
    assert asks(decision) == ["Job/tune-evaluate", POD, "Pod/tune-evaluate-0"]


def test_a_queue_of_the_installation_that_is_not_there() -> None:
    settings = dataclasses.replace(NO_MLFLOW, defaults=Defaults(queue_name="reserch"))
    assert said(conclude(QUEUED, settings=settings, answer=ABSENT), ConditionType.PODS_ADMITTED) == (
        "False",
        ConditionReason.QUEUE_INADMISSIBLE,
        "queue reserch does not exist: create LocalQueue reserch (defaults.queueName of the chart), name another queue in "
        'spec.runPolicy.queueName, or set spec.runPolicy.queueName to "", which keeps the job out of the default queue '
        "of the chart, and the job continues",
    )


def test_the_answer_is_about_the_generation_that_was_asked_about() -> None:
    job_status: FineTuneJobStatus = conclude(changed(NEW)).status
    (judged,) = (item for item in job_status.conditions if item.type == ConditionType.PODS_ADMITTED)
    assert judged.observed_generation == 2
    again = dataclasses.replace(changed(NEW), status=job_status)
    assert conclude(again, answer=None).dry_runs == ()


@pytest.mark.parametrize("answer", [WRONG, FORBIDDEN, USED_UP, ABSENT], ids=lambda item: item.reason)
def test_a_preparation_that_runs_goes_on(answer: DryRunAnswer) -> None:
    of = ftj(RUNNING.status, data=SOURCE, runPolicy={"queueName": "reserch"})
    decision = conclude(changed(of), observed(child("tune-prep")), settings=SETTINGS, answer=answer)
    assert (decision.delete, decision.status.phase) == ((), "Preparing")
    assert said(decision, ConditionType.READY) == ("False", answer.reason, SAID.get(answer, answer.message))
    assert said(decision, ConditionType.RECONCILING) is not None


def test_a_preparation_that_runs_goes_on_where_its_change_cannot_be_checked() -> None:
    decision = conclude(changed(RUNNING), observed(child("tune-prep")), settings=SETTINGS, answer=AWAY)
    assert said(decision, ConditionType.PODS_ADMITTED) == ("Unknown", AWAY.reason, AWAY.message)
    ready = said(decision, ConditionType.READY)
    assert (ready and ready[1], decision.status.phase) == (ConditionReason.PREPARING, "Preparing")


@pytest.mark.parametrize("answer", [WRONG, FORBIDDEN, AWAY], ids=lambda item: item.reason)
def test_its_deadline_counts_whatever_the_answer_is(answer: DryRunAnswer) -> None:
    of = ftj(RUNNING.status, data=SOURCE, runPolicy={"activeDeadlineSeconds": 60})
    preparing = observed(child("tune-prep"), pods=[pod("tune-prep", component="prep")])
    decision = conclude(changed(of), preparing, at=later(61), answer=answer)
    reported = said(decision, ConditionType.FAILED)
    assert reported
    assert reported[1] == ConditionReason.DEADLINE_EXCEEDED


@pytest.mark.parametrize("judged", [ADMITTED, QUOTA], ids=lambda item: item.reason)
def test_once_the_data_are_prepared_the_training_job_itself_tells(judged: Condition) -> None:
    decision = conclude(ftj(status(ACCEPTED, PREPARED, judged, start_time=NOW), data=SOURCE))
    assert said(decision, ConditionType.PODS_ADMITTED) is None
    assert applied(decision)[-1] == JOB


def test_a_job_that_is_resumed_says_that_its_pods_are_refused() -> None:
    paused = conclude(ftj(data=SOURCE, suspend=True)).status
    refused = DryRunAnswer(False, ConditionReason.POD_REJECTED, "no")
    decision = conclude(ftj(paused, data=SOURCE), answer=refused)
    assert (decision.status.phase, decision.status.suspend_time) == ("Pending", None)
    ready = said(decision, ConditionType.READY)
    assert ready
    assert ready[:2] == ("False", ConditionReason.POD_REJECTED)
