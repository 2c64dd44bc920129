"""How the parts of the operator are connected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from finetune_operator import __main__ as main
from finetune_operator.__main__ import Operator
from finetune_operator.fence import Fence
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.kube import Kube, KubeError
from finetune_operator.settings import Settings
from finetune_operator.tenancy.file import TenancyFile

Json = dict[str, Any]
BODY: Json = {
    "metadata": {"namespace": "team", "name": "tune", "uid": "u1", "resourceVersion": "1", "labels": {}},
    "spec": {},
}
TIMEOUT_SECONDS = 10.0


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Operator:
    # NB: an operator that does not lead yet closes the fence of its process, through which other tests write.
    monkeypatch.setattr(main, "PROCESS_FENCE", Fence())
    return Operator.of(Kube(), Kube(), Settings(), TenancyFile())


def test_each_queue_knows_how_many_workers_take_its_keys(operator: Operator) -> None:
    queues = operator.queues.by_kind.values()
    assert [(queue.workers, queue.is_open) for queue in queues] == [(operator.settings.workers, False)] * 3


class PartsBeginError(Exception):
    """The parts of the operator would be created now."""


async def test_an_operator_without_rights_on_network_policies_works_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Settings] = []

    async def enter(kube: Kube) -> Kube:
        return kube

    async def forbid(*_: Any, **__: Any) -> None:
        raise KubeError(403, "networkpolicies is forbidden")

    def create_parts(_kube: Kube, _lease_kube: Kube, settings: Settings, *_: Any) -> None:
        given.append(settings)
        raise PartsBeginError

    monkeypatch.setattr(Kube, "__aenter__", enter)
    monkeypatch.setattr(Kube, "list", forbid)
    monkeypatch.setattr(Operator, "of", create_parts)
    with pytest.raises(PartsBeginError):
        await main.run(Settings(network_policies=True), TenancyFile())
    assert given == [Settings()]


class WatchesBeginError(Exception):
    """kopf would begin its watches now."""


async def test_objects_are_listed_soon_after_a_watch_begins(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    callbacks: list[Callable[[], None]] = []

    async def spawn_tasks(**_: Any) -> None:
        raise WatchesBeginError

    monkeypatch.setattr(main, "restart_failed_watches", callbacks.append)
    monkeypatch.setattr("kopf.spawn_tasks", spawn_tasks)
    with pytest.raises(WatchesBeginError):
        await operator._watch(asyncio.Event())
    (on_listed,) = callbacks
    was_listed_soon = operator.resync._is_watch_new
    on_listed()
    assert (was_listed_soon, operator.resync._is_watch_new) == (False, True)


async def test_the_leader_closes_the_run_of_a_job_that_was_deleted_while_no_watch_ran(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: asyncio.Queue[str] = asyncio.Queue()

    async def close(_observer: object, ftj: FineTuneJob) -> None:
        closed.put_nowait(ftj.key)

    monkeypatch.setattr(main, "close_run_of_deleted", close)
    # A replica that stands by leaves this to the leader.
    await operator._forget_deleted(BODY)
    assert closed.empty()
    operator.election.won.set()
    operator.resync.on_vanished(BODY)
    forgetting = asyncio.create_task(operator._forget_vanished())
    assert await asyncio.wait_for(closed.get(), TIMEOUT_SECONDS) == "team/tune"
    forgetting.cancel()
    with suppress(asyncio.CancelledError):
        await forgetting
