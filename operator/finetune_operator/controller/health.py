"""The probes of the operator's pod: whether it works, and whether it keeps up."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from aiohttp import web

from finetune_operator.controller.workqueue import Queues
from finetune_operator.fence import seconds_since_boot

# If a resync is late by more than this, the event loop is stuck, or requests do not end.
_STUCK_SECONDS = 300.0
# If a resource waits longer than this for a worker, the operator does not keep up.
_LATE_SECONDS = 300.0
READINESS_PATH = "/readyz"

Check = Callable[[], str | None]


@dataclass
class Health:
    """The times at which the operator last made progress.

    Attributes:
        why_not_electable: returns why this replica could not become the leader, or None.
        last_list: when the lists were last in time: all resources were listed, or no list was due; None before the first list.
        last_attempt: when a resync last ended, complete or not; at first, the start of the process.
    """

    queues: Queues
    resync_seconds: float
    why_not_electable: Check = lambda: None
    clock: Callable[[], float] = seconds_since_boot
    last_list: float | None = None
    last_attempt: float = field(init=False)

    def __post_init__(self) -> None:
        self.last_attempt = self.clock()

    def note_lists_in_time(self) -> None:
        """Record that all resources were just listed, or that no list is due yet."""
        self.last_list = self.last_attempt = self.clock()

    def why_stuck(self) -> str | None:
        """Return the reason why the process must be restarted; None while it works.

        NB: what a restart does not change is ignored: an API server that is unavailable, and workers that wait for a slow MLflow.
        """
        seconds = self.clock() - self.last_attempt
        if seconds > self.resync_seconds + _STUCK_SECONDS:
            return f"the last resync ended {seconds:.0f} s ago"
        return None

    def why_unready(self) -> str | None:
        """Return the reason why this replica does not keep up or could not take over; None if it is ready."""
        if self.last_list is None:
            return "the objects have not been listed yet"
        seconds = self.clock() - self.last_list
        if seconds > self.resync_seconds + _STUCK_SECONDS:
            return f"the last complete resync was {seconds:.0f} s ago"
        age = self.queues.oldest_age_seconds()
        if age > _LATE_SECONDS:
            return f"a resource has waited {age:.0f} s for a worker"
        return self.why_not_electable()


@asynccontextmanager
async def serve_probes(health: Health, address: str) -> AsyncIterator[None]:
    """Answer the probes while the context is open.

    Args:
        address: URL of the liveness probe. The readiness probe has the same host and port, and the path /readyz.

    Raises:
        OSError: the port is in use.
    """
    parts = urlsplit(address)
    application = web.Application()
    application.router.add_get(parts.path or "/", _build_handler(health.why_stuck))
    application.router.add_get(READINESS_PATH, _build_handler(health.why_unready))
    runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.TCPSite(runner, parts.hostname, parts.port).start()
        yield
    finally:
        await runner.cleanup()


def _build_handler(check: Check) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(_request: web.Request) -> web.StreamResponse:
        problem = check()
        return web.Response(text=problem or "ok", status=503 if problem else 200)

    return answer
