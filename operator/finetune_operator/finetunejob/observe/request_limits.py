"""Limits of concurrent requests, so that servers that do not answer cannot block requests to other servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary


@dataclass
class RequestLimits:
    """Limits of concurrent requests.

    Attributes:
        total: maximum for all namespaces together.
        per_namespace: maximum for one namespace.
        per_server: maximum for one server and one namespace. NB: many jobs use the same server. With a maximum for a server and all
            namespaces, the requests of one namespace could block those of all others.
    """

    total: int
    per_namespace: int
    per_server: int
    _turns: WeakValueDictionary[Hashable, asyncio.Semaphore] = field(default_factory=WeakValueDictionary)
    """Semaphores by namespace, and by namespace and server; each exists only while a request uses it or waits for it."""

    def __post_init__(self) -> None:
        self._turns_of_all = asyncio.Semaphore(self.total)

    @classmethod
    def of_threads(cls, total: int) -> RequestLimits:
        """Limits for a number of threads. One namespace may use half of them, and all of that half for one server.

        Most installations have only one server.
        """
        half = max(total // 2, 1)
        return cls(total, half, half)

    @asynccontextmanager
    async def turn(self, namespace: str, server: Hashable) -> AsyncIterator[None]:
        """Wait until the limits allow another request, and count one while the context is open."""
        # NB: in this order, a request that waits for its server takes no place that requests to other servers or of other namespaces need.
        async with (
            self._turns.setdefault((namespace, server), asyncio.Semaphore(self.per_server)),
            self._turns.setdefault(namespace, asyncio.Semaphore(self.per_namespace)),
            self._turns_of_all,
        ):
            yield
