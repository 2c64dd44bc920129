"""runPolicy.activeDeadlineSeconds."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import FineTuneJobStatus
from finetune_operator.finetunejob.model import Observed
from worlds.memory.decisions import (
    NOW,
    SOURCE,
    child,
    conclude,
    deleted,
    ftj,
    later,
    observed,
    pod,
    running,
    said,
    status,
)

LIMIT: dict[str, Any] = {"runPolicy": {"activeDeadlineSeconds": 100}}
AT_WORK = observed(child("tune-train-1"), pods=[pod("tune-train-1", 0), pod("tune-train-1", 1)])
DONE = observed(child("tune-train-1", "Complete"))
PASSED = "the job ran longer than runPolicy.activeDeadlineSeconds = 100: raise it in a new FineTuneJob"

CASES: dict[str, tuple[FineTuneJobStatus, Observed, float, str | None]] = {
    "before it": (running(), AT_WORK, 99, None),
    "at it": (running(), AT_WORK, 100, PASSED),
    "time suspended is left out": (running(suspended_seconds=50), AT_WORK, 149, None),
    "and then it passes too": (running(suspended_seconds=50), AT_WORK, 150, PASSED),
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
    decision = conclude(ftj(before, data=SOURCE, **LIMIT), observed(child("tune-prep")), at=later(100))
    assert (decision.status.phase, deleted(decision)) == ("Failed", ["tune-prep"])
    assert decision.status.completion_time == later(100)
