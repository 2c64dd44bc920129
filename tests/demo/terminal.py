"""What the demo prints: stages with their times, and one line that moves while a job runs."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH = 80


@dataclass
class Terminal:
    """A terminal, or a file that lines go to when there is none."""

    out: TextIO = field(default_factory=lambda: sys.stdout)
    began: float = field(default_factory=time.monotonic)
    stages: list[tuple[str, float]] = field(default_factory=list)
    """The title and the seconds of each stage that is done."""
    _live: bool = False

    @property
    def interactive(self) -> bool:
        """Whether a line can be written over."""
        return self.out.isatty()

    def say(self, text: str = "") -> None:
        """Print lines below the animated line."""
        self._settle()
        print(text, file=self.out, flush=True)

    def detail(self, text: str) -> None:
        """Print a line that belongs to the present stage."""
        self.say(f"        {text}")

    def live(self, text: str) -> None:
        """Write over the moving line; only where `interactive`."""
        width = shutil.get_terminal_size().columns - 1
        self.out.write(f"\r\033[K{text[:width]}")
        self.out.flush()
        self._live = True

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """Say what begins, and how long it took."""
        began = time.monotonic()
        self.say(f"[{clock(began - self.began)}] {len(self.stages) + 1}. {title}")
        yield
        seconds = time.monotonic() - began
        self.stages.append((title, seconds))
        self.detail(f"done in {seconds:.0f} s")

    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def table(self) -> Iterator[str]:
        """What each stage took, in lines."""
        for number, (title, seconds) in enumerate(self.stages, 1):
            yield f"{seconds:5.0f} s  {number:2}. {shorten(title)}"

    def _settle(self) -> None:
        if self._live:
            self.out.write("\n")
            self._live = False


def shorten(text: str) -> str:
    """A text that fits a line of a table."""
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."


def clock(seconds: float) -> str:
    """Seconds as m:ss."""
    return f"{int(seconds) // 60:d}:{int(seconds) % 60:02d}"
