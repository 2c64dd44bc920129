"""The operator dies at every point between two writes; replicas race; the registry fails. Nothing is lost or doubled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.controller.reconciler import BUSY_SECONDS
from finetune_operator.errors import Problem
from fixtures.operator_in_memory.promotions import Json, KilledError, Operator, World
from unit.operator.modelpromotion.champion import GATES

Story = Callable[[World], Awaitable[None]]


async def promoted(world: World) -> None:
    """Two versions, one after the other, and the second approved."""
    for version, loss in (("1", 2.4), ("2", 2.2), ("3", 2.0)):
        world.registry.add(version, eval_loss=loss)
    world.submit(gates=GATES, tags={"team": "support"})
    world.registry.aliases |= {"staging": "2"}
    await world.settle()
    world.registry.aliases["staging"] = "3"
    await world.settle()


async def rolled_back(world: World) -> None:
    """And back to the first."""
    await promoted(world)
    world.edit(rollbackTo={"type": "Previous"})
    await world.settle()


async def repaired(world: World) -> None:
    """Somebody moves the alias by hand."""
    await promoted(world)
    world.registry.aliases["champion"] = "1"
    await world.settle()


async def adopted(world: World) -> None:
    """Somebody moves the alias by hand, and it is left there."""
    await promoted(world)
    world.edit(onDrift="Adopt")
    world.registry.aliases["champion"] = "1"
    await world.settle()


async def removed(world: World) -> None:
    """The resource is deleted, and its alias with it."""
    await promoted(world)
    world.edit(onDelete="RemoveAlias")
    await world.settle()
    world.remove()
    await world.settle()


STORIES: dict[str, Story] = {
    "promoted": promoted,
    "rolled back": rolled_back,
    "repaired": repaired,
    "adopted": adopted,
    "removed": removed,
}


def outcome(world: World) -> object:
    """Everything that counts at the end: where aliases and tags are, and what the resource says."""
    tags = {
        number: {key: value for key, value in version.tags.items() if key != "promoted_champion_at"}
        for number, version in world.registry.versions.items()
    }
    if not world.names():
        return world.registry.aliases, tags
    status = world.status()
    conditions = [(item.type, item.status, item.reason, item.message) for item in status.conditions]
    numbers = (status.phase, status.current, status.promoted, status.previous, status.candidate, status.move)
    return world.registry.aliases, tags, numbers, conditions, world.moves()


async def told(story: Story, *, before: int | None = None, after: int | None = None) -> tuple[World, bool]:
    """The story, with the operator killed at one write, and another started in its place."""
    simulation = World()
    simulation.writes.kill_before, simulation.writes.kill_after = before, after
    settle, killed = simulation.settle, False

    async def settled(**_: object) -> None:
        nonlocal killed
        try:
            await settle()
        except KilledError:
            killed = True
            simulation.restart()
            await settle()

    simulation.settle = settled  # type: ignore[method-assign]
    await story(simulation)
    return simulation, killed


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
async def test_the_operator_may_die_at_every_write(story: Story) -> None:
    undisturbed, _ = await told(story)
    expected, writes = outcome(undisturbed), undisturbed.writes.count
    for number in range(1, writes + 1):
        for point in ("before", "after"):
            simulation, killed = await told(story, **{point: number})
            where = f"{point} write {number} of {writes}: {simulation.writes.log}"
            assert killed, where
            assert outcome(simulation) == expected, where
            assert simulation.registry.moves == undisturbed.registry.moves, where


_replica = ContextVar("_replica", default="")


async def _named(replica: Operator) -> None:
    """One pass, whose writes are the replica's."""
    _replica.set(replica.name)
    await replica.look("champion")


def _count_writers(world: World) -> set[str]:
    """The replicas that try to write to the API server from now on."""
    writers: set[str] = set()
    apply = type(world.kube).apply

    async def noted(body: Json, *, subresource: str = "") -> Json:
        writers.add(_replica.get())
        return await apply(world.kube, body, subresource=subresource)

    world.kube.apply = noted  # type: ignore[method-assign]
    return writers


