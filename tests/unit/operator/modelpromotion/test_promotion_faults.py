"""The operator dies at every point between two writes; replicas race; the registry fails. Nothing is lost or doubled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.controller.reconciler import BUSY_SECONDS
from finetune_operator.errors import Problem
from unit.operator.modelpromotion.champion import GATES
from worlds.memory.promotions import Json, KilledError, Operator, World

Story = Callable[[World], Awaitable[None]]


async def promoted(there: World) -> None:
    """Two versions, one after the other, and the second approved."""
    for version, loss in (("1", 2.4), ("2", 2.2), ("3", 2.0)):
        there.registry.add(version, eval_loss=loss)
    there.submit(gates=GATES, tags={"team": "support"})
    there.registry.aliases |= {"staging": "2"}
    await there.settle()
    there.registry.aliases["staging"] = "3"
    await there.settle()


async def rolled_back(there: World) -> None:
    """And back to the first."""
    await promoted(there)
    there.edit(rollbackTo={"type": "Previous"})
    await there.settle()


async def repaired(there: World) -> None:
    """Somebody moves the alias by hand."""
    await promoted(there)
    there.registry.aliases["champion"] = "1"
    await there.settle()


async def adopted(there: World) -> None:
    """Somebody moves the alias by hand, and it is left there."""
    await promoted(there)
    there.edit(onDrift="Adopt")
    there.registry.aliases["champion"] = "1"
    await there.settle()


async def removed(there: World) -> None:
    """The resource is deleted, and its alias with it."""
    await promoted(there)
    there.edit(onDelete="RemoveAlias")
    await there.settle()
    there.remove()
    await there.settle()


STORIES: dict[str, Story] = {
    "promoted": promoted,
    "rolled back": rolled_back,
    "repaired": repaired,
    "adopted": adopted,
    "removed": removed,
}


def outcome(there: World) -> object:
    """Everything that counts at the end: where aliases and tags are, and what the resource says."""
    tags = {
        number: {key: value for key, value in version.tags.items() if key != "promoted_at"}
        for number, version in there.registry.versions.items()
    }
    if not there.names():
        return there.registry.aliases, tags
    status = there.status()
    said = [(item.type, item.status, item.reason, item.message) for item in status.conditions]
    numbers = (status.phase, status.current, status.promoted, status.previous, status.candidate, status.move)
    return there.registry.aliases, tags, numbers, said, there.moves()


async def told(story: Story, *, before: int | None = None, after: int | None = None) -> tuple[World, bool]:
    """The story, with the operator killed at one write, and another started in its place."""
    there = World()
    there.writes.kill_before, there.writes.kill_after = before, after
    settle, killed = there.settle, False

    async def settled(**_: object) -> None:
        nonlocal killed
        try:
            await settle()
        except KilledError:
            killed = True
            there.restart()
            await settle()

    there.settle = settled  # type: ignore[method-assign]
    await story(there)
    return there, killed


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
async def test_the_operator_may_die_at_every_write(story: Story) -> None:
    undisturbed, _ = await told(story)
    expected, writes = outcome(undisturbed), undisturbed.writes.count
    for number in range(1, writes + 1):
        for point in ("before", "after"):
            there, killed = await told(story, **{point: number})
            where = f"{point} write {number} of {writes}: {there.writes.log}"
            assert killed, where
            assert outcome(there) == expected, where
            assert there.registry.moves == undisturbed.registry.moves, where


_replica = ContextVar("_replica", default="")


async def _named(replica: Operator) -> None:
    """One pass, whose writes are the replica's."""
    _replica.set(replica.name)
    await replica.look("champion")


def _count_writers(there: World) -> set[str]:
    """The replicas that try to write to the API server from now on."""
    seen: set[str] = set()
    apply = type(there.kube).apply

    async def noted(body: Json, *, subresource: str = "") -> Json:
        seen.add(_replica.get())
        return await apply(there.kube, body, subresource=subresource)

    there.kube.apply = noted  # type: ignore[method-assign]
    return seen


