"""SIGTERM at every place where a pod may be: all ranks end with 75, and report the newest checkpoint (traps 8 and 9)."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

from finetune_crds.contract import EXIT_PREEMPTED
from finetune_trainer.train import run
from finetune_trainer.train.loop import Loop
from finetune_trainer.train.model.weights import fill, load
from support.ports import free_port, listens
from support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.pods import Outcome, Pod

NOT_STARTED = "stopped by SIGTERM before the first step"


def ending(outcome: Outcome) -> tuple[int, str, int | None]:
    """The exit code, the sentence, and the step of the checkpoint to go on from."""
    assert outcome.message is not None, outcome.output
    assert outcome.message.error is not None, outcome.output
    return outcome.code, outcome.message.error.message, outcome.message.checkpoint_step


def asked_at(
    monkeypatch: pytest.MonkeyPatch, where: object, name: str, when: Callable[..., bool] = lambda *_: True
) -> None:
    """Send SIGTERM to this process at the beginning of a call."""
    call: Any = getattr(where, name)

    def call_after_request(*args: Any, **options: Any) -> Any:
        if when(*args):
            signal.raise_signal(signal.SIGTERM)
        return call(*args, **options)

    monkeypatch.setattr(where, name, call_after_request)


def test_sigterm_is_acted_on_wherever_a_rank_is(pod: Pod, capsys: pytest.CaptureFixture[str]) -> None:
    """One attempt after the other, each of which goes on where the one before was stopped."""
    pod = pod.but(
        {
            "training.evalEverySteps": 2,
            "checkpoint": {"uri": str(pod.folder / "checkpoints"), "everySteps": 4},
        }
    )
    places: list[tuple[tuple[object, str, Any], tuple[int, str, int | None], list[int]]] = [
        ((load, "build_skeleton", lambda *_: True), (75, NOT_STARTED, None), []),
        ((Loop, "_evaluate_base", lambda *_: True), (75, NOT_STARTED, None), []),
        (
            (Loop, "_evaluate", lambda loop: loop.progress.step == 2),
            (75, "stopped by SIGTERM after the checkpoint of step 2", 2),
            [1, 2],
        ),
        ((fill, "fill", lambda *_: True), (75, NOT_STARTED, 2), []),
        (
            (Loop, "_evaluate", lambda loop: loop.progress.step == 6),
            (75, "stopped by SIGTERM after the checkpoint of step 6", 6),
            [3, 4, 5, 6],
        ),
        (
            (run, "deliver", lambda *_: True),
            (75, "stopped by SIGTERM after the last step, 6, before the model was delivered", 6),
            [],
        ),
    ]
    for place, end, steps in places:
        with pytest.MonkeyPatch.context() as patch:
            asked_at(patch, *place)
            outcome = pod.run_here(capsys)
        assert (ending(outcome), list(outcome.losses)) == (end, steps), outcome.output
        assert f"evaluation at step {end[2]}" not in outcome.output or place[1] == "deliver"
    outcome = pod.run_here(capsys)
    assert (outcome.code, outcome.losses) == (0, {})


STOPS_EARLY = {"training.evalEverySteps": 2, "training.earlyStopping": {"patience": 1, "minDelta": 100.0}}
AFTER_ALL_STEPS: dict[str, tuple[dict[str, Any], str, int, list[int]]] = {
    "in the last step": ({}, "_train_step", 5, [1, 2, 3, 4, 5, 6]),
    "in the final evaluation": ({}, "_evaluate", 6, [1, 2, 3, 4, 5, 6]),
    "behind an early stop": (STOPS_EARLY, "_finish", 2, [1, 2]),
}


@pytest.mark.parametrize("case", AFTER_ALL_STEPS.values(), ids=AFTER_ALL_STEPS)
def test_a_run_that_is_kept_nowhere_is_delivered_before_it_stops(
    pod: Pod,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    case: tuple[dict[str, Any], str, int, list[int]],
) -> None:
    fields, call, step, steps = case
    asked_at(monkeypatch, Loop, call, lambda loop: loop.progress.step == step)
    outcome = pod.but(fields).run_here(capsys)
    assert (outcome.code, list(outcome.losses)) == (0, steps), outcome.output


def test_a_pod_that_waits_for_its_gang_stops_at_once(pod: Pod) -> None:
    port = free_port()
    pod = pod.but({"distributed.nodes": 2}).in_gang(0, port)
    process = pod.start()
    wait_for(f"a server on port {port}", lambda: listens(port))
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == EXIT_PREEMPTED
    outcome = pod.wait(process)
    assert ending(outcome) == (75, NOT_STARTED, None)
    assert list(pod.folder.glob("finetune-*")) == []
