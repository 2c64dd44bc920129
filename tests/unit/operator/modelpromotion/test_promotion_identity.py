"""Another registry under the same spec: the versions have the same numbers, and never passed the gates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.errors import Problem
from fixtures.operator_in_memory.promotions import Memory, World

DIFFERENCE = (
    "registered model support-llama was created at 2026-07-02T00:00:00.000Z, but status.registry records a model created at "
    "2026-07-01T00:00:00.000Z"
)
CHANGED = (
    f"{DIFFERENCE}: the spec points to another registry, or the database was restored; the operator writes nothing until you undo "
    "the change, or set spec.onDrift to Adopt, which starts from the current version of the alias"
)


async def world(**spec: Any) -> World:
    """Champion went from version 1 to 2."""
    simulation = World()
    for version, loss in (("1", 3.0), ("2", 2.0), ("3", 2.5)):
        simulation.registry.add(version, loss=loss)
    simulation.submit(**{"source": {"type": "Version", "version": "1"}} | spec)
    await simulation.settle()
    simulation.edit(source={"type": "Version", "version": "2"})
    await simulation.settle()
    assert simulation.moves() == [("Promoted", None, "1"), ("Promoted", "1", "2")]
    return simulation


def exchange(rollout: World, message: str | None = "1") -> tuple[Memory, Memory]:
    """Let the spec lead to another registry, where the alias is elsewhere; the registry before, and this one."""
    before = rollout.registry
    new_registry = Memory(rollout.writes, number=2)
    for version in before.versions:
        new_registry.add(version, loss=9.0)
    if message:
        new_registry.aliases["champion"] = message
    rollout.registry = new_registry
    return before, new_registry


async def then(rollout: World, **spec: Any) -> World:
    rollout.edit(**spec)
    await rollout.settle()
    return rollout


async def test_another_registry_is_not_written_to() -> None:
    simulation = await world()
    before, new_registry = exchange(simulation)
    memory = simulation.status()
    await simulation.settle()
    assert (simulation.phase_and_reason(), new_registry.moves, new_registry.aliases) == (
        "Blocked: RegistryChanged",
        [],
        {"champion": "1"},
    )
    assert all(not version.tags for version in new_registry.versions.values())
    assert simulation.says("RegistryReady") == ("RegistryChanged", CHANGED)
    assert simulation.says("Promoted") == ("RegistryChanged", CHANGED)
    writes = simulation.writes.count
    simulation.seconds += 3600
    await simulation.settle()
    assert simulation.writes.count == writes
    # The one before is back, and so is everything that was known.
    simulation.registry = before
    await simulation.settle()
    after = simulation.status()
    assert after.phase == "Promoted"
    assert (after.promoted, after.previous, after.history) == (
        memory.promoted,
        memory.previous,
        memory.history,
    )


@pytest.mark.parametrize(
    "spec",
    [
        {"rollbackTo": {"type": "Previous"}},
        {"rollbackTo": {"type": "Version", "version": "3"}},
        {"source": {"type": "Version", "version": "3"}},
    ],
)
async def test_nothing_is_rolled_back_or_promoted_in_another_registry(spec: dict[str, Any]) -> None:
    simulation = await world()
    _, new_registry = exchange(simulation, "2")
    await then(simulation, **spec)
    assert (simulation.phase_and_reason(), new_registry.aliases, new_registry.moves) == (
        "Blocked: RegistryChanged",
        {"champion": "2"},
        [],
    )


async def test_adopt_starts_anew_in_the_other_registry() -> None:
    simulation = await world(gates=[{"name": "loss", "type": "Metric", "metric": {"name": "loss", "max": 5}}])
    _, new_registry = exchange(simulation)
    await simulation.settle()
    await then(simulation, onDrift="Adopt")
    status = simulation.status()
    assert (status.phase, status.promoted, status.previous, status.candidate) == ("Refused", "1", None, "2")
    assert (new_registry.moves, simulation.moves()) == ([], [("Adopted", None, "1")])
    assert (
        status.history[0].message
        == f"{DIFFERENCE}: spec.onDrift is Adopt, so the promotion starts over from the current version of the alias"
    )
    new_registry.add("4", loss=4.0)
    await then(simulation, source={"type": "Version", "version": "4"}, onDrift="Repair")
    assert (simulation.status().phase, new_registry.aliases) == ("Promoted", {"champion": "4"})


async def test_adopt_that_stood_before_is_no_answer() -> None:
    simulation = await world(onDrift="Adopt")
    memory = simulation.status()
    before, new_registry = exchange(simulation)
    await simulation.settle()
    assert (simulation.phase_and_reason(), simulation.status().history, new_registry.moves) == (
        "Blocked: RegistryChanged",
        memory.history,
        [],
    )
    assert all(not version.tags for version in new_registry.versions.values())
    condition = simulation.says("RegistryReady")
    assert condition == (
        "RegistryChanged",
        CHANGED.replace("spec.onDrift to Adopt", "spec.onDrift to Warn, and then back to Adopt"),
    )
    simulation.registry = before
    await simulation.settle()
    assert (simulation.status().phase, before.aliases) == ("Promoted", {"champion": "2"})
    simulation.registry = new_registry
    await simulation.settle()
    await then(simulation, onDrift="Warn")
    assert (simulation.phase_and_reason(), new_registry.moves) == ("Blocked: RegistryChanged", [])
    await then(simulation, onDrift="Adopt")
    assert (simulation.moves()[0], new_registry.moves) == (("Adopted", None, "1"), [("champion", "2")])


async def test_an_edit_before_the_difference_was_said_is_no_answer() -> None:
    simulation = await world()
    _, new_registry = exchange(simulation)
    await then(simulation, onDrift="Adopt")
    assert (simulation.phase_and_reason(), new_registry.moves) == ("Blocked: RegistryChanged", [])


async def test_a_promotion_that_is_made_anew_goes_on_in_the_other_registry() -> None:
    simulation = await world()
    _, new_registry = exchange(simulation)
    await simulation.settle()
    simulation.remove()
    simulation.submit(source={"type": "Version", "version": "3"})
    await simulation.settle()
    assert (simulation.status().phase, new_registry.aliases) == ("Promoted", {"champion": "3"})


async def test_a_restored_database_whose_versions_were_registered_again() -> None:
    """The model is the same; version 2, which passed, is another one by now."""
    simulation = await world()
    old_version = simulation.registry.versions["2"]
    simulation.registry.versions["2"] = replace(old_version, run_id="another")
    simulation.registry.aliases["champion"] = "1"
    await simulation.settle()
    assert (simulation.phase_and_reason(), simulation.registry.aliases["champion"]) == (
        "Blocked: RegistryChanged",
        "1",
    )
    condition = simulation.says("RegistryReady")
    assert condition
    assert condition[1].startswith(
        "version 2 of support-llama was created at 2026-07-01T00:00:02.000Z by run another, but status.registry records one created at "
        "2026-07-01T00:00:02.000Z by run r2-1: "
    )


async def approved_and_lost() -> World:
    """Version 2 was approved and promoted; then a restored database knows only version 1."""
    simulation = World()
    for version in ("1", "2"):
        simulation.registry.add(version, loss=2.0)
    simulation.submit(source={"type": "Version", "version": "1"})
    await simulation.settle()
    await then(
        simulation,
        source={"type": "Version", "version": "2"},
        approval={},
        approvals=[{"version": "2", "by": "kim"}],
    )
    await then(simulation, approvals=[])
    assert simulation.moves() == [("Promoted", None, "1"), ("Promoted", "1", "2")]
    simulation.registry.versions.pop("2")
    simulation.registry.aliases["champion"] = "1"
    await simulation.settle()
    assert simulation.moves()[2:] == [("VersionDeleted", "2", None), ("Adopted", None, "1")]
    return simulation


async def test_a_version_of_the_history_is_known_after_it_was_lost() -> None:
    simulation = await approved_and_lost()
    simulation.registry.add("2", loss=2.0)
    added = simulation.registry.versions["2"]
    assert added.created
    simulation.registry.versions["2"] = replace(
        added, run_id="another", created=added.created + timedelta(days=9)
    )
    await simulation.settle()
    assert (simulation.phase_and_reason(), simulation.registry.aliases) == (
        "Blocked: RegistryChanged",
        {"champion": "1"},
    )
    condition = simulation.says("RegistryReady")
    assert condition
    assert condition[0] == "RegistryChanged"


async def test_a_version_that_was_deleted_is_approved_anew() -> None:
    """The registry tells neither when the version was created nor by which run."""
    simulation = await approved_and_lost()
    simulation.registry.add("2", loss=2.0)
    simulation.registry.versions["2"] = replace(simulation.registry.versions["2"], run_id=None, created=None)
    await simulation.settle()
    assert (simulation.status().phase, simulation.registry.aliases) == ("AwaitingApproval", {"champion": "1"})


async def test_a_status_of_an_older_operator_takes_over_what_is_there() -> None:
    simulation = await world()
    objects = simulation.kube.objects["ModelPromotion", "team", "champion"]
    status = {name: value for name, value in objects["status"].items() if name != "registry"}
    simulation.kube.keep({**objects, "status": status})
    await simulation.settle()
    registry = simulation.status().registry
    assert registry
    assert registry.to_json() == {
        "modelCreationTime": "2026-07-01T00:00:00Z",
        "hasDecisions": True,
        "versions": [
            {"version": "2", "creationTime": "2026-07-01T00:00:02Z", "runId": "r2-1"},
        ],
    }
    exchange(simulation)
    await simulation.settle()
    assert simulation.says("RegistryReady") == ("RegistryChanged", CHANGED)


async def test_a_model_that_disappears_is_remembered_and_one_made_anew_is_another() -> None:
    simulation = await world()
    await then(simulation, rollbackTo={"type": "Previous"})
    simulation.registry.exists = False
    await simulation.settle()
    assert simulation.says("Promoted") == ("WaitingForModel", "registered model support-llama does not exist")
    simulation.registry.exists = True
    await simulation.settle()
    assert (simulation.phase_and_reason(), simulation.status().promoted, simulation.status().previous) == (
        "Promoted: RolledBack",
        "1",
        "2",
    )
    simulation.registry.exists = False
    await simulation.settle()
    _, new_registry = exchange(simulation, None)
    await simulation.settle()
    assert (simulation.says("RegistryReady"), new_registry.aliases) == (("RegistryChanged", CHANGED), {})
    await then(simulation, onDrift="Adopt")
    assert new_registry.aliases == {}
    assert simulation.says("Promoted") == (
        "NothingToRollBackTo",
        "spec.rollbackTo has type Previous, and no previous version is known: set rollbackTo: {type: Version, version: N} "
        "to one of your versions",
    )


async def test_a_move_in_the_journal_waits_for_its_registry() -> None:
    simulation = await world()
    simulation.registry.refusal = Problem(ConditionReason.MLFLOW_UNREACHABLE, "the request timed out")
    simulation.edit(source={"type": "Version", "version": "3"})
    for _ in range(3):
        simulation.seconds += 60
        await simulation.operator.look("champion")
    journal = simulation.status().move
    assert journal
    before, new_registry = exchange(simulation)
    simulation.restart()
    await simulation.settle()
    assert (simulation.status().move, new_registry.moves) == (journal, [])
    new_registry.exists = False
    await simulation.settle()
    assert (simulation.status().move, simulation.moves()[2:]) == (journal, [])
    before.refusal = None
    simulation.registry = before
    await simulation.settle()
    assert before.aliases["champion"] == "3"
    assert simulation.moves()[2:] == [("Promoted", "2", "3")]


async def test_a_suspended_promotion_adopts_no_other_registry() -> None:
    simulation = await world(onDrift="Adopt")
    await then(simulation, suspend=True)
    before, new_registry = exchange(simulation, "2")
    await simulation.settle()
    assert (simulation.status().phase, simulation.status().promoted, new_registry.moves) == (
        "Suspended",
        "2",
        [],
    )
    assert not simulation.holds("Ready")
    simulation.registry = before
    await then(simulation, suspend=False)
    assert (simulation.status().phase, simulation.status().promoted, len(simulation.moves())) == (
        "Promoted",
        "2",
        2,
    )


@dataclass
class Deletion:
    """A promotion that takes its alias with it, and the registry that it finds then."""

    exchanged: Callable[[World], Memory]
    aliases: dict[str, str]


def _same(rollout: World) -> Memory:
    return rollout.registry


def _version_made_anew(rollout: World) -> Memory:
    rollout.registry.versions["2"] = replace(rollout.registry.versions["2"], run_id="another")
    return rollout.registry


DELETIONS = {
    "the same registry": Deletion(_same, {}),
    "another registry": Deletion(lambda there: exchange(there, "2")[1], {"champion": "2"}),
    "a restored database": Deletion(_version_made_anew, {"champion": "2"}),
}


@pytest.mark.parametrize("case", DELETIONS.values(), ids=DELETIONS)
async def test_an_alias_is_removed_from_its_own_registry_alone(case: Deletion) -> None:
    simulation = await world(onDelete="RemoveAlias")
    registry = case.exchanged(simulation)
    simulation.remove()
    await simulation.settle()
    assert registry.aliases == case.aliases
    assert simulation.names() == []


async def test_a_registry_that_is_exchanged_during_a_pass_is_not_written_to() -> None:
    """What was decided on one registry is written to none that the spec leads to a moment later."""
    simulation = await world()
    simulation.edit(source={"type": "Version", "version": "3"})
    simulation.seconds += 5
    await simulation.operator.look("champion")
    assert simulation.status().move
    registry = simulation.registry
    new_registry = Memory(simulation.writes, number=2)
    new_registry.versions, new_registry.aliases = dict(registry.versions), {"champion": "2"}
    reads = simulation.operator.reconciler.observer.open
    opened: list[Memory] = []

    def open_registry(*fields: Any) -> Any:
        opened.append(registry if not opened else new_registry)
        return opened[-1]

    simulation.operator.reconciler.observer.open = open_registry
    simulation.seconds += 5
    await simulation.operator.look("champion")
    assert (new_registry.moves, len(opened)) == ([], 2)
    simulation.operator.reconciler.observer.open = reads
    await simulation.settle()
    assert registry.aliases["champion"] == "3"