async def test_two_replicas_that_race_make_each_move_once() -> None:
    there = World()
    for version, loss in (("1", 2.4), ("2", 2.2)):
        there.registry.add(version, eval_loss=loss)
    there.submit(gates=GATES)
    there.registry.aliases["staging"] = "2"
    replicas = [Operator(there, name) for name in ("one", "other", "third")]
    raced: set[str] = set()
    wrote: set[str] = set()
    for _ in range(12):
        there.seconds += there.settings.poll_seconds
        writers = _count_writers(there)
        await asyncio.gather(*(_named(replica) for replica in replicas))
        raced, wrote = raced | (writers if len(writers) > 1 else set()), wrote | writers
    # A replica that does nothing leaves the others with nobody to race.
    assert raced == wrote == {"one", "other", "third"}
    assert (there.registry.moves, there.moves()) == ([("champion", "2")], [("Promoted", None, "2")])
    assert there.status().phase == "Promoted"


async def test_a_replica_that_slept_does_not_make_an_old_move() -> None:
    there = World()
    await promoted(there)
    sleeper = Operator(there, "sleeper")
    there.registry.add("4", eval_loss=1.9)
    there.registry.aliases["staging"] = "4"
    there.seconds += 5
    await sleeper.look("champion")
    journalled = dict(sleeper.store.promotions["team", "champion"])
    await there.settle()
    there.edit(rollbackTo={"type": "Version", "version": "3"})
    await there.settle()
    assert there.registry.aliases["champion"] == "3"
    there.seconds += 5
    await sleeper.reconciler.reconcile(journalled)
    await there.settle()
    assert (there.registry.aliases["champion"], there.status().phase) == ("3", "RolledBack")


async def test_a_promotion_that_is_suspended_while_its_move_waits_for_the_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = World()
    there.registry.add("1")
    there.registry.aliases["staging"] = "1"
    there.submit(tags={"team": "support"})
    await there.operator.look("champion")
    assert there.status().move is not None
    create = there.kube.create

    async def suspended_meanwhile(body: Json) -> Json:
        made = await create(body)
        if body["kind"] == "Lease":
            there.edit(suspend=True)
        return made

    monkeypatch.setattr(there.kube, "create", suspended_meanwhile)
    there.seconds += 5
    assert await there.operator.look("champion") == BUSY_SECONDS
    assert (there.registry.moves, there.registry.versions["1"].tags) == ([], {})
    assert [kind for kind, _, _ in there.kube.objects if kind == "Lease"] == []
    await there.settle()
    assert (there.registry.moves, there.status().phase) == ([], "Suspended")


PROBLEMS = {
    "500": Problem(ConditionReason.MLFLOW_ERROR, "MLflow at http://mlflow:5000 answered: HTTP 500"),
    "host check": Problem(ConditionReason.MLFLOW_HOST_NOT_ALLOWED, "MLflow refuses its own host name (403)"),
    "no answer": Problem(ConditionReason.MLFLOW_UNREACHABLE, "MLflow cannot be reached: Read timed out"),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
async def test_a_registry_that_fails_in_the_middle_of_a_move(problem: Problem) -> None:
    there = World()
    there.registry.add("2", eval_loss=2.0)
    there.submit(gates=GATES)
    there.registry.aliases["staging"] = "2"
    there.seconds += 5
    await there.operator.look("champion")
    assert there.status().move is not None
    there.registry.problem = problem
    await there.settle()
    assert there.says("RegistryReady") == (problem.reason, problem.message)
    assert there.status().move is not None
    there.registry.problem = None
    await there.settle()
    assert (there.registry.aliases["champion"], there.moves()) == ("2", [("Promoted", None, "2")])


async def test_a_mistake_of_the_operators_own_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    there = World()
    there.submit(gates=GATES)
    there.registry.before_reading = lambda: 1 // 0  # type: ignore[assignment]
    with caplog.at_level("CRITICAL"):
        for _ in range(3):
            there.seconds += 100
            there.operator.watch()
            await there.operator.reconciler.handle("team/champion")
    assert there.says("Accepted") == (
        "InternalError",
        "the operator failed on this resource (ZeroDivisionError), and tries again: read its log",
    )
    assert there.writes.log == ["status ModelPromotion", "create Event"]
