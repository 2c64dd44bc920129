"""The probes of the operator's pod: whether it works, and whether it keeps up."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from aiohttp import web

from finetune_operator.controller.workqueue import Queues

# If a resync is late by more than this, the event loop or the connection to the API server is stuck.
_STUCK_SECONDS = 300.0
# If a resource waits longer than this for a worker, the operator does not keep up.
_LATE_SECONDS = 300.0
READINESS_PATH = "/readyz"

Check = Callable[[], str | None]


@dataclass
class Health:
    """The times at which the operator last made progress.

    Attributes:
        last_resync: monotonic seconds of the last complete list of all resources.
    """

    queues: Queues
    resync_seconds: float
    last_resync: float = field(default_factory=time.monotonic)

    def why_stuck(self) -> str | None:
        """Return the reason why the process must be restarted; None while it works.

        NB: the age of the queue is ignored: workers that wait for a slow MLflow would wait for it after a restart too.
        """
        seconds = time.monotonic() - self.last_resync
        if seconds > self.resync_seconds + _STUCK_SECONDS:
            return f"the last resync was {seconds:.0f} s ago"
        return None

    def why_late(self) -> str | None:
        """Return the reason why resources wait; None while the operator keeps up."""
        age = self.queues.oldest_age_seconds()
        if age > _LATE_SECONDS:
            return f"a resource has waited {age:.0f} s for a worker"
        return self.why_stuck()


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
    application.router.add_get(READINESS_PATH, _build_handler(health.why_late))
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
