"""The answers of the probes."""

from __future__ import annotations

import aiohttp
import pytest

from finetune_operator.controller.health import Health, serve_probes
from finetune_operator.controller.workqueue import Queues, WorkQueue
from support.ports import free_port

LATE = "a resource has waited 301 s for a worker"
STUCK = "the last resync ended 331 s ago"
STALE = "the last complete resync was 331 s ago"
UNLISTED = "the objects have not been listed yet"
NO_LEASE = "Lease fs/finetune-operator could not be read or renewed for 21 s"
# Interval of the resync; seconds since the last list, since its last attempt, and of a key in its queue; the Lease; what the probes say.
CASES: dict[str, tuple[float, float | None, float, float, str | None, str | None, str | None]] = {
    "nothing is late": (30, 20, 20, 0, None, None, None),
    "nothing is listed yet": (30, None, 20, 0, None, None, UNLISTED),
    "a list that is a little late": (30, 329, 329, 0, None, None, None),
    "a list that is far too late": (30, 331, 331, 0, None, STUCK, STALE),
    "an API server that is away": (30, 331, 5, 0, None, None, STALE),
    "lists that are rare by design": (3600, 3700, 3700, 0, None, None, None),
    "a key that waits a little": (30, 0, 0, 299, None, None, None),
    "a key that no worker takes": (30, 0, 0, 301, None, None, LATE),
    "a Lease that cannot be read": (30, 0, 0, 0, NO_LEASE, None, NO_LEASE),
}


@pytest.mark.parametrize(
    ("interval", "listed", "attempted", "waited", "lease", "stuck", "unready"), CASES.values(), ids=CASES
)
def test_only_a_loop_that_is_stuck_is_restarted(
    *,
    interval: float,
    listed: float | None,
    attempted: float,
    waited: float,
    lease: str | None,
    stuck: str | None,
    unready: str | None,
) -> None:
    now = 10_000.0
    queues = Queues(*(WorkQueue(clock=lambda: now) for _ in range(3)))
    queues.promotions.add("team/champion")
    health = Health(queues, interval, lambda: lease, clock=lambda: now)
    now += waited
    health.last_attempt = now - attempted
    health.last_list = None if listed is None else now - listed
    assert (health.why_stuck(), health.why_unready()) == (stuck, unready)


async def test_a_long_queue_makes_the_pod_unready_and_does_not_restart_it() -> None:
    queues = Queues(*(WorkQueue(clock=lambda: 301.0) for _ in range(3)))
    queues.finetunejobs._added_at["team/tune"] = 0.0
    address = f"http://127.0.0.1:{free_port()}"
    async with (
        serve_probes(Health(queues, 30, clock=lambda: 301.0, last_list=301.0), f"{address}/healthz"),
        aiohttp.ClientSession() as session,
    ):
        answers = {}
        for path in ("/healthz", "/readyz"):
            async with session.get(address + path) as response:
                answers[path] = (response.status, await response.text())
    assert answers == {"/healthz": (200, "ok"), "/readyz": (503, LATE)}
