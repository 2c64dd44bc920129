"""Leader election between replicas that share a stand-in for the API server, on a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from finetune_operator.controller.election import Election, LeaseLostError, build_identity
from finetune_operator.controller.leases import Leases
from finetune_operator.fence import Fence
from finetune_operator.kube import KubeError
from fixtures.fake_kube import Json, StandIn

SECONDS, NAME = 10, "finetune-operator"
STEP_SECONDS = 0.25
AWAY = KubeError(0, "the API server cannot be reached")


@dataclass
class Replica:
    """A process of a replica. A paused process does not wake up, and a dead one never does."""

    election: Election
    task: asyncio.Task[None]
    is_paused: bool = False


@dataclass
class World:
    """Replicas, their API server, and the time."""

    kube: StandIn = field(default_factory=StandIn)
    now: float = 1000.0
    replicas: list[Replica] = field(default_factory=list)
    sleepers: list[tuple[float, int, asyncio.Future[None]]] = field(default_factory=list)

    def start(self, name: str, process: str = "1", kube: StandIn | None = None) -> Replica:
        """Start a process of a replica."""
        index = len(self.replicas)

        async def sleep(seconds: float) -> None:
            waking = asyncio.get_running_loop().create_future()
            self.sleepers.append((self.now + seconds, index, waking))
            await waking

        def clock() -> float:
            return self.now

        leases = Leases(kube or self.kube, "fs", build_identity(name, process), SECONDS, clock)
        election = Election(leases, NAME, name, Fence(clock), sleep)
        self.replicas.append(Replica(election, asyncio.create_task(election.run())))
        return self.replicas[-1]

    async def advance(self, seconds: float) -> None:
        """Let time pass. At no time do two replicas write."""
        end = self.now + seconds
        while self.now < end:
            self.now += STEP_SECONDS
            due = [
                item for item in self.sleepers if item[0] <= self.now and not self.replicas[item[1]].is_paused
            ]
            self.sleepers = [item for item in self.sleepers if item not in due]
            for _, _, waking in due:
                if not waking.done():
                    waking.set_result(None)
            await settle()
            assert len(self.leaders) <= 1

    @property
    def leaders(self) -> list[str]:
        """The identities of the processes whose writes pass."""
        return [item.election.leases.identity for item in self.replicas if item.election.fence.is_open]

    def lease(self) -> Json:
        return self.kube.objects["Lease", "fs", NAME]


async def settle() -> None:
    """Let the tasks run until they sleep."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    for replica in world.replicas:
        replica.task.cancel()
    await asyncio.gather(*(replica.task for replica in world.replicas), return_exceptions=True)


async def test_the_first_leads_and_the_other_writes_nothing(world: World) -> None:
    world.start("a")
    await settle()
    world.start("b")
    await world.advance(60)
    assert (world.leaders, world.lease()["spec"]["holderIdentity"]) == (["a_1"], "a_1")
    assert not world.replicas[1].election.won.is_set()
    assert world.replicas[1].election.why_unready() is None


async def test_a_dead_leader_is_replaced_when_its_lease_has_expired(world: World) -> None:
    leader = world.start("a")
    await settle()
    world.start("b")
    await world.advance(30)
    leader.is_paused = True
    await world.advance(SECONDS - 1.75)
    assert world.leaders == []
    await world.advance(4)
    assert world.leaders == ["b_1"]


async def test_a_paused_leader_cannot_write_when_it_continues_and_ends(world: World) -> None:
    leader = world.start("a")
    await settle()
    world.start("b")
    await world.advance(5)
    leader.is_paused = True
    await world.advance(20)
    leader.is_paused = False
    assert not leader.election.fence.is_open
    await world.advance(0.25)
    assert world.leaders == ["b_1"]
    with pytest.raises(LeaseLostError, match=r"^this replica lost Lease fs/finetune-operator and ends"):
        leader.task.result()


async def test_a_leader_that_resigns_is_replaced_at_once(world: World) -> None:
    leader = world.start("a")
    await settle()
    world.start("b")
    await world.advance(5)
    leader.task.cancel()
    await leader.election.resign()
    assert (world.leaders, world.kube.objects) == ([], {})
    await world.advance(1)
    assert world.leaders == ["b_1"]


async def test_the_lease_is_released_after_the_writes_in_progress(world: World) -> None:
    leader = world.start("a")
    await settle()
    async with leader.election.fence.limit("POST", 30):
        leader.task.cancel()
        resigning = asyncio.create_task(leader.election.resign())
        await world.advance(1)
        assert world.lease()["spec"]["holderIdentity"] == "a_1"
    await world.advance(1)
    await resigning
    assert world.kube.objects == {}


