"""Waits of the demo: they end when nothing changes any more, since a busy machine is slow and still makes progress."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from demo.kubectl import DemoError
from demo.terminal import Terminal, clock

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

SILENCE_SECONDS = 900
MAX_SECONDS = 4 * 3600
SECONDS_BETWEEN_LINES = 30


@dataclass
class ProgressLimit:
    """Ends a wait for an object that makes no progress.

    Only a new state is progress: a pod that alternates between ErrImagePull and ImagePullBackOff makes none.

    Attributes:
        name: what the demo waits for, as the error names it.
        silence_seconds: how long the object may make no progress.
        max_seconds: how long the wait may take in all.
        clock: monotonic seconds.
    """

    name: str
    silence_seconds: float = SILENCE_SECONDS
    max_seconds: float = MAX_SECONDS
    clock: Callable[[], float] = time.monotonic
    _states: set[Hashable] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Start the wait."""
        self._started_at = self._progressed_at = self.clock()

    def elapsed_seconds(self) -> float:
        """How long the wait has taken."""
        return self.clock() - self._started_at

    def record(self, state: Hashable) -> None:
        """Record a state; a new one is progress."""
        if state not in self._states:
            self._states.add(state)
            self._progressed_at = self.clock()

    def check(self, description: str) -> None:
        """End the wait if it takes too long.

        Args:
            description: the state of the object, for the error.

        Raises:
            DemoError: the object made no progress for too long, or the whole wait takes too long.
        """
        if self.clock() - self._progressed_at >= self.silence_seconds:
            overrun = f"made no progress for {self.silence_seconds:.0f} s"
        elif self.elapsed_seconds() >= self.max_seconds:
            overrun = f"did not end within {self.max_seconds:.0f} s"
        else:
            return
        raise DemoError(
            f"{self.name} {overrun} ({description}): run `make demo` again, it continues where it stopped"
        )


def wait_until_complete(
    limit: ProgressLimit, describe_missing: Callable[[], str | None], terminal: Terminal
) -> None:
    """Wait until nothing is missing.

    What is missing is shown when it changes, and every half minute with the time that the wait has taken.

    Raises:
        DemoError: the wait exceeds its limit.
    """
    shown: set[str] = set()
    shown_at = 0.0
    while (missing := describe_missing()) is not None:
        limit.record(missing)
        elapsed = limit.elapsed_seconds()
        if missing not in shown or elapsed - shown_at >= SECONDS_BETWEEN_LINES:
            terminal.detail(f"{clock(elapsed)}  waiting for {limit.name}: {missing}")
            shown.add(missing)
            shown_at = elapsed
        limit.check(missing)
        time.sleep(1)
