"""Recent failures of servers and logins: after the timeout of one resource, no other resource tries the server for a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from finetune_operator.errors import UNREACHABLE, ExternalError, NotSentError, Problem

Answer = TypeVar("Answer")

# Longest duration of an attempt: a login to Databricks makes three requests of at most 10 s each.
_ATTEMPT_SECONDS = 30.0


class _Outage(NamedTuple):
    """Until when a server is not contacted, and why."""

    until: float
    problem: Problem


def is_unreachable(problem: Problem) -> bool:
    """Whether a problem is that a server cannot be reached."""
    return problem.reason in UNREACHABLE


@dataclass
class Outages:
    """The servers that cannot be reached, by a key that the caller chooses.

    NB: not thread-safe; use it on the event loop only.

    Attributes:
        clock: monotonic seconds.
        seconds: how long a server is not contacted after it could not be reached.
    """

    clock: Callable[[], float]
    seconds: float
    _outages: dict[Hashable, _Outage] = field(default_factory=dict)
    """By server; the failures of logins are under keys of their own, see `log_in`."""

    async def ask(self, server: Hashable, call: Callable[[], Answer]) -> Answer:
        """Call a function in a thread, and return its result. During an outage of the server, raise the problem instead.

        Raises:
            ExternalError: the server cannot be reached, or refuses.
        """
        return await self._attempt(server, call, is_unreachable)

    async def log_in(self, login: Hashable, call: Callable[[], Answer]) -> Answer:
        """Call a function that logs in, in a thread, and return its result. For a while after a failure, raise its problem instead.

        Args:
            login: the server and the credentials, so that corrected credentials are used at once.

        Raises:
            ExternalError: the server cannot be reached, or does not accept the credentials.
        """
        return await self._attempt(("login", login), call, lambda _problem: True)

    def of(self, server: Hashable) -> Problem | None:
        """Return the reason why a server is not contacted now; None if it is contacted."""
        outage = self._outages.get(server)
        return outage.problem if outage and self.clock() < outage.until else None

    def note(self, server: Hashable, problem: Problem) -> None:
        """Record an outage, if the problem is that the server cannot be reached."""
        if is_unreachable(problem):
            self._remember(server, problem)

    @asynccontextmanager
    async def attempt(
        self, server: Hashable, is_remembered: Callable[[Problem], bool] = is_unreachable
    ) -> AsyncIterator[None]:
        """A context for calls to a server; during an outage of the server, raise the problem instead.

        Args:
            is_remembered: whether a problem that the calls raise is an outage.

        Raises:
            ExternalError: the server is not contacted now.
        """
        problem = self.of(server)
        if problem:
            raise ExternalError(problem)
        last_outage = self._outages.get(server)
        if last_outage:
            # The outage may be over: this resource tries again, and the others still get the problem. If all tried, a server that does
            # not answer would occupy every worker.
            self._outages[server] = last_outage._replace(until=self.clock() + _ATTEMPT_SECONDS)
        try:
            yield
        except BaseException as error:
            self._outages.pop(server, None)
            is_answer = not isinstance(error, NotSentError)
            if isinstance(error, ExternalError) and is_answer and is_remembered(error.problem):
                self._remember(server, error.problem)
            raise
        self._outages.pop(server, None)

    async def _attempt(
        self, server: Hashable, call: Callable[[], Answer], is_remembered: Callable[[Problem], bool]
    ) -> Answer:
        """Call a function in a thread, unless the server is not contacted now. Remember the problem of the call if `is_remembered`."""
        async with self.attempt(server, is_remembered):
            return await asyncio.to_thread(call)

    def _remember(self, server: Hashable, problem: Problem) -> None:
        now = self.clock()
        # NB: an expired entry is kept for at least one attempt, so that only one resource tries the server again.
        self._outages = {
            key: outage for key, outage in self._outages.items() if now < outage.until + _ATTEMPT_SECONDS
        }
        self._outages[server] = _Outage(now + self.seconds, problem)