async def test_a_process_that_has_lost_the_lease_waits_for_its_writes_too(world: World) -> None:
    leader = world.start("a")
    await settle()
    world.start("b")
    async with leader.election.fence.limit("POST", 30):
        leader.is_paused = True
        await world.advance(20)
        leader.is_paused = False
        await world.advance(0.25)
        assert isinstance(leader.task.exception(), LeaseLostError)
        resigning = asyncio.create_task(leader.election.resign())
        await world.advance(1)
        assert not resigning.done()
    await world.advance(1)
    await resigning


async def test_a_process_that_is_restarted_has_the_lease_of_its_replica_back(world: World) -> None:
    world.start("a").is_paused = True
    await settle()
    await world.advance(SECONDS - 2)
    world.start("b")
    world.start("a", "2")
    await settle()
    assert (world.leaders, world.lease()["spec"]["holderIdentity"]) == (["a_2"], "a_2")


class Lossy(StandIn):
    """Carries requests out and loses the response to some."""

    losses: int = 0

    async def apply(self, body: Json, *, subresource: str = "") -> Json:
        written = await super().apply(body, subresource=subresource)
        if self.losses:
            self.losses -= 1
            raise AWAY
        return written


class Unanswered(StandIn):
    """Carries requests for the Lease out, and gives the response to the first of them late or not at all."""

    error: KubeError | None = None
    is_late: bool = False

    async def create(self, body: Json, *, dry_run: bool = False) -> Json:
        written = await super().create(body, dry_run=dry_run)
        if self.is_late:
            await asyncio.Event().wait()
        error, self.error = self.error, None
        if error:
            raise error
        return written


async def test_a_standby_that_is_stopped_while_it_acquires_the_lease_releases_it(world: World) -> None:
    kube = Unanswered()
    kube.is_late = True
    standby = world.start("a", kube=kube)
    await settle()
    assert [name for _, _, name in kube.objects] == [NAME]
    standby.task.cancel()
    await standby.election.resign()
    assert kube.objects == {}


@pytest.mark.parametrize("name", ["a", ""])
async def test_a_lease_that_was_acquired_without_a_response_is_held_at_the_next_try(
    world: World, name: str
) -> None:
    kube = Unanswered()
    kube.error = AWAY
    world.start(name, kube=kube)
    await settle()
    assert world.leaders == []
    await world.advance(1.5)
    assert world.leaders == [f"{name}_1"]


async def test_a_standby_that_never_held_the_lease_asks_for_nothing_when_it_ends(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.start("a")
    await settle()
    standby = world.start("b")
    await settle()
    standby.task.cancel()
    world.kube.refuse["get", "Lease"] = KubeError(500, "it was asked")
    await standby.election.resign()
    assert world.lease()["spec"]["holderIdentity"] == "a_1"
    assert "it was asked" not in caplog.text


async def test_a_renewal_without_a_response_is_no_loss(world: World) -> None:
    kube = Lossy()
    world.kube = kube
    world.start("a")
    await settle()
    for losses in (1, 2):
        kube.losses = losses
        await world.advance(10)
        assert (kube.losses, world.leaders) == (0, ["a_1"])


async def test_an_api_server_that_is_away_ends_the_leader_in_time(world: World) -> None:
    leader = world.start("a")
    await settle()
    await world.advance(30)
    for verb in ("get", "create", "apply"):
        world.kube.refuse[verb, "Lease"] = AWAY
    standby = world.start("b")
    await world.advance(SECONDS - 2)
    assert world.leaders == []
    with pytest.raises(LeaseLostError, match=r"another replica leads: the API server cannot be reached$"):
        leader.task.result()
    await world.advance(2 * SECONDS)
    assert "could not be read or renewed for" in str(standby.election.why_unready())
    world.kube.refuse.clear()
    await world.advance(SECONDS + 1)
    assert (world.leaders, standby.election.why_unready()) == (["b_1"], None)


async def test_a_lease_that_somebody_deletes_is_lost(world: World) -> None:
    leader = world.start("a")
    await settle()
    del world.kube.objects["Lease", "fs", NAME]
    await world.advance(3)
    assert isinstance(leader.task.exception(), LeaseLostError)
    assert world.leaders == []


TIMES = {"in the past": "2020-01-01T00:00:00.000000Z", "in the future": "2099-01-01T00:00:00.000000Z"}


@pytest.mark.parametrize("time", TIMES.values(), ids=TIMES)
async def test_clocks_that_differ_do_not_matter(world: World, time: str) -> None:
    """A Lease counts as renewed when its version changes, and as expired when it stays the same for its duration."""
    spec: dict[str, Any] = {"holderIdentity": "other_1", "leaseDurationSeconds": 10, "renewTime": time}
    lease: Json = {
        "kind": "Lease",
        "metadata": {"namespace": "fs", "name": NAME, "uid": "uid-1"},
        "spec": spec,
    }
    world.kube.keep(lease)
    world.start("a")
    for _ in range(5):
        await world.advance(5)
        world.kube.keep(lease)
    await world.advance(SECONDS - 1)
    assert world.leaders == []
    await world.advance(3)
    assert world.leaders == ["a_1"]
