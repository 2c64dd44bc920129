"""Servers that lately did not answer: the time-out of one resource is enough for all that have the same key for the server."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from finetune_operator.errors import UNREACHABLE, Problem


@dataclass
class Outages:
    """What is known of servers that cannot be reached, each by a key of the caller's.

    Attributes:
        clock: seconds that only grow.
        seconds: how long a server that cannot be reached is left alone.
    """

    clock: Callable[[], float]
    seconds: float
    _until: dict[Hashable, tuple[float, Problem]] = field(default_factory=dict)

    def of(self, server: Hashable) -> Problem | None:
        """Why a server is not contacted now; None when it is to be contacted."""
        until, problem = self._until.get(server, (0.0, None))
        return problem if self.clock() < until else None

    def note(self, server: Hashable, problem: Problem) -> None:
        """Remember a problem with a server, if it is that the server cannot be reached."""
        if problem.reason in UNREACHABLE:
            now = self.clock()
            self._until = {key: held for key, held in self._until.items() if now < held[0]}
            self._until[server] = (now + self.seconds, problem)
