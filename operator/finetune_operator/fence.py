"""The fence: this process sends requests that write only while its replica holds the Lease of the operator.

Every request of the operator leaves through `kube` or `bounded`, and both pass requests that write through the fence. It is checked when
the request begins, with a timer that ends the request before the Lease ends, and again when the request gets a kept connection, on which
it would be sent before the timer could end it. A process that was paused beyond its Lease therefore sends no write when it continues.

NB: no client can exclude a pause between the last check and the system call that sends the request. After such a pause, the server decides:
the API server by the preconditions of the request. Its parameter `timeout` has no effect then, since it counts from the arrival.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import aiohttp

# Only Linux has CLOCK_BOOTTIME; on macOS, CLOCK_MONOTONIC also counts suspended time.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
# A write that gets less time than this would fail without a known result.
_MIN_WRITE_SECONDS = 0.5
READING_METHODS = ("GET", "HEAD")


def seconds_since_boot() -> float:
    """A clock that nobody sets, and that also counts the time for which the machine was suspended."""
    return time.clock_gettime(_CLOCK)


class EventLoop(asyncio.SelectorEventLoop):
    """The event loop of every request. Its timers also count the time for which the machine was suspended.

    NB: asyncio's own loops use a clock that stands still meanwhile. After the machine has continued, a write that was about to be sent
    would still have its whole timeout, while another replica holds the Lease. The wall clock would not do: it can be set.
    """

    def time(self) -> float:
        """Seconds since the machine was started."""
        return seconds_since_boot()


class NotLeaderError(Exception):
    """A request that writes was not sent, because this replica does not hold the Lease of the operator."""

    def __init__(self) -> None:
        super().__init__(
            "this replica of the operator no longer holds its Lease, so the request was not sent"
        )


class Fence:
    """Lets requests that write pass until the time that `open_until` sets. A new fence lets them pass without an end."""

    def __init__(self, clock: Callable[[], float] = seconds_since_boot) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._end = math.inf
        self._writes = 0

    @property
    def is_open(self) -> bool:
        """Whether requests that write pass now."""
        return self._clock() < self._end

    @property
    def writes(self) -> int:
        """The number of requests that write and have no complete response yet."""
        return self._writes

    def open_until(self, end: float) -> None:
        """Let requests that write pass until a time of the fence's clock. Each ends before the time that is set when it begins."""
        with self._lock:
            self._end = end

    def close(self) -> None:
        """Refuse every further request that writes."""
        self.open_until(-math.inf)

    @asynccontextmanager
    async def limit(
        self, method: str, timeout_seconds: float, *, is_read: bool = False
    ) -> AsyncIterator[float]:
        """A context that cancels one request at a timeout, and yields the timeout. A request that writes also ends before the fence closes.

        Args:
            timeout_seconds: timeout of a request that the fence does not limit.
            is_read: whether the request writes nothing whatever its method, such as a search by POST.

        Raises:
            NotLeaderError: the request writes, and the fence is closed or about to close.
            TimeoutError: the request did not end in time.
        """
        # NB: the time is read before the check of the fence. A process that is paused after the check finds the timeout expired when the
        # event loop runs; see `EventLoop` for a machine that is suspended. If a connection is kept, the loop does not run before the request
        # is sent, see `build_trace`.
        started = asyncio.get_running_loop().time()
        if is_read or method in READING_METHODS:
            async with asyncio.timeout_at(started + timeout_seconds):
                yield timeout_seconds
            return
        timeout_seconds = min(timeout_seconds, self._begin_write())
        try:
            async with asyncio.timeout_at(started + timeout_seconds):
                yield timeout_seconds
        finally:
            with self._lock:
                self._writes -= 1

    def build_trace(self) -> aiohttp.TraceConfig:
        """Build a trace for an aiohttp session that keeps connections: it checks the fence again when a request that writes gets one of them.

        The request then raises NotLeaderError. For a new connection, the event loop runs, and with it the timer of `limit`.
        """
        trace = aiohttp.TraceConfig()

        async def note_method(
            _: aiohttp.ClientSession, context: SimpleNamespace, params: aiohttp.TraceRequestStartParams
        ) -> None:
            context.is_read = params.method in READING_METHODS

        async def check(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
            if not context.is_read and not self.is_open:
                raise NotLeaderError

        trace.on_request_start.append(note_method)
        trace.on_connection_reuseconn.append(check)
        return trace

    def _begin_write(self) -> float:
        """Count a write, and return the seconds until the fence closes."""
        with self._lock:
            remaining_seconds = self._end - self._clock()
            if remaining_seconds < _MIN_WRITE_SECONDS:
                raise NotLeaderError
            self._writes += 1
        return remaining_seconds


PROCESS_FENCE = Fence()
"""The fence of this process. NB: not injected, so that no client can be created without it."""
