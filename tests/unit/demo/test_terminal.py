"""Stages and moving lines."""

from __future__ import annotations

import io
import re

import pytest

from demo.kubectl import DemoError, wait_until_complete
from demo.terminal import Terminal, clock


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def test_stages_are_numbered_and_timed() -> None:
    out = io.StringIO()
    terminal = Terminal(out)
    with terminal.stage("first"):
        terminal.detail("something")
    with terminal.stage("second"):
        pass
    assert re.sub(r"\d:\d\d", "M:SS", out.getvalue()) == (
        "[M:SS] 1. first\n        something\n        done in 0 s\n[M:SS] 2. second\n        done in 0 s\n"
    )


def test_lines_go_below_the_one_that_moves() -> None:
    screen = Screen()
    terminal = Terminal(screen)
    terminal.live("one")
    terminal.live("two")
    terminal.say("done")
    assert screen.getvalue() == "\r\033[Kone\r\033[Ktwo\ndone\n"


def test_clock() -> None:
    assert [clock(seconds) for seconds in (0, 59.9, 60, 3600)] == ["0:00", "0:59", "1:00", "60:00"]


def test_waiting_says_what_is_missing_once_and_gives_up() -> None:
    said: list[str] = []
    with pytest.raises(DemoError, match="the cake: not after 0 seconds; instead: in the oven"):
        wait_until_complete("the cake", lambda: "in the oven", timeout=0, say=said.append)
    assert said == ["in the oven"]
