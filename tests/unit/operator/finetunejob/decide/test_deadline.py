"""runPolicy.activeDeadlineSeconds."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import FineTuneJobStatus
from finetune_operator.finetunejob.model import Observed
from fixtures.operator_in_memory.decisions import (
    NOW,
    SOURCE,
    child,
    conclude,
    deleted,
    ended,
    ftj,
    later,
    lost,
    observed,
    pod,
    running,
    said,
    stamped,
    status,
)

LIMIT: dict[str, Any] = {"runPolicy": {"activeDeadlineSeconds": 100}}
AT_WORK = observed(child("tune-train-1"), pods=[pod("tune-train-1", 0), pod("tune-train-1", 1)])
DONE = observed(child("tune-train-1", "Complete"))
QUEUED = observed({**child("tune-train-1"), "spec": {"suspend": True}})
PENDING = observed(child("tune-train-1"), pods=[pod("tune-train-1", 0, "Pending")])
PASSED = (
    "the job ran longer than runPolicy.activeDeadlineSeconds = 100: create a FineTuneJob with another name and a "
    "higher limit"
)

CASES: dict[str, tuple[FineTuneJobStatus, Observed, float, str | None]] = {
    "before it": (running(), AT_WORK, 99, None),
    "at it": (running(), AT_WORK, 100, PASSED),
    "time spent waiting does not count": (running(waiting_seconds=50), AT_WORK, 149, None),
    "time after a wait counts": (running(waiting_seconds=50), AT_WORK, 150, PASSED),
    "the end of a wait is recorded first": (running(waiting_since=NOW), AT_WORK, 1000, None),
    "in a queue": (running(), QUEUED, 1000, None),
    "no node takes its pods": (running(), PENDING, 1000, None),
    "nothing has started": (status(), observed(), 1000, None),
    "trained in time, and nobody was there to write it down": (running(), DONE, 1000, None),
}


@pytest.mark.parametrize(("before", "observation", "seconds", "expected"), CASES.values(), ids=CASES)
def test_deadline(
    before: FineTuneJobStatus, observation: Observed, seconds: float, expected: str | None
) -> None:
    decision = conclude(ftj(before, **LIMIT), observation, at=later(seconds))
    failed = said(decision, ConditionType.FAILED)
    assert failed == (expected and ("True", ConditionReason.DEADLINE_EXCEEDED, expected))
    assert deleted(decision) == (["tune-train-1"] if expected else [])


def test_it_is_looked_at_again_when_the_deadline_passes() -> None:
    decision = conclude(ftj(running(), **LIMIT), AT_WORK, at=later(98))
    assert decision.requeue_seconds == 2


def test_preparation_counts() -> None:
    before = status(start_time=NOW)
    preparing = observed(child("tune-prep"), pods=[pod("tune-prep", component="prep", node="node-1")])
    decision = conclude(ftj(before, data=SOURCE, **LIMIT), preparing, at=later(100))
    assert (decision.status.phase, deleted(decision)) == ("Failed", ["tune-prep"])
    assert decision.status.completion_time == later(100)


def started(index: int, seconds: float) -> Json:
    """A pod that a node took so many seconds after NOW."""
    return pod("tune-train-1", index, startTime=stamped(seconds))


WAITS: dict[str, tuple[FineTuneJobStatus, Observed, dict[str, Any], tuple[float | None, int | None]]] = {
    "it has not started": (status(), observed(), {}, (None, None)),
    "its start is not recorded yet": (status(), PENDING, {}, (60, None)),
    "its Job is in a queue": (running(), QUEUED, {}, (60, None)),
    "it still is": (running(waiting_since=later(10)), QUEUED, {}, (10, None)),
    "no node takes its pods": (running(), PENDING, {}, (60, None)),
    "one pod of two is on a node": (
        running(),
        observed(child("tune-train-1"), pods=[pod("tune-train-1", 0, "Pending"), started(1, 5)]),
        {},
        (None, None),
    ),
    "its image is being pulled": (
        running(),
        observed(child("tune-train-1"), pods=[pod("tune-train-1", 0, "Pending", node="node-1")]),
        {},
        (None, None),
    ),
    "Kueue took its node": (
        running(),
        observed(QUEUED.jobs["tune-train-1"], pods=[ended("tune-train-1", 0, 143)]),
        {},
        (60, None),
    ),
    "its Job replaces a pod": (
        status(start_time=NOW),
        observed(child("tune-prep"), pods=[ended("tune-prep", 0, 1, component="prep")]),
        {"data": SOURCE},
        (None, None),
    ),
    "between two attempts": (running(), observed(child("tune-train-1", "Failed")), {}, (None, None)),
    "its pods were lost, and no node takes the next ones": (
        running(attempt=2),
        observed(
            child("tune-train-1", deletionTimestamp="t"),
            child("tune-train-2"),
            pods=[lost(pod("tune-train-1", 0, node="n")), pod("tune-train-2", 0, "Pending")],
        ),
        {},
        (60, None),
    ),
    "its preparation runs elsewhere": (status(start_time=NOW), observed(), {"data": SOURCE}, (None, None)),
    "it is suspended while its pods stop": (running(), AT_WORK, {"suspend": True}, (60, None)),
    "it goes on at once": (running(waiting_since=later(10), waiting_seconds=5), observed(), {}, (None, 55)),
    "its first pod started while the operator was down": (
        running(waiting_since=later(10), waiting_seconds=5),
        observed(child("tune-train-1"), pods=[started(0, 40), started(1, 30)]),
        {},
        (None, 25),
    ),
    "it ended while the operator was down": (
        running(waiting_since=later(10)),
        observed(child("tune-train-1", "Failed"), pods=[ended("tune-train-1", 0, 1, startTime=stamped(20))]),
        {},
        (None, 10),
    ),
}


@pytest.mark.parametrize(("before", "observation", "spec", "expected"), WAITS.values(), ids=WAITS)
def test_waiting(
    before: FineTuneJobStatus,
    observation: Observed,
    spec: dict[str, Any],
    expected: tuple[float | None, int | None],
) -> None:
    after = conclude(ftj(before, **spec), observation, at=later(60)).status
    since, seconds = expected
    assert (after.waiting_since, after.waiting_seconds) == (None if since is None else later(since), seconds)
