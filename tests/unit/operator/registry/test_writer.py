"""The one writer of aliases, with Leases of a stand-in for the API server and a registry in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.controller.leases import LeaseBusy
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.kube import KubeError
from finetune_operator.registry.base import ModelVersion, MoveAlias, RegisteredModel
from finetune_operator.registry.writer import (
    ANYWHERE,
    AliasMoved,
    AliasWriter,
    ModelReplaced,
    VersionNotReady,
    build_lease_name,
)
from finetune_operator.settings import Settings
from fixtures.fake_kube import StandIn

LEASE = build_lease_name("http://r", "m")
AWAY = ExternalError(Problem(ConditionReason.MLFLOW_UNREACHABLE, "away"))
CREATED = datetime(2026, 7, 1, tzinfo=UTC)
BROKEN = ExternalError(Problem(ConditionReason.MLFLOW_ERROR, "broken"))


@dataclass
class Memory:
    """A registry in memory. `before` runs before a method of that name, and may raise."""

    aliases: dict[str, str] = field(default_factory=dict)
    versions: dict[str, ModelVersion] = field(
        default_factory=lambda: {
            "4": ModelVersion("4"),
            "5": ModelVersion("5", tags={"team": "a"}),
            "6": ModelVersion("6", ready=False),
        }
    )
    before: dict[str, Callable[[], None]] = field(default_factory=dict)
    wrote: list[tuple[str, ...]] = field(default_factory=list)
    uri: str = "http://r"

    def _call(self, name: str, *arguments: str) -> None:
        self.before.get(name, lambda: None)()
        if arguments:
            self.wrote.append((name, *arguments))

    def model(self, name: str) -> RegisteredModel | None:
        self._call("model")
        return RegisteredModel(name, dict(self.aliases), CREATED) if name == "m" else None

    def version(self, name: str, version: str) -> ModelVersion | None:
        self._call("version")
        return self.versions.get(version)

    def set_alias(self, name: str, alias: str, version: str) -> None:
        self._call("set_alias", alias, version)
        self.aliases[alias] = version

    def delete_alias(self, name: str, alias: str) -> None:
        self._call("delete_alias", alias)
        self.aliases.pop(alias, None)

    def set_tags(self, name: str, version: str, tags: Mapping[str, str]) -> None:
        self._call("set_tags", version, *(f"{key}={value}" for key, value in tags.items()))
        stored = self.versions[version]
        self.versions[version] = replace(stored, tags={**stored.tags, **tags})


@dataclass
class World:
    """A writer, what it stands on, and a clock that the test moves."""

    registry: Memory = field(default_factory=lambda: Memory({"champion": "4", "candidate": "5"}))
    kube: StandIn = field(default_factory=StandIn)
    seconds: float = 1000.0

    def __post_init__(self) -> None:
        self.writer = self.another("operator-1")

    def another(self, identity: str) -> AliasWriter:
        return AliasWriter(self.kube, Settings(namespace="fs"), identity, clock=lambda: self.seconds)

    async def move(self, **move: Any) -> None:
        await self.writer.move(
            self.registry, "m", "champion", MoveAlias(**({"expected": "4", "to": "5"} | move))
        )

    @property
    def holder(self) -> str | None:
        lease = self.kube.objects.get(("Lease", "fs", LEASE))
        return str(lease["spec"]["holderIdentity"]) if lease else None


SET = ("set_alias", "champion", "5")
DONE: dict[str, tuple[dict[str, Any], list[tuple[str, ...]]]] = {
    "from where it was": ({}, [SET]),
    "from wherever it was": ({"expected": ANYWHERE}, [SET]),
    "with its source": ({"source": "candidate"}, [SET]),
    "tags last": ({"tags": {"by": "me"}}, [SET, ("set_tags", "5", "by=me")]),
    "tags that it has are not written": ({"tags": {"team": "a"}}, [SET]),
    "in the same model": ({"created": CREATED}, [SET]),
    "as wanted already": ({"expected": "3", "to": "4"}, []),
    "as wanted already, but for a tag": (
        {"expected": "3", "to": "4", "tags": {"by": "me"}},
        [("set_tags", "4", "by=me")],
    ),
    "removed": ({"to": None}, [("delete_alias", "champion")]),
}


@pytest.mark.parametrize(("move", "wrote"), DONE.values(), ids=DONE)
async def test_what_is_written(move: dict[str, Any], wrote: list[tuple[str, ...]]) -> None:
    world = World()
    await world.move(**move)
    assert world.registry.wrote == wrote
    assert (world.kube.done("create", "delete"), world.kube.objects) == ([f"Lease/{LEASE}"] * 2, {})


async def test_an_alias_that_is_not_there_need_not_be_removed() -> None:
    world = World(Memory())
    await world.move(to=None)
    assert world.registry.wrote == []


REASONS = {
    AliasMoved: ConditionReason.ALIAS_MOVED,
    ModelReplaced: ConditionReason.REGISTRY_CHANGED,
    VersionNotReady: ConditionReason.MOVE_REFUSED,
}
REFUSED: dict[str, tuple[dict[str, Any], type[ExternalError], str]] = {
    "it was moved": (
        {"expected": "3"},
        AliasMoved,
        "alias champion of m points at version 4, but version 3 is expected: the next pass reads it again",
    ),
    "there should be none": (
        {"expected": None},
        AliasMoved,
        "alias champion of m points at version 4, but no alias is expected: the next pass reads it again",
    ),
    "it was moved, and is not removed": (
        {"expected": "3", "to": None},
        AliasMoved,
        "alias champion of m points at version 4, but version 3 is expected: the next pass reads it again",
    ),
    "the model was created anew": (
        {"created": CREATED - timedelta(days=1)},
        ModelReplaced,
        "registered model m was recreated, or the spec points to another registry",
    ),
    "its source was moved": (
        {"source": "candidate", "to": "6"},
        AliasMoved,
        "alias candidate of m points at version 5, but version 6 is expected: the next pass reads it again",
    ),
    "its source is gone": (
        {"source": "staging"},
        AliasMoved,
        "alias staging of m does not exist, but version 5 is expected: the next pass reads it again",
    ),
    "no such version": (
        {"to": "9"},
        VersionNotReady,
        "cannot point an alias at version 9 of m, which does not exist: choose another version",
    ),
    "a version without its files": (
        {"to": "6"},
        VersionNotReady,
        "cannot point an alias at version 6 of m, which is not READY: choose another version",
    ),
}


@pytest.mark.parametrize(("move", "kind", "message"), REFUSED.values(), ids=REFUSED)
async def test_what_is_not_written(move: dict[str, Any], kind: type[ExternalError], message: str) -> None:
    world = World()
    with pytest.raises(kind) as raised:
        await world.move(**move)
    assert raised.value.problem == Problem(REASONS[kind], message)
    assert (world.registry.wrote, world.holder) == ([], None)


async def test_a_write_is_read_back() -> None:
    world = World()

    def another_replica() -> None:
        if world.registry.wrote:
            world.registry.aliases["champion"] = "4"

    world.registry.before["model"] = another_replica
    with pytest.raises(AliasMoved) as raised:
        await world.move()
    assert (raised.value.actual, world.holder) == ("4", None)


async def test_one_writes_and_the_other_comes_back() -> None:
    world = World()
    inside, leave = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait() -> None:
        loop.call_soon_threadsafe(inside.set)
        asyncio.run_coroutine_threadsafe(leave.wait(), loop).result(10)

    world.registry.before["set_alias"] = wait
    first = asyncio.create_task(world.move())
    await inside.wait()
    with pytest.raises(LeaseBusy, match=f"^Lease fs/{LEASE} is held by operator-1$"):
        await world.another("operator-2").move(world.registry, "m", "champion", MoveAlias("4", "4"))
    second = asyncio.create_task(world.move(expected="5", to="4"))
    leave.set()
    await asyncio.gather(first, second)
    assert world.registry.wrote == [SET, ("set_alias", "champion", "4")]


async def test_models_do_not_wait_for_each_other() -> None:
    world = World()
    world.kube.keep(
        {"kind": "Lease", "metadata": {"name": build_lease_name("http://r", "n"), "namespace": "fs"}}
    )
    await world.move()
    assert world.registry.wrote == [SET]


async def test_a_dead_holder_is_replaced_when_its_lease_did_not_change_for_its_duration() -> None:
    world = World()
    lease = {"kind": "Lease", "metadata": {"name": LEASE, "namespace": "fs"}}
    spec = {"holderIdentity": "dead", "leaseDurationSeconds": 70}
    world.kube.keep({**lease, "spec": spec})
    for passed in (0, 69):
        world.seconds += passed
        with pytest.raises(LeaseBusy):
            await world.move()
    world.kube.keep({**world.kube.objects["Lease", "fs", LEASE], "spec": {**spec, "renewTime": "now"}})
    for passed in (1, 69):
        world.seconds += passed
        with pytest.raises(LeaseBusy):
            await world.move()
    assert world.registry.wrote == []
    world.seconds += 1
    await world.move()
    assert (world.registry.wrote, world.holder) == ([SET], None)


async def test_two_that_take_over_at_once_do_not_both_write() -> None:
    world = World()
    second = world.another("operator-2")
    world.kube.keep({"kind": "Lease", "metadata": {"name": LEASE, "namespace": "fs"}})
    move = MoveAlias(ANYWHERE, "5")
    for writer in (world.writer, second):
        with pytest.raises(LeaseBusy):
            await writer.move(world.registry, "m", "champion", move)
    world.seconds += 60
    both = await asyncio.gather(
        *(writer.move(world.registry, "m", "champion", move) for writer in (world.writer, second)),
        return_exceptions=True,
    )
    assert [type(end) for end in both] == [type(None), LeaseBusy]


async def test_time_that_runs_short_is_taken_anew_before_the_write() -> None:
    world = World()

    def slow() -> None:
        world.seconds += 40

    world.registry.before["version"] = slow
    await world.move()
    assert (world.kube.done("apply"), world.registry.wrote) == ([f"Lease/{LEASE}"], [SET])


async def test_who_lost_the_lease_writes_nothing_and_leaves_it_to_its_holder() -> None:
    world = World()

    def too_slow() -> None:
        world.seconds += 100
        lease = world.kube.objects["Lease", "fs", LEASE]
        world.kube.keep({**lease, "spec": {"holderIdentity": "operator-2"}})

    world.registry.before["version"] = too_slow
    with pytest.raises(LeaseBusy, match="was acquired by another replica"):
        await world.move()
    assert (world.registry.wrote, world.holder) == ([], "operator-2")


async def test_a_lease_that_was_deleted_is_reported_as_deleted() -> None:
    world = World()

    def delete_lease() -> None:
        world.seconds += 40
        del world.kube.objects["Lease", "fs", LEASE]

    world.registry.before["version"] = delete_lease
    with pytest.raises(LeaseBusy, match=f"^Lease fs/{LEASE} was deleted$"):
        await world.move()
    assert world.registry.wrote == []


def raising(error: Exception) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


FAILURES: dict[str, tuple[str, ExternalError, str | None]] = {
    "while it reads": ("model", AWAY, None),
    "a refused write": ("set_alias", BROKEN, None),
    "a write without an answer": ("set_alias", AWAY, "operator-1"),
    "a tag without an answer": ("set_tags", AWAY, "operator-1"),
}


@pytest.mark.parametrize(("method", "error", "holder"), FAILURES.values(), ids=FAILURES)
async def test_no_replica_writes_while_a_write_may_still_arrive(
    method: str, error: ExternalError, holder: str | None
) -> None:
    world = World()
    world.registry.before[method] = raising(error)
    with pytest.raises(ExternalError) as raised:
        await world.move(tags={"by": "me"})
    assert (raised.value, world.holder) == (error, holder)
    del world.registry.before[method]
    if holder:
        with pytest.raises(LeaseBusy):
            await world.move()
        world.seconds += 60
    await world.move()
    assert (world.registry.aliases["champion"], world.holder) == ("5", None)


async def test_a_pass_that_is_cancelled_in_a_write_leaves_the_lease() -> None:
    world = World()
    inside, leave = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait() -> None:
        loop.call_soon_threadsafe(inside.set)
        asyncio.run_coroutine_threadsafe(leave.wait(), loop).result(10)

    world.registry.before["set_alias"] = wait
    task = asyncio.create_task(world.move())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.holder == "operator-1"
    leave.set()


@pytest.mark.parametrize("verb", ["create", "delete"])
async def test_leases_that_the_api_server_refuses(verb: str, caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.kube.refuse[verb, "Lease"] = KubeError(403, "leases is forbidden")
    if verb == "delete":
        await world.move()
        assert "could not be deleted, and expires in 60 s: leases is forbidden" in caplog.text
        return
    with pytest.raises(ExternalError) as raised:
        await world.move()
    assert raised.value.problem == without_lease(ConditionReason.MOVE_REFUSED, "leases is forbidden")


def without_lease(reason: ConditionReason, why: str) -> Problem:
    """That nothing is written, for want of the Lease."""
    return Problem(reason, f"cannot acquire Lease fs/{LEASE}, which is required to write aliases of m: {why}")


async def test_leases_of_an_api_server_that_is_away() -> None:
    world = World()
    world.kube.refuse["create", "Lease"] = KubeError(503, "etcd is away")
    with pytest.raises(ExternalError) as raised:
        await world.move()
    assert raised.value.problem == without_lease(ConditionReason.MLFLOW_ERROR, "etcd is away")


class ChangedError(Exception):
    """A person edited the spec again."""


async def test_a_move_that_is_no_longer_wanted_goes_no_further() -> None:
    world = World()

    async def still() -> None:
        assert world.holder == "operator-1"
        if world.registry.wrote:
            raise ChangedError

    move = MoveAlias("4", "5", tags={"by": "me"})
    with pytest.raises(ChangedError):
        await world.writer.move(world.registry, "m", "champion", move, still)
    assert (world.registry.wrote, world.holder) == ([SET], None)


async def test_whoever_cannot_be_asked_whether_it_is_wanted_is_no_lease() -> None:
    world = World()
    error = KubeError(500, "etcd is away")

    async def still() -> None:
        raise error

    with pytest.raises(KubeError) as raised:
        await world.writer.move(world.registry, "m", "champion", MoveAlias("4", "5"), still)
    assert (raised.value, world.registry.wrote, world.holder) == (error, [], None)


async def test_a_lease_that_cannot_be_renewed() -> None:
    world = World()

    def slow() -> None:
        world.seconds += 40

    world.registry.before["version"] = slow
    world.kube.refuse["apply", "Lease"] = KubeError(403, "leases is forbidden")
    with pytest.raises(ExternalError) as raised:
        await world.move()
    refused = without_lease(ConditionReason.MOVE_REFUSED, "leases is forbidden")
    assert (raised.value.problem, world.registry.wrote) == (refused, [])
