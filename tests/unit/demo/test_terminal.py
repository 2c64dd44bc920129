"""Stages and moving lines."""

from __future__ import annotations

import io
import re

from demo.__main__ import create_terminal as first_stage
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


def test_the_table_has_the_seconds_of_each_stage() -> None:
    title = "kubectl patch mprom champion --type merge -p " + "x" * 60
    terminal = Terminal(io.StringIO(), stages=[("programs and images", 71.6), (title, 9.2)])
    assert list(terminal.table()) == [
        "   72 s   1. programs and images",
        f"    9 s   2. {title[:77]}...",
    ]


def test_the_time_of_the_environment_is_the_first_stage() -> None:
    began = first_stage(30)
    assert began.stages == [("the Python environment", 30)]
    assert 30 <= began.elapsed() < 40
    assert first_stage(0).stages == []


def test_lines_go_below_the_one_that_moves() -> None:
    screen = Screen()
    terminal = Terminal(screen)
    terminal.live("one")
    terminal.live("two")
    terminal.say("done")
    assert screen.getvalue() == "\r\033[Kone\r\033[Ktwo\ndone\n"


def test_clock() -> None:
    assert [clock(seconds) for seconds in (0, 59.9, 60, 3600)] == ["0:00", "0:59", "1:00", "60:00"]
