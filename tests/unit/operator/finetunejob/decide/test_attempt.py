"""What follows a failed attempt."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.contract import PodError, TerminationMessage
from finetune_crds.status import CheckpointStatus, JobUids, LastFailure
from finetune_operator.finetunejob.model import Observed
from fixtures.operator_in_memory.decisions import (
    EVICTED,
    NEXT_JOB,
    NOW,
    applied,
    child,
    conclude,
    deleted_at,
    ended,
    ftj,
    later,
    observed,
    pod,
    running,
    said,
)

Json = dict[str, Any]
JOB = "tune-train-1"
BACKOFF = "Job has reached the specified backoff limit"

BOOM = TerminationMessage(error=PodError(reason="Boom", message="it blew up"))
WRONG = TerminationMessage(error=PodError(reason="ModelNotFound", message="there is no model"))
PEER_LOST = TerminationMessage(error=PodError(reason="PeerLost", message="rank 3 is gone"))


def failed_attempt(*pods: Json, message: str = BACKOFF) -> Observed:
    return observed(child(JOB, "Failed", message), pods=list(pods))


def test_a_restart_says_why_and_is_taken_up_at_once() -> None:
    decision = conclude(ftj(running()), failed_attempt(ended(JOB, 0, 1, BOOM)))
    assert said(decision, ConditionType.TRAINED) == (
        "False",
        ConditionReason.RESTARTING,
        "attempt 1 failed; pod tune-train-1-0-abcde ended with exit code 1: it blew up; attempt 2 starts "
        "from the beginning: spec.checkpoint is not set",
    )
    assert (decision.status.phase, decision.requeue_seconds) == ("Starting", 0.1)
    again = conclude(ftj(decision.status), failed_attempt(ended(JOB, 0, 1, BOOM)))
    assert applied(again) == [
        "Service/tune",
        "ConfigMap/tune-train",
        "NetworkPolicy/tune",
        "Job/tune-train-2",
    ]


SAVED = TerminationMessage(error=PodError(reason="Preempted", message="SIGTERM"))
SPENT = CheckpointStatus(step=9, uri="/c/9")
DELETED = "attempt 1 was stopped before it had a checkpoint: pod tune-train-1-1-abcde on node n was deleted; "
# The pods, the newest checkpoint, what is said, the reason of the failure, and the restarts that count.
DELETIONS: dict[str, tuple[list[Json], CheckpointStatus | None, str, str, int]] = {
    "a person deleted one": (
        [ended(JOB, 0, 75, SAVED, at=9), deleted_at(3, ended(JOB, 1, 75, SAVED, at=9, node="n"))],
        None,
        DELETED,
        "PodDeleted",
        0,
    ),
    "the Job controller deleted the others": (
        [ended(JOB, 0, 75, SAVED, at=9), deleted_at(9, ended(JOB, 1, 75, SAVED, at=12, node="n"))],
        None,
        "attempt 1 was preempted before it had a checkpoint: pod tune-train-1-0-abcde; ",
        "Preempted",
        0,
    ),
    "a node was drained": (
        [deleted_at(3, ended(JOB, 1, 75, SAVED, at=9, node="n", conditions=EVICTED))],
        SPENT,
        "attempt 1 was preempted before it had a newer checkpoint: pod tune-train-1-1-abcde on node n; ",
        "Preempted",
        0,
    ),
    "a command that ends at once": (
        [ended(JOB, 0, 1, PEER_LOST, at=5), deleted_at(3, ended(JOB, 1, 143, at=4, node="n"))],
        None,
        "attempt 1 failed; pod tune-train-1-1-abcde on node n ended with exit code 143 after it was deleted: the container ended with "
        "exit code 143 and no message: see kubectl logs tune-train-1-1-abcde; ",
        "PodDeleted",
        1,
    ),
    "a crash while one is deleted": (
        [ended(JOB, 0, 1, BOOM, at=9), deleted_at(3, ended(JOB, 1, 1, PEER_LOST, at=9, node="n"))],
        None,
        "attempt 1 failed; pod tune-train-1-0-abcde ended with exit code 1: it blew up; ",
        "Boom",
        1,
    ),
}


@pytest.mark.parametrize(
    ("pods", "checkpoint", "sentence", "reason", "restarts"), DELETIONS.values(), ids=DELETIONS
)
def test_a_pod_that_a_person_deleted(
    pods: list[Json], checkpoint: CheckpointStatus | None, sentence: str, reason: str, restarts: int
) -> None:
    last = LastFailure(attempt=0, checkpoint_step=9)
    before = running(checkpoint=checkpoint, last_failure=last)
    decision = conclude(ftj(before, checkpoint={"uri": "/c"}), failed_attempt(*pods), at=later(13))
    trained, after = said(decision, ConditionType.TRAINED), decision.status
    assert trained is not None
    assert trained[2].startswith(sentence)
    assert after.last_failure is not None
    assert (after.last_failure.reason, after.restarts) == (reason, restarts)


RECORDED = JobUids(train="uid-of-tune-train-1", train_attempt=1)
WAS_DELETED = "Job tune-train-1 was deleted before its end was recorded"


@pytest.mark.parametrize("pods", [[], [pod(JOB, 0)]], ids=["and its pods", "but not yet its pods"])
def test_a_job_that_somebody_deleted_before_its_end_was_recorded(pods: list[Json]) -> None:
    decision = conclude(ftj(running(jobs=RECORDED)), observed(pods=pods))
    after = decision.status
    assert (after.attempt, after.restarts, applied(decision)) == (2, 0, [])
    assert after.last_failure == LastFailure(reason="JobDeleted", message=WAS_DELETED, attempt=1)
    causes = [end.cause for end in after.attempts or []]
    assert (after.attempt, after.restarts or 0, causes) == (2, 0, ["JobDeleted"])
    assert said(decision, ConditionType.TRAINED) == (
        "False",
        ConditionReason.RESTARTING,
        f"{WAS_DELETED} and does not count as a restart; at 12:00:10 UTC, attempt 2 starts from the beginning: spec.checkpoint is not "
        "set",
    )
    started = conclude(ftj(after), observed(), at=later(10))
    assert (started.status.attempt, applied(started)[-1:]) == (2, ["Job/tune-train-2"])


PLACES: dict[str, tuple[Json, str]] = {
    "a failure": (
        ended(JOB, 0, 1, BOOM, node="node-1"),
        "attempt 1 failed; pod tune-train-1-0-abcde on node node-1 ended with exit code 1: it blew up; ",
    ),
    "a preemption": (
        ended(JOB, 1, 143, conditions=EVICTED, node="node-2"),
        "attempt 1 was preempted soon after it started: pod tune-train-1-1-abcde on node node-2; ",
    ),
}


@pytest.mark.parametrize(("pod_body", "expected"), PLACES.values(), ids=PLACES)
def test_a_restart_says_which_pod_on_which_node(pod_body: Json, expected: str) -> None:
    condition = said(conclude(ftj(running()), failed_attempt(pod_body)), ConditionType.TRAINED)
    assert condition is not None
    assert (
        condition[2].removeprefix(expected).removeprefix("at 12:00:10 UTC, ").startswith("attempt 2 starts")
    )


def _carried_on(uri: str) -> Json:
    return {"checkpoint": {"uri": "/c", "resumeFrom": {"type": "Uri", "uri": uri}}}


RESUMES: dict[str, tuple[Json, CheckpointStatus | None, str]] = {
    "a checkpoint": (
        {"checkpoint": {"uri": "/c"}},
        CheckpointStatus(step=9, uri="/c/9"),
        "resumes from the newest checkpoint",
    ),
    "another job's": (_carried_on("/c/first"), None, "starts from the newest checkpoint in /c/first"),
    "one of another job's": (
        _carried_on("/c/first/step-00000040"),
        None,
        "starts from the checkpoint /c/first/step-00000040",
    ),
    "none yet": ({"checkpoint": {"uri": "/c"}}, None, "starts from the beginning: no checkpoint is recorded"),
    "none wanted": ({}, None, "starts from the beginning: spec.checkpoint is not set"),
    "one's own command": ({"trainer": {"command": ["a"]}}, None, "starts your command again"),
}


@pytest.mark.parametrize(("parts", "checkpoint", "expected"), RESUMES.values(), ids=RESUMES)
def test_where_the_next_attempt_starts(
    parts: Json, checkpoint: CheckpointStatus | None, expected: str
) -> None:
    decision = conclude(ftj(running(checkpoint=checkpoint), **parts), failed_attempt(ended(JOB, 0, 1, BOOM)))
    condition = said(decision, ConditionType.TRAINED)
    assert condition is not None
    assert condition[2].endswith(f"attempt 2 {expected}")


NO_MEMORY: dict[str, tuple[Json, str]] = {
    "the built-in loop": (
        {},
        "create a FineTuneJob with another name and a lower training.perDeviceBatchSize",
    ),
    "one's own command": ({"trainer": {"command": ["a"]}}, "reduce the memory that your command uses"),
}


@pytest.mark.parametrize(("parts", "advice"), NO_MEMORY.values(), ids=NO_MEMORY)
def test_out_of_memory(parts: Json, advice: str) -> None:
    status = conclude(ftj(running(), **parts), failed_attempt(ended(JOB, 0, 137, reason="OOMKilled"))).status
    assert status.last_failure is not None
    assert status.last_failure.message == (
        f"the container used more memory than its limit: raise the limit, or {advice}"
    )


@pytest.mark.parametrize(
    ("checkpoint", "next_job"),
    [
        (None, NEXT_JOB),
        (CheckpointStatus(step=4), f"{NEXT_JOB}, with checkpoint.resumeFrom to continue this run"),
    ],
    ids=["from the beginning", "from a checkpoint"],
)
def test_the_end_says_the_limit_that_was_reached_the_cause_and_how_to_continue(
    checkpoint: CheckpointStatus | None, next_job: str
) -> None:
    before = running(attempt=3, restarts=2, checkpoint=checkpoint)
    observation = observed(child("tune-train-3", "Failed", BACKOFF), pods=[ended("tune-train-3", 0, 1, BOOM)])
    decision = conclude(ftj(before, runPolicy={"maxRestarts": 1}), observation, at=later(9))
    message = (
        "attempt 3 failed and runPolicy.maxRestarts = 1 is "
        f"reached; pod tune-train-3-0-abcde ended with exit code 1: it blew up{next_job}"
    )
    assert said(decision, ConditionType.FAILED) == ("True", ConditionReason.MAX_RESTARTS_REACHED, message)
    assert said(decision, ConditionType.TRAINED) == ("False", ConditionReason.MAX_RESTARTS_REACHED, message)
    assert (decision.status.restarts, decision.status.completion_time) == (2, later(9))


def test_the_failure_is_written_down() -> None:
    status = conclude(ftj(running()), failed_attempt(ended(JOB, 1, 1, BOOM))).status
    assert status.last_failure is not None
    assert status.last_failure.to_json() == {
        "pod": "tune-train-1-1-abcde",
        "exitCode": 1,
        "reason": "Boom",
        "message": "it blew up",
        "attempt": 1,
    }


def test_a_failure_without_pods_says_what_the_job_says() -> None:
    decision = conclude(ftj(running(), runPolicy={"maxRestarts": 0}), failed_attempt())
    assert said(decision, ConditionType.FAILED) == (
        "True",
        ConditionReason.MAX_RESTARTS_REACHED,
        "attempt 1 failed and runPolicy.maxRestarts = 0 is reached; the pods that could explain the failure no longer exist: "
        f"{BACKOFF}{NEXT_JOB}",
    )


def test_pods_of_other_attempts_do_not_count() -> None:
    observation = failed_attempt(ended("tune-train-0", 0, 64, WRONG), ended(JOB, 0, 1, BOOM))
    assert conclude(ftj(running()), observation).status.attempt == 2


def test_the_checkpoint_that_a_pod_told_of_at_its_end_is_noted() -> None:
    message = TerminationMessage(error=BOOM.error, checkpoint_step=30)
    decision = conclude(ftj(running(), checkpoint={"uri": "/c"}), failed_attempt(ended(JOB, 0, 1, message)))
    assert decision.status.checkpoint is not None
    assert decision.status.checkpoint.step == 30


def test_an_attempt_that_fails_but_does_not_end_names_the_pod_that_stays() -> None:
    stuck = {**pod(JOB, 1, ready=False), "spec": {"nodeName": "node-2"}}
    stuck["metadata"]["deletionTimestamp"] = NOW.isoformat()
    observation = observed(child(JOB, "FailureTarget"), pods=[ended(JOB, 0, 1, BOOM), stuck])
    decision = conclude(ftj(running()), observation)
    assert said(decision, ConditionType.TRAINED) == (
        "False",
        ConditionReason.TRAINING,
        "attempt 1 has failed and waits for pod tune-train-1-1-abcde on node node-2 to stop",
    )
    assert (decision.status.attempt, decision.status.restarts) == (1, 0)


def test_an_attempt_whose_pods_have_failed_does_not_start() -> None:
    observation = observed(child(JOB), pods=[ended(JOB, 0, 1, BOOM), ended(JOB, 1, 1, PEER_LOST)])
    reported = said(conclude(ftj(running()), observation), ConditionType.TRAINED)
    assert reported == ("False", ConditionReason.TRAINING, "attempt 1 has failed")


def test_a_failure_in_a_log_is_told_by_its_last_line() -> None:
    log = "Traceback (most recent call last):\n  ...\nValueError: no such column"
    decision = conclude(ftj(running()), failed_attempt(ended(JOB, 0, 1, log)))
    reported = said(decision, ConditionType.TRAINED)
    assert reported is not None
    assert reported[2].startswith(
        "attempt 1 failed; pod tune-train-1-0-abcde ended with exit code 1: ValueError: no such column; attempt 2 "
    )
    assert decision.status.last_failure is not None
    assert decision.status.last_failure.message == log
