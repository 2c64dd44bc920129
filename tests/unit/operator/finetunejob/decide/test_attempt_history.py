"""How the last attempts ended, in the status."""

from __future__ import annotations

import pytest

from finetune_crds.status import CheckpointStatus, EndedAttempt, LastFailure
from finetune_operator.finetunejob.decide.attempt_history import record_end
from finetune_operator.finetunejob.draft.draft import Draft
from fixtures.operator_in_memory.decisions import (
    EVICTED,
    NOW,
    SETTINGS,
    child,
    conclude,
    ended,
    ftj,
    later,
    observed,
    running,
    status,
)


def history(*attempts: int) -> list[EndedAttempt]:
    return [EndedAttempt(attempt=number, end_time=NOW, cause="Failed", exit_code=1) for number in attempts]


def test_a_failed_attempt_is_kept_with_its_pod_its_node_and_its_checkpoint() -> None:
    before = running(attempt=2, attempts=history(1), checkpoint=CheckpointStatus(step=40))
    pods = [ended("tune-train-2", 1, 1, "Traceback\nValueError: it broke", node="node-b", at=9)]
    decision = conclude(ftj(before), observed(child("tune-train-2", "Failed"), pods=pods), at=later(20))
    assert decision.status.attempts == [
        *history(1),
        EndedAttempt(
            attempt=2,
            end_time=later(20),
            cause="Failed",
            reason="Error",
            exit_code=1,
            pod="tune-train-2-1-abcde",
            node="node-b",
            checkpoint_step=40,
            message="Traceback\nValueError: it broke",
        ),
    ]


def test_an_attempt_that_was_stopped_is_kept_too() -> None:
    pods = [ended("tune-train-1", 0, 75, conditions=EVICTED)]
    decision = conclude(ftj(running()), observed(child("tune-train-1", "Failed"), pods=pods))
    (stopped,) = decision.status.attempts or []
    assert (stopped.attempt, stopped.cause, stopped.exit_code, decision.status.attempt) == (
        1,
        "Preempted",
        75,
        2,
    )


LINES = [f"line {number}" for number in range(30)]
MESSAGES: dict[str, tuple[str | None, str | None]] = {
    "none": (None, None),
    "blank": (" \n", None),
    "a log": ("\n".join(LINES) + "\n", "\n".join(LINES[-20:])),
    "a long line": ("start " + "x" * 2000, "…" + "x" * 999),
}


@pytest.mark.parametrize(("message", "kept"), MESSAGES.values(), ids=MESSAGES)
def test_the_last_lines_of_a_message_are_kept(message: str | None, kept: str | None) -> None:
    draft = Draft(ftj(status()), observed(), NOW, SETTINGS)
    record_end(draft, LastFailure(attempt=1, message=message), "Failed")
    assert [item.message for item in draft.status.attempts or []] == [kept]


def test_the_last_ten_attempts_are_kept_each_once() -> None:
    draft = Draft(ftj(status(attempts=history(*range(1, 11)))), observed(), NOW, SETTINGS)
    for number in (11, 11, 12):
        record_end(draft, LastFailure(attempt=number, exit_code=1), "Failed")
    assert draft.status.attempts == history(*range(3, 13))
