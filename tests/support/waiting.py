"""Wait for a condition with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from support.process import Process

T = TypeVar("T")
PATIENCE = 120.0
"""How many seconds a busy machine may need. It delays no condition that holds earlier."""


class WaitError(RuntimeError):
    """A condition did not hold in time; the message names it and shows the state instead."""


def wait_for(
    what: str,
    check: Callable[[], T | None],
    seconds: float = PATIENCE,
    *processes: Process,
    instead: Callable[[], object] | None = None,
    pause: float = 0.1,
) -> T:
    """The first true value of `check`.

    Args:
        what: names the condition in the error.
        check: called until it is true. It may raise an error to end the wait.
        seconds: how long the condition may take.
        processes: processes that the condition depends on: the wait fails as soon as one of them ends.
        instead: called after the deadline; the error shows its value.
        pause: seconds between two calls of `check`.

    Raises:
        WaitError: the condition did not hold in time, or a process ended.
    """
    deadline = time.monotonic() + seconds
    while not (value := check()):
        for process in processes:
            if not process.alive():
                raise WaitError(f"{process.name} ended while waiting for {what}:\n{process.tail()}")
        if time.monotonic() > deadline:
            alternative = f"; instead: {instead()}" if instead else ""
            tails = "".join(f"\n--- {process.log}\n{process.tail()}" for process in processes)
            raise WaitError(f"{what}: not after {seconds:g} seconds{alternative}{tails}")
        time.sleep(pause)
    return value
