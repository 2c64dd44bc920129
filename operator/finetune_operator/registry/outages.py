"""Servers and logins that lately failed: the time-out of one resource is enough for all that have the same key for the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

from finetune_operator.errors import UNREACHABLE, ExternalError, Problem

Answer = TypeVar("Answer")

# Longest duration of an attempt: a login to Databricks makes three requests of at most 10 s each.
_ATTEMPT_SECONDS = 30.0


@dataclass
class Outages:
    """What is known of servers that cannot be reached, each by a key of the caller's.

    NB: not for threads; only the event loop uses it.

    Attributes:
        clock: monotonic seconds.
        seconds: how long a server that cannot be reached is left alone.
    """

    clock: Callable[[], float]
    seconds: float
    _until: dict[Hashable, tuple[float, Problem]] = field(default_factory=dict)

    async def ask(self, server: Hashable, call: Callable[[], Answer]) -> Answer:
        """The result of a call in a thread, which is not made while no response is expected from the server.

        Raises:
            ExternalError: the server cannot be reached, or refuses.
        """
        return await self._attempt(server, call, lambda problem: problem.reason in UNREACHABLE)

    async def log_in(self, login: Hashable, call: Callable[[], Answer]) -> Answer:
        """The result of a call in a thread that logs in, which is not made while it lately failed, for whatever reason.

        Args:
            login: the server and the credentials, so that corrected credentials are used at once.

        Raises:
            ExternalError: the server cannot be reached, or does not accept the credentials.
        """
        return await self._attempt(("login", login), call, lambda _problem: True)

    def of(self, server: Hashable) -> Problem | None:
        """Why a server is not contacted now; None when it is to be contacted."""
        until, problem = self._until.get(server, (0.0, None))
        return problem if self.clock() < until else None

    def note(self, server: Hashable, problem: Problem) -> None:
        """Remember a problem with a server, if it is that the server cannot be reached."""
        if problem.reason in UNREACHABLE:
            self._remember(server, problem)

    async def _attempt(
        self, server: Hashable, call: Callable[[], Answer], is_remembered: Callable[[Problem], bool]
    ) -> Answer:
        problem = self.of(server)
        if problem:
            raise ExternalError(problem)
        if server in self._until:
            # One resource tries again. The others do not wait for it: a server that lets all of them time out would keep every worker.
            self._until[server] = (self.clock() + _ATTEMPT_SECONDS, self._until[server][1])
        try:
            answer = await asyncio.to_thread(call)
        except BaseException as error:
            self._until.pop(server, None)
            if isinstance(error, ExternalError) and is_remembered(error.problem):
                self._remember(server, error.problem)
            raise
        self._until.pop(server, None)
        return answer

    def _remember(self, server: Hashable, problem: Problem) -> None:
        now = self.clock()
        # NB: an expired entry is kept until the next problem, so that only one resource tries the server again.
        self._until = {key: entry for key, entry in self._until.items() if now < entry[0] + _ATTEMPT_SECONDS}
        self._until[server] = (now + self.seconds, problem)