async def test_two_replicas_that_race_make_each_move_once() -> None:
    simulation = World()
    for version, loss in (("1", 2.4), ("2", 2.2)):
        simulation.registry.add(version, eval_loss=loss)
    simulation.submit(gates=GATES)
    simulation.registry.aliases["staging"] = "2"
    replicas = [Operator(simulation, name) for name in ("one", "other", "third")]
    raced: set[str] = set()
    wrote: set[str] = set()
    for _ in range(12):
        simulation.seconds += simulation.settings.poll_seconds
        writers = _count_writers(simulation)
        await asyncio.gather(*(_named(replica) for replica in replicas))
        raced, wrote = raced | (writers if len(writers) > 1 else set()), wrote | writers
    # A replica that does nothing leaves the others with nobody to race.
    assert raced == wrote == {"one", "other", "third"}
    assert (simulation.registry.moves, simulation.moves()) == ([("champion", "2")], [("Promoted", None, "2")])
    assert simulation.status().phase == "Promoted"


async def test_a_replica_that_slept_does_not_make_an_old_move() -> None:
    simulation = World()
    await promoted(simulation)
    sleeper = Operator(simulation, "sleeper")
    simulation.registry.add("4", eval_loss=1.9)
    simulation.registry.aliases["staging"] = "4"
    simulation.seconds += 5
    await sleeper.look("champion")
    journalled = dict(sleeper.store.promotions["team", "champion"])
    await simulation.settle()
    simulation.edit(rollbackTo={"type": "Version", "version": "3"})
    await simulation.settle()
    assert simulation.registry.aliases["champion"] == "3"
    simulation.seconds += 5
    await sleeper.reconciler.reconcile(journalled)
    await simulation.settle()
    assert (simulation.registry.aliases["champion"], simulation.status().phase) == ("3", "Promoted")


async def test_a_promotion_that_is_suspended_while_its_move_waits_for_the_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = World()
    simulation.registry.add("1")
    simulation.registry.aliases["staging"] = "1"
    simulation.submit(tags={"team": "support"})
    await simulation.operator.look("champion")
    assert simulation.status().move is not None
    create = simulation.kube.create

    async def suspended_meanwhile(body: Json) -> Json:
        created = await create(body)
        if body["kind"] == "Lease":
            simulation.edit(suspend=True)
        return created

    monkeypatch.setattr(simulation.kube, "create", suspended_meanwhile)
    simulation.seconds += 5
    assert await simulation.operator.look("champion") == BUSY_SECONDS
    assert (simulation.registry.moves, simulation.registry.versions["1"].tags) == ([], {})
    assert [kind for kind, _, _ in simulation.kube.objects if kind == "Lease"] == []
    await simulation.settle()
    assert (simulation.registry.moves, simulation.status().phase) == ([], "Suspended")


PROBLEMS = {
    "500": Problem(ConditionReason.MLFLOW_ERROR, "MLflow at http://mlflow:5000 answered: HTTP 500"),
    "host check": Problem(ConditionReason.MLFLOW_HOST_NOT_ALLOWED, "MLflow refuses its own host name (403)"),
    "no answer": Problem(ConditionReason.MLFLOW_UNREACHABLE, "MLflow cannot be reached: Read timed out"),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
async def test_a_registry_that_fails_in_the_middle_of_a_move(problem: Problem) -> None:
    simulation = World()
    simulation.registry.add("2", eval_loss=2.0)
    simulation.submit(gates=GATES)
    simulation.registry.aliases["staging"] = "2"
    simulation.seconds += 5
    await simulation.operator.look("champion")
    assert simulation.status().move is not None
    simulation.registry.problem = problem
    await simulation.settle()
    assert simulation.says("RegistryReady") == (problem.reason, problem.message)
    assert simulation.status().move is not None
    simulation.registry.problem = None
    await simulation.settle()
    assert (simulation.registry.aliases["champion"], simulation.moves()) == ("2", [("Promoted", None, "2")])


async def test_a_mistake_of_the_operators_own_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    simulation = World()
    simulation.submit(gates=GATES)
    simulation.registry.before_reading = lambda: 1 // 0  # type: ignore[assignment]
    with caplog.at_level("CRITICAL"):
        for _ in range(3):
            simulation.seconds += 100
            simulation.operator.watch()
            await simulation.operator.reconciler.handle("team/champion")
    assert simulation.says("Accepted") == (
        "InternalError",
        "the operator failed to reconcile this resource (ZeroDivisionError) and retries: read the operator's log",
    )
    assert simulation.writes.log == ["create Event", "status ModelPromotion"]
