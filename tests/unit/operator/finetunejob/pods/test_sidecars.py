"""Containers that a webhook puts beside the main one: the end of the main container decides."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.contract import PodError, TerminationMessage
from finetune_crds.evaluation import EvaluationResult
from finetune_crds.status import FineTuneJobStatus, ModelStatus
from finetune_operator import names
from finetune_operator.registry.base import RegisteredVersion
from fixtures.operator_in_memory.decisions import (
    ACCEPTED,
    ADMITTED,
    EVALUATED,
    NOW,
    PREPARED,
    SETTINGS,
    SOURCE,
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
    observed,
    pod,
    running,
    said,
    status,
    tracked,
)
from fixtures.operator_processes.jobs import PREPARED as PREPARED_DATA

Json = dict[str, Any]
JOB = "tune-train-1"
PREP = "tune-prep"
BOOM = TerminationMessage(error=PodError(reason="Boom", message="it blew up"))
PEER_LOST = TerminationMessage(error=PodError(reason="PeerLost", message="rank 0 is gone"))
PROXY: Json = {"name": "istio-proxy", "state": {"running": {}}}
BROKEN_PROXY: Json = {"name": "istio-proxy", "state": {"terminated": {"exitCode": 1}}}
PREPARING = status(
    ACCEPTED,
    ADMITTED,
    condition(ConditionType.PREPARED, "False", ConditionReason.PREPARING),
    start_time=NOW,
)


def beside(proxy: Json, pod_body: Json, phase: str = "Running") -> Json:
    """The same pod with a container of a webhook, in another phase."""
    state = pod_body["status"]
    return {
        **pod_body,
        "status": {**state, "phase": phase, "containerStatuses": [*state["containerStatuses"], proxy]},
    }


def kept(job_name: str, index: int, code: int, message: TerminationMessage | str = "", **more: Any) -> Json:
    """A pod whose main container has ended, and in which the proxy still runs."""
    return beside(PROXY, ended(job_name, index, code, message, **more))


def lost(pod_body: Json) -> Json:
    """The same pod with a main container whose state was lost: the kubelet gives it no time."""
    first, *other_items = pod_body["status"]["containerStatuses"]
    unknown = {"exitCode": 137, "reason": "ContainerStatusUnknown", "finishedAt": None}
    statuses = [{**first, "state": {"terminated": unknown}}, *other_items]
    return {**pod_body, "status": {**pod_body["status"], "containerStatuses": statuses}}


# The pods, the seconds since the first end, and the reason of Trained.
GANGS: dict[str, tuple[list[Json], float, ConditionReason]] = {
    "all trainers have succeeded": ([kept(JOB, 0, 0), kept(JOB, 1, 0)], 0, ConditionReason.TRAINED),
    "a trainer still runs": ([pod(JOB, 0), kept(JOB, 1, 0)], 600, ConditionReason.TRAINING),
    "a trainer is not there": ([kept(JOB, 0, 0)], 600, ConditionReason.STARTING),
    "all trainers have ended": ([kept(JOB, 0, 1, BOOM), kept(JOB, 1, 0)], 0, ConditionReason.RESTARTING),
    "a peer may still say why": ([pod(JOB, 0), kept(JOB, 1, 1, PEER_LOST)], 5, ConditionReason.TRAINING),
    "a peer hangs": ([pod(JOB, 0), kept(JOB, 1, 1, PEER_LOST)], 30, ConditionReason.RESTARTING),
    "an end without a time": ([pod(JOB, 0), lost(kept(JOB, 1, 137))], 0, ConditionReason.RESTARTING),
    "an end without a time, and one with": (
        [pod(JOB, 0), lost(kept(JOB, 1, 137)), kept(JOB, 2, 1, PEER_LOST)],
        5,
        ConditionReason.TRAINING,
    ),
    "no proxy": ([pod(JOB, 0), ended(JOB, 1, 1, PEER_LOST)], 600, ConditionReason.TRAINING),
    "a wrong recipe": ([kept(JOB, 0, 64, BOOM), kept(JOB, 1, 64)], 0, ConditionReason.RECIPE_WRONG),
}


@pytest.mark.parametrize(("pods", "seconds", "reason"), GANGS.values(), ids=GANGS)
def test_the_trainers_decide_how_an_attempt_ends(
    pods: list[Json], seconds: float, reason: ConditionReason
) -> None:
    decision = conclude(ftj(running()), observed(child(JOB), pods=pods), at=later(seconds))
    trained = said(decision, ConditionType.TRAINED)
    assert trained is not None
    assert trained[1] == reason


def test_a_failed_attempt_is_told_by_its_trainers_and_its_job_goes_before_the_next_one() -> None:
    pods = [kept(JOB, 0, 1, BOOM, at=3), kept(JOB, 1, 1, PEER_LOST, at=1)]
    decision = conclude(ftj(running()), observed(child(JOB), pods=pods), at=later(4))
    failure, after = decision.status.last_failure, decision.status
    assert failure is not None
    assert (failure.reason, failure.message, after.attempt, after.restarts) == ("Boom", "it blew up", 2, 1)
    again = conclude(ftj(after), observed(child(JOB), pods=pods))
    assert (applied(again), deleted(again)) == ([], [JOB])


def test_a_container_that_failed_does_not_fail_an_attempt_whose_trainers_succeeded() -> None:
    pods = [beside(BROKEN_PROXY, ended(JOB, index, 0), "Failed") for index in (0, 1)]
    decision = conclude(ftj(running()), observed(child(JOB, "Failed"), pods=pods))
    assert decision.status.phase == "Succeeded"


def evaluated() -> FineTuneJobStatus:
    return status(ACCEPTED, PREPARED, TRAINED, EVALUATED, attempt=1, start_time=NOW)


DONE: dict[str, tuple[FineTuneJobStatus, str, Json]] = {
    "preparation": (running(), PREP, {"container": names.PREP_CONTAINER, "component": names.PREP}),
    "training": (status(ACCEPTED, PREPARED, TRAINED, attempt=1, start_time=NOW), JOB, {}),
}


@pytest.mark.parametrize(("before", "job_name", "more"), DONE.values(), ids=DONE)
def test_a_step_that_is_done_gives_its_resources_back(
    before: FineTuneJobStatus, job_name: str, more: Json
) -> None:
    for pods, expected in (
        ([kept(job_name, 0, 0, **more)], [job_name]),
        ([ended(job_name, 0, 0, **more)], []),
    ):
        decision = conclude(
            ftj(before, register={"model": "m"}), observed(child(job_name), pods=pods), settings=SETTINGS
        )
        assert deleted(decision) == expected


LIMIT: Json = {"runPolicy": {"activeDeadlineSeconds": 100}}
EVALUATION = "tune-evaluate"
EVALUATING = status(
    ACCEPTED,
    PREPARED,
    TRAINED,
    condition(ConditionType.EVALUATED, "False", ConditionReason.EVALUATING),
    attempt=1,
    start_time=NOW,
    model=ModelStatus(name="m", version="4", uri="models:/m/4", summary="m/4"),
)
EVALUATION_RESULT = TerminationMessage(
    evaluation=EvaluationResult(rows=50, digest="d1", metrics={"eval_f1": 0.5}, base={})
)


def evaluate_pod(code: int, message: TerminationMessage | str = "") -> Json:
    return kept(EVALUATION, 0, code, message, container=names.EVALUATE_CONTAINER, component=names.EVALUATE)


# The status, the Job, its pods, and whether the job fails after its deadline.
LATE: dict[str, tuple[FineTuneJobStatus, str, list[Json], bool]] = {
    "all trainers have succeeded": (running(), JOB, [kept(JOB, 0, 0), kept(JOB, 1, 0)], False),
    "a trainer still runs": (running(), JOB, [pod(JOB, 0), kept(JOB, 1, 0)], True),
    "a trainer has failed": (running(), JOB, [kept(JOB, 0, 0), kept(JOB, 1, 1, BOOM)], True),
    "the evaluation has succeeded": (EVALUATING, EVALUATION, [evaluate_pod(0, EVALUATION_RESULT)], False),
    "the evaluation has failed": (EVALUATING, EVALUATION, [evaluate_pod(1, BOOM)], True),
}


@pytest.mark.parametrize(("before", "job_name", "pods", "is_failed"), LATE.values(), ids=LATE)
def test_the_deadline_ends_with_the_last_main_container(
    before: FineTuneJobStatus, job_name: str, pods: list[Json], *, is_failed: bool
) -> None:
    evaluation: Json = {"evaluation": {}} if job_name == EVALUATION else {}
    job = ftj(before, register={"model": "m"}, **evaluation, **LIMIT)
    annotations = {names.ANNOTATION_VERSION: "4"}
    observation = observed(
        child(job_name, annotations=annotations), pods=pods, mlflow=tracked(RegisteredVersion("m", "4"))
    )
    _, reason, _ = failure_of(conclude(job, observation, at=later(1000), settings=SETTINGS)) or ("", None, "")
    assert reason == (ConditionReason.DEADLINE_EXCEEDED if is_failed else None)


def prep_pod(code: int, message: TerminationMessage | str = "") -> Json:
    return kept(PREP, 0, code, message, container=names.PREP_CONTAINER, component=names.PREP)


def test_a_preparation_is_done_when_its_container_is() -> None:
    observation = observed(child(PREP), pods=[prep_pod(0, PREPARED_DATA)])
    decision = conclude(ftj(PREPARING, data=SOURCE), observation)
    prepared = said(decision, ConditionType.PREPARED)
    assert prepared is not None
    assert prepared[0] == "True"
    assert deleted(decision) == []


ENDS: dict[str, tuple[Json, ConditionReason]] = {
    "a crash": (prep_pod(1, BOOM), ConditionReason.PREPARATION_FAILED),
    "wrong data": (prep_pod(65, BOOM), ConditionReason.DATA_WRONG),
}


@pytest.mark.parametrize(("pod_body", "reason"), ENDS.values(), ids=ENDS)
def test_a_preparation_that_fails_says_why_it_is_not_tried_again(
    pod_body: Json, reason: ConditionReason
) -> None:
    decision = conclude(ftj(PREPARING, data=SOURCE), observed(child(PREP), pods=[pod_body]))
    assert failure_of(decision) == (
        "True",
        reason,
        "preparation failed in pod tune-prep-0-abcde: it blew up; the Job does not retry, because istio-proxy "
        "still runs in the pod: inject this container as a sidecar (an init container with restartPolicy: Always), "
        "or exclude the pods of the job from injection",
    )
    assert deleted(decision) == [PREP]
