"""The answers of the probes."""

from __future__ import annotations

import time

import aiohttp
import pytest

from finetune_operator.controller.health import Health, serve_probes
from finetune_operator.controller.workqueue import Queues, WorkQueue
from support.ports import free_port

LATE = "a resource has waited 301 s for a worker"
STUCK = "the last resync was 331 s ago"
CASES: dict[str, tuple[float, float, float, str | None, str | None]] = {
    "nothing is late": (30, 20, 0, None, None),
    "a list that is a little late": (30, 329, 0, None, None),
    "a list that is far too late": (30, 331, 0, STUCK, STUCK),
    "lists that are rare by design": (3600, 3700, 0, None, None),
    "a key that waits a little": (30, 0, 299, None, None),
    "a key that no worker takes": (30, 0, 301, None, LATE),
}


@pytest.mark.parametrize(("interval", "silent", "waited", "stuck", "late"), CASES.values(), ids=CASES)
def test_only_a_loop_that_is_stuck_is_restarted(
    monkeypatch: pytest.MonkeyPatch,
    *,
    interval: float,
    silent: float,
    waited: float,
    stuck: str | None,
    late: str | None,
) -> None:
    now = 1000.0
    queues = Queues(WorkQueue(clock=lambda: now), WorkQueue(clock=lambda: now))
    queues.promotions.add("team/champion")
    health = Health(queues, interval, last_resync=now + waited - silent)
    now += waited
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert (health.why_stuck(), health.why_late()) == (stuck, late)


async def test_a_long_queue_makes_the_pod_unready_and_does_not_restart_it() -> None:
    queues = Queues(WorkQueue(clock=lambda: 301.0), WorkQueue(clock=lambda: 301.0))
    queues.finetunejobs._added_at["team/tune"] = 0.0
    address = f"http://127.0.0.1:{free_port()}"
    async with (
        serve_probes(Health(queues, 30), f"{address}/healthz"),
        aiohttp.ClientSession() as session,
    ):
        answers = {}
        for path in ("/healthz", "/readyz"):
            async with session.get(address + path) as response:
                answers[path] = (response.status, await response.text())
    assert answers == {"/healthz": (200, "ok"), "/readyz": (503, LATE)}
