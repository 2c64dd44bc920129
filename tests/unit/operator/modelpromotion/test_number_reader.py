"""Passes read the number of spec.onRegression, and a slow Prometheus holds few of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from finetune_crds.promotion_status import Watch
from finetune_operator.modelpromotion.model import Promotion, Reading
from finetune_operator.modelpromotion.number_reader import NumberReader
from finetune_operator.modelpromotion.observe import read_promotion
from finetune_operator.registry.outages import Outages
from fixtures.fake_kube import StandIn

FAST, SLOW = "http://fast:9090", "http://slow:9090"


class Server:
    """A Prometheus server; the slow one answers once it is released."""

    released = threading.Event()

    def __init__(self, url: str, _token: str) -> None:
        self.url = url

    def read_number(self, _query: str) -> float:
        if self.url == SLOW:
            assert self.released.wait(20)
        return 0.5


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Releases the slow server, at the latest at the end of the test."""
    Server.released = threading.Event()
    yield Server.released
    Server.released.set()


def watched(url: str) -> Promotion:
    """A promotion whose version is watched."""
    body: dict[str, Any] = {
        "metadata": {
            "name": "champion",
            "namespace": "team",
            "uid": "u",
            "resourceVersion": "1",
            "creationTimestamp": "2026-08-01T12:00:00Z",
        },
        "spec": {
            "alias": "champion",
            "source": {"type": "Version", "version": "3"},
            "onRegression": {
                "action": "Rollback",
                "prometheus": {"url": url, "query": "errors"},
                "max": 1,
                "forSeconds": 60,
                "watchSeconds": 600,
            },
        },
        "status": {
            "journal": {"watch": Watch(version="3", start_time=datetime(2026, 8, 1, tzinfo=UTC)).to_json()}
        },
    }
    return read_promotion(body)


async def test_a_slow_server_holds_a_quarter_of_the_workers(released: threading.Event) -> None:
    reader = NumberReader(StandIn(), Outages(lambda: 0.0, 30), Server, workers=8)  # type: ignore[arg-type] # stand-ins

    async def read(promotion: Promotion) -> Reading | None:
        assert promotion.spec is not None
        return await reader.read(promotion, promotion.spec)

    slow = [asyncio.create_task(read(watched(SLOW))) for _ in range(8)]
    assert await read(watched(FAST)) == Reading(0.5)
    assert [task.done() for task in slow] == [False] * 2 + [True] * 6
    released.set()
    assert await asyncio.gather(*slow) == [Reading(0.5)] * 2 + [None] * 6
    assert await read(watched(SLOW)) == Reading(0.5)
