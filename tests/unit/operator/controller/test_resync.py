"""All objects are listed at the start, when this replica becomes the leader, and periodically."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from finetune_crds.base import Json
from finetune_operator.controller.health import Health
from finetune_operator.controller.resync import Resync
from finetune_operator.controller.store import KINDS, Store
from finetune_operator.controller.workqueue import Queues, WorkQueue
from finetune_operator.kube import Kube, KubeError, Listing
from fixtures.operator_in_memory.decisions import SETTINGS


@dataclass
class Lists:
    """Plays the API server, which answers as many requests as the test allows.

    Attributes:
        refused: kind whose list fails.
        listed: the kinds that were listed.
    """

    objects: dict[str, list[Json]] = field(default_factory=dict)
    refused: str = ""
    listed: list[str] = field(default_factory=list)
    allowed: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    def allow_lists(self, number: int) -> None:
        for _ in range(number * len(KINDS)):
            self.allowed.release()

    async def list(self, kind: str, _namespace: str | None, **_: Any) -> Listing:
        await self.allowed.acquire()
        if kind == self.refused:
            raise KubeError(429, "try again")
        self.listed.append(kind)
        return Listing(self.objects.get(kind, []), 1)


def build_resync(kube: Kube) -> Resync:
    queues = Queues(WorkQueue(clock=lambda: 0.0), WorkQueue(clock=lambda: 0.0))
    return Resync(kube, Store(), queues, SETTINGS, Health(queues, SETTINGS.resync_seconds))


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> tuple[Lists, Kube]:
    lists, kube = Lists(), Kube()
    monkeypatch.setattr(kube, "list", lists.list)
    return lists, kube


async def test_a_new_leader_waits_for_a_list_that_began_in_its_term(api: tuple[Lists, Kube]) -> None:
    lists, kube = api
    resync = build_resync(kube)
    running = asyncio.create_task(resync.run())
    # The first list is under way when the Lease is acquired.
    await settle()
    waiting = asyncio.create_task(resync.list_anew())
    lists.allow_lists(1)
    await settle()
    assert (lists.listed, waiting.done()) == ([*KINDS], False)
    lists.allow_lists(1)
    await asyncio.wait_for(waiting, 5)
    assert lists.listed == [*KINDS, *KINDS]
    lists.allow_lists(1)
    # The next one begins at once too, although the interval has not gone by.
    await asyncio.wait_for(resync.list_anew(), 5)
    assert lists.listed == [*KINDS] * 3
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_what_an_incomplete_list_brought_is_looked_at(api: tuple[Lists, Kube]) -> None:
    lists, kube = api
    lists.allow_lists(1)
    resync = build_resync(kube)
    meta = {"namespace": "team", "name": "tune", "uid": "u1", "resourceVersion": "1"}
    resync.store.put("FineTuneJob", {"metadata": meta})
    lists.refused = "FineTuneJob"
    with pytest.raises(KubeError):
        await resync.run_once()
    assert len(resync.queues.finetunejobs) == 1
