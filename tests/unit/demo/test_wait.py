"""When a wait of the demo ends, and what it prints meanwhile."""

from __future__ import annotations

import io
import re

import pytest

from demo import wait
from demo.kubectl import DemoError
from demo.terminal import Terminal
from demo.wait import ProgressLimit, wait_until_complete

AGAIN = "run `make demo` again, it continues where it stopped"
SILENT = f"the cake made no progress for 100 s (in the oven): {AGAIN}"
LATE = f"the cake did not end within 300 s (in the oven): {AGAIN}"


class Clock:
    """Moves only when a wait sleeps or a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


# Each with states, the seconds between two of them, and the error.
STATES: dict[str, tuple[list[str], int, str | None]] = {
    "a slow one that makes progress": (["flour", "eggs", "sugar"], 99, None),
    "one that is silent": (["flour", "flour", "flour"], 50, SILENT),
    "one that alternates between two states": (["flour", "eggs", "flour", "eggs"], 60, SILENT),
    "one that makes progress and does not end": (["flour", "eggs", "sugar", "milk", "salt"], 75, LATE),
}


@pytest.mark.parametrize(("states", "seconds", "error"), STATES.values(), ids=STATES)
def test_the_limit_counts_silence(states: list[str], seconds: int, error: str | None) -> None:
    clock = Clock()
    limit = ProgressLimit("the cake", 100, 300, clock)
    raised = None
    try:
        for state in states:
            limit.record(state)
            limit.check("in the oven")
            clock.sleep(seconds)
    except DemoError as reason:
        raised = str(reason)
    assert raised == error


def test_a_wait_says_what_is_missing_and_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, out = Clock(), io.StringIO()
    monkeypatch.setattr(wait, "time", clock)
    states = iter(["no pods yet"] * 2 + ["in the oven"] * 40)
    wait_until_complete(ProgressLimit("the cake", 100, 300, clock), lambda: next(states, None), Terminal(out))
    assert out.getvalue().splitlines() == [
        "        0:00  waiting for the cake: no pods yet",
        "        0:02  waiting for the cake: in the oven",
        "        0:32  waiting for the cake: in the oven",
    ]


def test_a_wait_without_progress_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(wait, "time", clock)
    limit = ProgressLimit("the cake", 100, 300, clock)
    with pytest.raises(DemoError, match=re.escape(SILENT)):
        wait_until_complete(limit, lambda: "in the oven", Terminal(io.StringIO()))
