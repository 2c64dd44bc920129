"""How many reads of servers run at a time, so that servers which do not answer keep no job from the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary


@dataclass
class ReadLimits:
    """How many reads run at a time.

    Attributes:
        total: of all namespaces.
        per_namespace: of a namespace.
        per_server: of a namespace to one server. NB: not of all namespaces: a slow server of one would keep the jobs of the
            others from a server that many share.
    """

    total: int
    per_namespace: int
    per_server: int
    _turns: WeakValueDictionary[Hashable, asyncio.Semaphore] = field(default_factory=WeakValueDictionary)
    """By namespace, and by namespace and server."""

    def __post_init__(self) -> None:
        self._turns_of_all = asyncio.Semaphore(self.total)

    @classmethod
    def of_threads(cls, total: int) -> ReadLimits:
        """Half of the threads for each namespace, also where it has one server: most installations have one MLflow server."""
        half = max(total // 2, 1)
        return cls(total, half, half)

    @asynccontextmanager
    async def turn(self, namespace: str, server: Hashable) -> AsyncIterator[None]:
        """Wait until few enough reads run, and count as one of them."""
        # NB: who waits for a server holds no turn that the jobs of another server or namespace need.
        async with (
            self._turns.setdefault((namespace, server), asyncio.Semaphore(self.per_server)),
            self._turns.setdefault(namespace, asyncio.Semaphore(self.per_namespace)),
            self._turns_of_all,
        ):
            yield
