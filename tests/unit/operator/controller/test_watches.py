"""The answers of the liveness probe."""

from __future__ import annotations

import time

import pytest

from finetune_operator.controller.watches import Health
from finetune_operator.controller.workqueue import Queues, WorkQueue

CASES: dict[str, tuple[float, float, float, str | None]] = {
    "nothing is late": (30, 20, 0, None),
    "a list that is a little late": (30, 329, 0, None),
    "a list that is far too late": (30, 331, 0, "the last resync was 331 s ago"),
    "lists that are rare by design": (3600, 3700, 0, None),
    "a key that waits a little": (30, 0, 299, None),
    "a key that no worker takes": (30, 0, 301, "a resource has waited 301 s for a worker"),
}


@pytest.mark.parametrize(("interval", "silent", "waited", "expected"), CASES.values(), ids=CASES)
def test_complaint(
    interval: float, silent: float, waited: float, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    queues = Queues(WorkQueue(clock=lambda: now), WorkQueue(clock=lambda: now))
    queues.promotions.add("team/champion")
    health = Health(queues, interval, last_resync=now + waited - silent)
    now += waited
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert health.complaint() == expected
