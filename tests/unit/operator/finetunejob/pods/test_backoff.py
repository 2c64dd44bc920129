"""Restarts that do not count wait longer and longer while they bring nothing."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import CheckpointStatus, FineTuneJobStatus, LastFailure
from finetune_operator.finetunejob.model import Observed
from finetune_operator.finetunejob.pods.backoff import Attempt, idle_restarts, wait_seconds
from fixtures.operator_in_memory.decisions import (
    applied,
    child,
    conclude,
    ended,
    ftj,
    later,
    observed,
    pod,
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


PROGRESS: dict[str, tuple[Attempt, bool]] = {
    "nothing reports steps, and it ended soon": (Attempt(seconds=299), False),
    "nothing reports steps, and it ran on": (Attempt(seconds=300), True),
    "a first checkpoint": (Attempt(seconds=20, step=5), True),
    "a newer checkpoint": (Attempt(seconds=20, step=10, step_before=5), True),
    "the same checkpoint after an hour": (Attempt(seconds=3600, step=5, step_before=5), False),
    "a later step": (Attempt(20, 5, 5, reported_step=9, reported_step_before=8), True),
    "the same step after an hour": (
        Attempt(3600, None, None, reported_step=9, reported_step_before=9),
        False,
    ),
}


@pytest.mark.parametrize(("attempt", "expected"), PROGRESS.values(), ids=PROGRESS)
def test_progress(attempt: Attempt, *, expected: bool) -> None:
    assert attempt.has_progressed is expected


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
    assert applied(started) == [
        "Service/tune",
        "ConfigMap/tune-train",
        "NetworkPolicy/tune",
        "Job/tune-train-2",
    ]
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


HOUR = 3600
WINDOW: dict[str, Any] = {"checkpoint": {"uri": "/c"}, "runPolicy": {"restartWindowSeconds": HOUR}}
FAILED_AT_5 = LastFailure(attempt=1, checkpoint_step=5, step=7)
# What was before, how far the second attempt came, when it ended, and since when there has been no progress, None after progress.
WINDOWS: dict[str, tuple[FineTuneJobStatus, Observed, int, int | None]] = {
    "the first in vain": (running(attempt=2, last_failure=FAILED_AT_5), preempted(2, step=5), 50, 50),
    "another in vain": (
        running(attempt=2, last_failure=FAILED_AT_5, no_progress_since=later(20)),
        preempted(2, step=5),
        HOUR,
        20,
    ),
    "a newer checkpoint": (
        running(attempt=2, last_failure=FAILED_AT_5, no_progress_since=later(20)),
        preempted(2, step=6),
        2 * HOUR,
        None,
    ),
}


@pytest.mark.parametrize(("before", "observation", "seconds", "since"), WINDOWS.values(), ids=WINDOWS)
def test_time_without_progress(
    before: FineTuneJobStatus, observation: Observed, seconds: int, since: int | None
) -> None:
    status = conclude(ftj(before, **WINDOW), observation, at=later(seconds)).status
    expected = None if since is None else later(since)
    assert (status.attempt, status.phase, status.no_progress_since) == (3, "Starting", expected)


def test_restarts_without_progress_end_with_their_window() -> None:
    before = running(attempt=2, last_failure=FAILED_AT_5, no_progress_since=later(20))
    decision = conclude(ftj(before, **WINDOW), preempted(2, step=5), at=later(20 + HOUR))
    assert said(decision, ConditionType.FAILED) == (
        "True",
        ConditionReason.NO_PROGRESS,
        "attempt 2 was preempted before it had a newer checkpoint: pod tune-train-2-0-abcde; the training has made no progress for 1h, "
        "longer than runPolicy.restartWindowSeconds = 3600: remove the cause, and create a FineTuneJob with another name",
    )
    assert (decision.status.restarts, applied(decision)) == (0, [])


def test_progress_before_a_failure_that_counts_starts_the_window_anew() -> None:
    before = running(attempt=2, last_failure=FAILED_AT_5, no_progress_since=later(20))
    failed = child("tune-train-2", "Failed", lived=2 * HOUR)
    observation = observed(
        failed, pods=[ended("tune-train-2", 0, 1)], mlflow=tracked(metrics={"checkpoint_step": 9.0})
    )
    counted = conclude(ftj(before, **WINDOW), observation, at=later(2 * HOUR)).status
    assert (counted.restarts, counted.no_progress_since) == (1, None)
    again = conclude(ftj(counted, **WINDOW), preempted(3, step=9), at=later(2 * HOUR + 60)).status
    assert (again.phase, again.no_progress_since) == ("Starting", later(2 * HOUR + 60))


def test_a_wait_is_no_time_without_progress() -> None:
    before = running(attempt=2, no_progress_since=later(20), waiting_since=later(50))
    at_work = observed(child("tune-train-2"), pods=[pod("tune-train-2")])
    assert conclude(ftj(before, **WINDOW), at_work, at=later(250)).status.no_progress_since == later(220)


def test_who_resumes_a_job_gives_it_a_new_window() -> None:
    before = running(attempt=2, no_progress_since=later(20), suspend_time=later(30))
    assert conclude(ftj(before, **WINDOW), observed(), at=later(2 * HOUR)).status.no_progress_since is None
