"""What follows a failed attempt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.contract import PodError, TerminationMessage
from finetune_crds.status import AttemptCause, CheckpointStatus, FineTuneJobStatus, JobUids, LastFailure
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
WHERE = "Pod team/tune-train-1-0-abcde"
DISRUPTED = f"{WHERE} has condition DisruptionTarget matching FailJob rule at index 0"
EXIT_75 = "Container trainer for pod team/p failed with exit code 75 matching FailJob rule at index 1"
EXIT_64 = "Container trainer for pod team/p failed with exit code 64 matching FailJob rule at index 1"
FATAL = "Container trainer for pod team/p failed with exit code 64 matching FailJob rule at index 2"

BOOM = TerminationMessage(error=PodError(reason="Boom", message="it blew up"))
WRONG = TerminationMessage(error=PodError(reason="ModelNotFound", message="there is no model"))
PEER_LOST = TerminationMessage(error=PodError(reason="PeerLost", message="rank 3 is gone"))


@dataclass
class Outcome:
    """What becomes of the job: the reason of Failed, or the attempt and restarts that follow; and the class of the failure."""

    failed: str | None = None
    attempt: int = 1
    restarts: int = 0
    cause: AttemptCause = "Fatal"


AGAIN = Outcome(attempt=2, restarts=1, cause="Failed")
PREEMPTED = Outcome(attempt=2, restarts=0, cause="Preempted")

CASES: dict[str, tuple[str, list[Json], Json, Outcome]] = {
    "a crash": (BACKOFF, [ended(JOB, 0, 1, BOOM)], {}, AGAIN),
    "a crash beside peers that were stopped for it": (
        BACKOFF,
        [ended(JOB, 0, 1, BOOM, at=0), ended(JOB, 1, 75, at=9)],
        {},
        AGAIN,
    ),
    "out of memory, which the next attempt uses less of": (
        BACKOFF,
        [ended(JOB, 0, 137, reason="OOMKilled")],
        {},
        Outcome(attempt=2, restarts=0, cause="OutOfMemory"),
    ),
    "no pod is left": (BACKOFF, [], {}, AGAIN),
    "restarts are used up": (
        BACKOFF,
        [ended(JOB, 0, 1, BOOM)],
        {"maxRestarts": 0},
        Outcome(ConditionReason.MAX_RESTARTS_REACHED, cause="Failed"),
    ),
    "preempted after a checkpoint": (EXIT_75, [ended(JOB, 0, 75), ended(JOB, 1, 75)], {}, PREEMPTED),
    "preempted, as the pod alone tells": (BACKOFF, [ended(JOB, 0, 75)], {}, PREEMPTED),
    "preempted, and a peer noticed": (
        BACKOFF,
        [ended(JOB, 0, 1, PEER_LOST, at=0), ended(JOB, 1, 75, at=3)],
        {},
        PREEMPTED,
    ),
    "preempted, and the pods are gone": (DISRUPTED, [], {}, PREEMPTED),
    "a drained node": (BACKOFF, [ended(JOB, 0, 143, conditions=EVICTED)], {}, PREEMPTED),
    "preempted with no restarts left": (EXIT_75, [ended(JOB, 0, 75)], {"maxRestarts": 0}, PREEMPTED),
    "a wrong recipe": (FATAL, [ended(JOB, 0, 64, WRONG)], {}, Outcome(ConditionReason.RECIPE_WRONG)),
    "wrong data": (FATAL, [ended(JOB, 0, 65, WRONG)], {}, Outcome(ConditionReason.DATA_WRONG)),
    "a fatal code of one's own": (
        BACKOFF,
        [ended(JOB, 0, 42)],
        {"fatalExitCodes": [42]},
        Outcome(ConditionReason.FATAL_EXIT_CODE),
    ),
    "64 is no longer fatal": (BACKOFF, [ended(JOB, 0, 64)], {"fatalExitCodes": [42]}, AGAIN),
    "a code among those to retry": (BACKOFF, [ended(JOB, 0, 7)], {"retryableExitCodes": [7]}, AGAIN),
    "a code that is not among those to retry": (
        BACKOFF,
        [ended(JOB, 0, 8)],
        {"retryableExitCodes": [7]},
        Outcome(ConditionReason.FATAL_EXIT_CODE),
    ),
}


def find_outcome(after: FineTuneJobStatus, failed: str | None = None) -> Outcome:
    """The outcome that a status shows."""
    (end,) = after.attempts or []
    assert end.cause is not None
    return Outcome(failed, after.attempt or 0, after.restarts or 0, end.cause)


@pytest.mark.parametrize(("message", "pods", "policy", "expected"), CASES.values(), ids=CASES)
def test_outcome(message: str, pods: list[Json], policy: Json, expected: Outcome) -> None:
    observation = observed(child(JOB, "Failed", message), pods=pods)
    decision = conclude(ftj(running(), runPolicy=policy), observation)
    failed = said(decision, ConditionType.FAILED)
    assert find_outcome(decision.status, failed[1] if failed else None) == expected
    assert applied(decision) == []


# What the Job was made with, what runPolicy says by now, the Job's message, and whether the restart counts.
CHANGED: dict[str, tuple[list[int], list[int], str, Outcome]] = {
    "75 was fatal, and a node was drained": ([75], [64], DISRUPTED, PREEMPTED),
    "75 was fatal, a code was added, and that one matched": ([64, 75], [64], EXIT_64, AGAIN),
    "75 has become fatal, and the pods are gone": ([64], [64, 75], EXIT_75, AGAIN),
    "75 is no longer fatal, and the pods are gone": ([75], [64], EXIT_75, PREEMPTED),
}


@pytest.mark.parametrize(("made_with", "now", "message", "expected"), CHANGED.values(), ids=CHANGED)
def test_rules_are_those_that_the_attempt_was_made_with(
    made_with: list[int], now: list[int], message: str, expected: Outcome
) -> None:
    observation = observed(child(JOB, "Failed", message, fatal=made_with))
    status = conclude(ftj(running(), runPolicy={"fatalExitCodes": now}), observation).status
    assert find_outcome(status) == expected


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
    assert applied(again) == ["Service/tune", "ConfigMap/tune-train", "Job/tune-train-2"]


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
    assert find_outcome(after) == Outcome(attempt=2, cause="JobDeleted")
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
