"""Restarts that do not count wait longer and longer while they bring nothing."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import CheckpointStatus, FineTuneJobStatus, LastFailure
from finetune_operator.finetunejob.model import Observed
from finetune_operator.finetunejob.pods.backoff import Attempt, idle_restarts, wait_seconds
from worlds.memory.decisions import (
    applied,
    child,
    conclude,
    ended,
    ftj,
    later,
    observed,
    running,
    said,
    tracked,
)

Json = dict[str, Any]

ATTEMPTS: dict[str, tuple[int, Attempt, int]] = {
    "nothing came of it": (0, Attempt(seconds=20), 1),
    "again": (1, Attempt(seconds=20), 2),
    "a checkpoint, the first": (4, Attempt(seconds=20, step=5), 0),
    "a newer checkpoint": (4, Attempt(seconds=20, step=10, step_before=5), 0),
    "the same checkpoint": (4, Attempt(seconds=20, step=5, step_before=5), 5),
    "it lived five minutes": (4, Attempt(seconds=300, step=5, step_before=5), 0),
    "it lived a second less": (4, Attempt(seconds=299, step=5, step_before=5), 5),
}


@pytest.mark.parametrize(("before", "attempt", "expected"), ATTEMPTS.values(), ids=ATTEMPTS)
def test_restarts_in_a_row(before: int, attempt: Attempt, expected: int) -> None:
    assert idle_restarts(before, attempt) == expected


def test_the_wait_doubles_up_to_five_minutes() -> None:
    assert [wait_seconds(idle) for idle in (0, 1, 2, 3, 4, 5, 6, 7, 10_000)] == [
        *(0, 10, 20, 40, 80, 160, 300, 300, 300)
    ]


def preempted(attempt: int, *, lived: float = 20, step: int | None = None) -> Observed:
    """An attempt whose pods ended with 75."""
    name = f"tune-train-{attempt}"
    metrics = {} if step is None else {"checkpoint_step": float(step)}
    failed = child(name, "Failed", "it ended", lived=lived)
    return observed(failed, pods=[ended(name, 0, 75)], mlflow=tracked(metrics=metrics))


def test_an_attempt_in_vain_is_followed_after_a_while() -> None:
    decision = conclude(ftj(running(), checkpoint={"uri": "/c"}), preempted(1), at=later(21))
    status = decision.status
    assert said(decision, ConditionType.TRAINED) == (
        "False",
        ConditionReason.RESTARTING,
        "attempt 1 was preempted before it had a checkpoint: pod tune-train-1-0-abcde; at 12:00:31 UTC, attempt 2 "
        "starts from the beginning: no checkpoint is recorded",
    )
    assert (status.attempt, status.restarts, status.idle_restarts, status.restart_time) == (
        2,
        0,
        1,
        later(31),
    )
    assert (decision.requeue_seconds, applied(decision)) == (10, [])

    waiting = conclude(ftj(status), preempted(1), at=later(24))
    assert (applied(waiting), waiting.requeue_seconds) == ([], 7)
    assert waiting.status == status

    started = conclude(ftj(status), preempted(1), at=later(31))
    assert applied(started) == ["Service/tune", "ConfigMap/tune-train", "Job/tune-train-2"]
    assert (started.status.restart_time, started.status.idle_restarts) == (None, 1)

    again = conclude(ftj(started.status), preempted(2), at=later(60))
    assert (again.status.idle_restarts, again.status.restart_time) == (2, later(80))


FRUITFUL: dict[str, tuple[FineTuneJobStatus, Observed]] = {
    "a first checkpoint": (running(idle_restarts=3), preempted(1, step=5)),
    "a newer checkpoint": (
        running(idle_restarts=3, last_failure=LastFailure(attempt=1, checkpoint_step=5), attempt=2),
        preempted(2, step=10),
    ),
    "time": (
        running(
            idle_restarts=3,
            last_failure=LastFailure(attempt=1, checkpoint_step=5),
            checkpoint=CheckpointStatus(step=5),
            attempt=2,
        ),
        preempted(2, lived=400, step=5),
    ),
}


@pytest.mark.parametrize(("before", "observation"), FRUITFUL.values(), ids=FRUITFUL)
def test_an_attempt_that_came_to_something_is_followed_at_once(
    before: FineTuneJobStatus, observation: Observed
) -> None:
    decision = conclude(ftj(before, checkpoint={"uri": "/c"}), observation, at=later(500))
    status = decision.status
    assert (status.idle_restarts, status.restart_time, decision.requeue_seconds) == (None, None, 0.1)


def test_the_failure_remembers_how_far_the_checkpoints_were() -> None:
    status = conclude(ftj(running(), checkpoint={"uri": "/c"}), preempted(1, step=5)).status
    assert status.last_failure is not None
    assert status.last_failure.checkpoint_step == 5


def test_a_restart_that_counts_does_not_wait() -> None:
    observation = observed(child("tune-train-1", "Failed", lived=1), pods=[ended("tune-train-1", 0, 1)])
    decision = conclude(ftj(running(), checkpoint={"uri": "/c"}), observation, at=later(2))
    assert (decision.status.restarts, decision.status.restart_time, decision.requeue_seconds) == (
        1,
        None,
        0.1,
    )


def test_a_restart_that_counts_ends_the_row_of_those_that_do_not() -> None:
    observation = observed(child("tune-train-1", "Failed", lived=1), pods=[ended("tune-train-1", 0, 1)])
    assert conclude(ftj(running(idle_restarts=6)), observation, at=later(2)).status.idle_restarts is None


def test_who_resumes_a_job_does_not_wait() -> None:
    waiting = running(attempt=2, idle_restarts=6, restart_time=later(300), suspend_time=later(0))
    decision = conclude(ftj(waiting), observed(), at=later(5))
    assert applied(decision)[-1] == "Job/tune-train-3"
    assert (decision.status.idle_restarts, decision.status.restart_time) == (None, None)
