"""A run that is ended twenty times, at random moments, is the run that nobody touched."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from long.amounts import ENDS, SEED
from support.ends import (
    RANKS,
    Attempt,
    Signal,
    check_end,
    check_like_untouched,
    in_folder,
    newest_complete,
    tiny_gang,
)

STEPS = 8 * ENDS
METHODS: dict[str, dict[str, Any]] = {
    "Full": {"type": "Full"},
    # Its frozen weights are others than those of the base, and no checkpoint has them.
    "PiSSA": {"type": "LoRA", "lora": {"rank": 4, "dropout": 0.1, "init": "PiSSA"}},
}


def ends(dice: random.Random) -> Iterator[tuple[Signal, int, float]]:
    """SIGTERM and SIGKILL in turn: the step to wait for (0: none, during start-up), then seconds."""
    for end in range(ENDS):
        early = end % 5 in (0, 3)
        step = 0 if early else dice.randint(1, 7)
        yield "TERM" if end % 2 else "KILL", step, dice.uniform(0, 6.0 if early else 0.1)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_run_that_is_ended_again_and_again_is_the_run_that_nobody_touched(
    tmp_path: Path, method: dict[str, Any]
) -> None:
    untouched = tiny_gang(tmp_path, steps=STEPS).but({"method": method})
    expected = untouched.run()
    assert expected.code == 0, expected.output
    ended = in_folder(untouched, tmp_path / "ended")
    print(f"random ends with SEED = {SEED}")
    dice = random.Random(SEED)  # noqa: S311 - the seed makes a failure repeatable
    step_before = 0
    losses: dict[int, float] = {}
    for how, step, seconds in ends(dice):
        with Attempt.start(ended) as attempt:
            if step:
                attempt.run_to_step(step)
            attempt.run_for(seconds)
            attempt.send(how, dice.randrange(RANKS))
            outcome = attempt.end()
        newest = newest_complete(ended)
        print(
            f"{how} after {step} steps and {seconds:.2f} s: exit code {outcome.code}, {step_before} -> {newest}"
        )
        check_end(outcome, how, step_before, newest)
        for at, loss in outcome.losses.items():
            assert losses.setdefault(at, loss) == loss, f"step {at} was another one"
        step_before = newest
    check_like_untouched(ended, losses, untouched, expected)
