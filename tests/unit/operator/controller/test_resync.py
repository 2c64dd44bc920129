"""All objects are listed at the start, when this replica becomes the leader, and periodically."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from finetune_crds.base import Json
from finetune_operator.controller.health import Health
from finetune_operator.controller.resync import Resync
from finetune_operator.controller.store import KINDS, Store
from finetune_operator.controller.workqueue import Queues, WorkQueue
from finetune_operator.kube import Kube, KubeError, Listing
from finetune_operator.settings import Settings
from fixtures.operator_in_memory.decisions import SETTINGS


@dataclass
class Lists:
    """Plays the API server, which answers as many requests as the test allows.

    Attributes:
        refused: kind whose list fails.
        version: the resource version of each list.
        listed: the kinds that were listed.
    """

    objects: dict[str, list[Json]] = field(default_factory=dict)
    refused: str = ""
    version: int = 1
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
        return Listing(self.objects.get(kind, []), self.version)


def find_owner(_kind: str, body: Json) -> tuple[str, str] | None:
    references = body["metadata"].get("ownerReferences")
    return ("team", references[0]["uid"]) if references else None


def build_resync(kube: Kube, vanished: list[Json] | None = None, settings: Settings = SETTINGS) -> Resync:
    queues = Queues(*(WorkQueue(clock=lambda: 0.0) for _ in range(3)))
    health = Health(queues, SETTINGS.resync_seconds)
    take = (lambda _: None) if vanished is None else vanished.append
    return Resync(kube, Store(find_owner), queues, settings, health, take)


def count_waits(monkeypatch: pytest.MonkeyPatch) -> asyncio.Semaphore:
    """Let each resync interval end when the semaphore is released."""
    ends = asyncio.Semaphore(0)

    @asynccontextmanager
    async def time_out(seconds: float) -> AsyncIterator[None]:
        assert seconds == SETTINGS.resync_seconds
        await ends.acquire()
        raise TimeoutError
        yield

    monkeypatch.setattr("finetune_operator.controller.resync.asyncio.timeout", time_out)
    return ends


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
    await stop(running)


@pytest.mark.parametrize(("network_policies", "unlisted"), [(True, set()), (False, {"NetworkPolicy"})])
async def test_network_policies_are_listed_if_the_operator_creates_them(
    api: tuple[Lists, Kube], unlisted: set[str], *, network_policies: bool
) -> None:
    """Without them, the operator has no right to list them."""
    lists, kube = api
    resync = build_resync(kube, settings=replace(SETTINGS, network_policies=network_policies))
    lists.allow_lists(1)
    await resync.run_once()
    assert {*KINDS} - {*lists.listed} == unlisted


async def stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def build_body(name: str, version: int = 1) -> Json:
    return {"metadata": {"namespace": "team", "name": name, "uid": name, "resourceVersion": str(version)}}


def build_job(version: int = 1) -> Json:
    """A Job of FineTuneJob tune."""
    meta = build_body("train", version)["metadata"]
    return {"metadata": {**meta, "ownerReferences": [{"uid": "tune"}]}}


# What the list of the API server has; the operator knows version 1 of FineTuneJob tune and of its Job.
NEWS: dict[str, tuple[dict[str, list[Json]], list[str]]] = {
    "nothing has changed": (
        {"FineTuneJob": [build_body("tune")], "Job": [build_job()]},
        [],
    ),
    "a job has changed": (
        {"FineTuneJob": [build_body("tune", 2)], "Job": [build_job()]},
        ["team/tune"],
    ),
    "a child has changed": (
        {"FineTuneJob": [build_body("tune")], "Job": [build_job(2)]},
        ["team/tune"],
    ),
    "a child was deleted": ({"FineTuneJob": [build_body("tune")]}, ["team/tune"]),
    "a child was orphaned": (
        {"FineTuneJob": [build_body("tune")], "Job": [build_body("train", 2)]},
        ["team/tune"],
    ),
    "a job was created": (
        {
            "FineTuneJob": [build_body("tune"), build_body("next", 2)],
            "Job": [build_job()],
        },
        ["team/tune", "team/next"],
    ),
    "somebody else's pod with the operator's label": (
        {
            "FineTuneJob": [build_body("tune")],
            "Job": [build_job()],
            "Pod": [build_body("foreign", 2)],
        },
        [],
    ),
}


@pytest.mark.parametrize(("objects", "keys"), NEWS.values(), ids=NEWS)
async def test_a_list_queues_all_resources_if_a_watch_missed_something(
    objects: dict[str, list[Json]], keys: list[str], api: tuple[Lists, Kube]
) -> None:
    lists, kube = api
    lists.objects, lists.version = objects, 2
    lists.allow_lists(1)
    resync = build_resync(kube)
    resync.store.put("FineTuneJob", build_body("tune"))
    resync.store.put("Job", build_job())
    await resync.run_once()
    assert resync.queues.finetunejobs._queued == dict.fromkeys(keys, True)


async def test_a_job_that_was_deleted_while_no_watch_ran_is_reported_once(api: tuple[Lists, Kube]) -> None:
    lists, kube = api
    lists.version = 2
    lists.allow_lists(2)
    vanished: list[Json] = []
    resync = build_resync(kube, vanished)
    resync.store.put("FineTuneJob", build_body("tune"))
    resync.store.put("Job", build_job())
    await resync.run_once()
    await resync.run_once()
    assert [body["metadata"]["name"] for body in vanished] == ["tune"]


async def test_what_an_incomplete_list_brought_is_looked_at(api: tuple[Lists, Kube]) -> None:
    lists, kube = api
    lists.allow_lists(1)
    resync = build_resync(kube)
    resync.store.put("FineTuneJob", build_body("tune"))
    lists.objects, lists.refused = {"Job": [build_job(2)]}, "FineTuneJob"
    with pytest.raises(KubeError):
        await resync.run_once()
    assert len(resync.queues.finetunejobs) == 1


async def test_news_of_a_replica_that_stands_by_stays_news(api: tuple[Lists, Kube]) -> None:
    lists, kube = api
    lists.allow_lists(2)
    resync = build_resync(kube)
    resync.queues.finetunejobs.is_open = False
    lists.objects = {"FineTuneJob": [build_body("tune")]}
    await resync.run_once()
    resync.queues.open()
    await resync.run_once()
    assert len(resync.queues.finetunejobs) == 1


# How many objects there are, whether a watch begins anew, and after how many resync intervals the next list comes.
INTERVALS: dict[str, tuple[int, bool, int]] = {
    "few objects": (10, False, 1),
    "as many as one interval allows": (480, False, 1),
    "twice as many": (960, False, 2),
    "thousands": (20000, False, 10),
    "a watch begins anew": (20000, True, 1),
}


@pytest.mark.parametrize(("objects", "is_watch_new", "intervals"), INTERVALS.values(), ids=INTERVALS)
async def test_many_objects_are_listed_less_often(
    objects: int, is_watch_new: bool, intervals: int, api: tuple[Lists, Kube], monkeypatch: pytest.MonkeyPatch
) -> None:
    lists, kube = api
    waits = count_waits(monkeypatch)
    resync = build_resync(kube)
    lists.objects = {"FineTuneJob": [build_body(f"tune-{number}") for number in range(objects)]}
    running = asyncio.create_task(resync.run())
    lists.allow_lists(1)
    await settle()
    if is_watch_new:
        resync.list_soon()
    # The next list begins, and waits for its answer.
    for _ in range(intervals - 1):
        waits.release()
        await settle()
        assert resync._begun == 1
    waits.release()
    await settle()
    assert resync._begun == 2
    await stop(running)
