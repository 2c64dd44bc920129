"""The class of a failed attempt, and what becomes of its job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.contract import PodError, TerminationMessage
from finetune_crds.status import AttemptCause, FineTuneJobStatus
from fixtures.operator_in_memory.decisions import (
    EVICTED,
    applied,
    child,
    conclude,
    ended,
    ftj,
    observed,
    running,
    said,
)

Json = dict[str, Any]
JOB = "tune-train-1"
BACKOFF = "Job has reached the specified backoff limit"
DISRUPTED = "Pod team/tune-train-1-0-abcde has condition DisruptionTarget matching FailJob rule at index 0"
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
