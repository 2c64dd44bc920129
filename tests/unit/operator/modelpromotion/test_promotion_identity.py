"""Another registry under the same spec: the versions have the same numbers, and never passed the gates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.errors import Problem
from worlds.memory.promotions import Memory, World

DIFFERENCE = (
    "registered model support-llama was created at 2026-07-02T00:00:00.000Z, the one that this promotion knows at "
    "2026-07-01T00:00:00.000Z"
)
CHANGED = (
    f"{DIFFERENCE}: the spec points to another registry, or to a restored database, and nothing is written; undo that, or "
    "set spec.onDrift to Adopt to start from where the alias is now"
)


async def world(**spec: Any) -> World:
    """Champion went from version 1 to 2."""
    made = World()
    for version, loss in (("1", 3.0), ("2", 2.0), ("3", 2.5)):
        made.registry.add(version, loss=loss)
    made.submit(**{"source": {"type": "Version", "version": "1"}} | spec)
    await made.settle()
    made.edit(source={"type": "Version", "version": "2"})
    await made.settle()
    assert made.moves() == [("Promoted", None, "1"), ("Promoted", "1", "2")]
    return made


def exchange(there: World, held: str | None = "1") -> tuple[Memory, Memory]:
    """Let the spec lead to another registry, where the alias is elsewhere; the registry before, and this one."""
    before = there.registry
    other = Memory(there.writes, number=2)
    for version in before.versions:
        other.add(version, loss=9.0)
    if held:
        other.aliases["champion"] = held
    there.registry = other
    return before, other


async def then(there: World, **spec: Any) -> World:
    there.edit(**spec)
    await there.settle()
    return there


async def test_another_registry_is_not_written_to() -> None:
    there = await world()
    before, other = exchange(there)
    memory = there.status()
    await there.settle()
    assert (there.status().phase, other.moves, other.aliases) == ("Drifted", [], {"champion": "1"})
    assert all(not version.tags for version in other.versions.values())
    assert there.says("RegistryReady") == ("RegistryChanged", CHANGED)
    assert there.says("Promoted") == ("RegistryChanged", CHANGED)
    writes = there.writes.count
    there.seconds += 3600
    await there.settle()
    assert there.writes.count == writes
    # The one before is back, and so is everything that was known.
    there.registry = before
    await there.settle()
    after = there.status()
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
    there = await world()
    _, other = exchange(there, "2")
    await then(there, **spec)
    assert (there.status().phase, other.aliases, other.moves) == ("Drifted", {"champion": "2"}, [])


async def test_adopt_starts_anew_in_the_other_registry() -> None:
    there = await world(gates=[{"name": "loss", "type": "Metric", "metric": {"name": "loss", "max": 5}}])
    _, other = exchange(there)
    await there.settle()
    await then(there, onDrift="Adopt")
    status = there.status()
    assert (status.phase, status.promoted, status.previous, status.candidate) == ("Refused", "1", None, "2")
    assert (other.moves, there.moves()) == ([], [("Adopted", None, "1")])
    assert (
        status.history[0].message
        == f"{DIFFERENCE}: spec.onDrift is Adopt, so the promotion starts over from where the alias is"
    )
    other.add("4", loss=4.0)
    await then(there, source={"type": "Version", "version": "4"}, onDrift="Repair")
    assert (there.status().phase, other.aliases) == ("Promoted", {"champion": "4"})


async def test_adopt_that_stood_before_is_no_answer() -> None:
    there = await world(onDrift="Adopt")
    memory = there.status()
    before, other = exchange(there)
    await there.settle()
    assert (there.status().phase, there.status().history, other.moves) == ("Drifted", memory.history, [])
    assert all(not version.tags for version in other.versions.values())
    said = there.says("RegistryReady")
    assert said == (
        "RegistryChanged",
        CHANGED.replace("spec.onDrift to Adopt", "spec.onDrift to Warn and then to Adopt again"),
    )
    there.registry = before
    await there.settle()
    assert (there.status().phase, before.aliases) == ("Promoted", {"champion": "2"})
    there.registry = other
    await there.settle()
    await then(there, onDrift="Warn")
    assert (there.status().phase, other.moves) == ("Drifted", [])
    await then(there, onDrift="Adopt")
    assert (there.moves()[0], other.moves) == (("Adopted", None, "1"), [("champion", "2")])


async def test_an_edit_before_the_difference_was_said_is_no_answer() -> None:
    there = await world()
    _, other = exchange(there)
    await then(there, onDrift="Adopt")
    assert (there.status().phase, other.moves) == ("Drifted", [])


async def test_a_promotion_that_is_made_anew_goes_on_in_the_other_registry() -> None:
    there = await world()
    _, other = exchange(there)
    await there.settle()
    there.remove()
    there.submit(source={"type": "Version", "version": "3"})
    await there.settle()
    assert (there.status().phase, other.aliases) == ("Promoted", {"champion": "3"})


async def test_a_restored_database_whose_versions_were_registered_again() -> None:
    """The model is the same; version 2, which passed, is another one by now."""
    there = await world()
    held = there.registry.versions["2"]
    there.registry.versions["2"] = replace(held, run_id="another")
    there.registry.aliases["champion"] = "1"
    await there.settle()
    assert (there.status().phase, there.registry.aliases["champion"]) == ("Drifted", "1")
    said = there.says("RegistryReady")
    assert said
    assert said[1].startswith(
        "version 2 of support-llama was created at 2026-07-01T00:00:02.000Z by run another, the one that this promotion "
        "knows was created at 2026-07-01T00:00:02.000Z by run r2-1: "
    )


async def approved_and_lost() -> World:
    """Version 2 was approved and promoted; then a restored database knows only version 1."""
    there = World()
    for version in ("1", "2"):
        there.registry.add(version, loss=2.0)
    there.submit(source={"type": "Version", "version": "1"})
    await there.settle()
    await then(there, source={"type": "Version", "version": "2"}, approval={"required": True, "version": "2"})
    await then(there, approval={"required": True})
    assert there.moves() == [("Promoted", None, "1"), ("Promoted", "1", "2")]
    there.registry.versions.pop("2")
    there.registry.aliases["champion"] = "1"
    await there.settle()
    assert there.moves()[2:] == [("VersionDeleted", "2", None), ("Adopted", None, "1")]
    return there


async def test_a_version_of_the_history_is_known_after_it_was_lost() -> None:
    there = await approved_and_lost()
    there.registry.add("2", loss=2.0)
    added = there.registry.versions["2"]
    assert added.created
    there.registry.versions["2"] = replace(added, run_id="another", created=added.created + timedelta(days=9))
    await there.settle()
    assert (there.status().phase, there.registry.aliases) == ("Drifted", {"champion": "1"})
    said = there.says("RegistryReady")
    assert said
    assert said[0] == "RegistryChanged"


async def test_a_version_that_was_deleted_is_approved_anew() -> None:
    """The registry tells neither when the version was created nor by which run."""
    there = await approved_and_lost()
    there.registry.add("2", loss=2.0)
    there.registry.versions["2"] = replace(there.registry.versions["2"], run_id=None, created=None)
    await there.settle()
    assert (there.status().phase, there.registry.aliases) == ("AwaitingApproval", {"champion": "1"})


async def test_a_status_of_an_older_operator_takes_over_what_is_there() -> None:
    there = await world()
    held = there.kube.objects["ModelPromotion", "team", "champion"]
    status = {name: value for name, value in held["status"].items() if name != "registry"}
    there.kube.keep({**held, "status": status})
    await there.settle()
    registry = there.status().registry
    assert registry
    assert registry.to_json() == {
        "modelCreationTime": "2026-07-01T00:00:00Z",
        "versions": [
            {"version": "2", "creationTime": "2026-07-01T00:00:02Z", "runId": "r2-1"},
        ],
    }
    exchange(there)
    await there.settle()
    assert there.says("RegistryReady") == ("RegistryChanged", CHANGED)


async def test_a_model_that_disappears_is_remembered_and_one_made_anew_is_another() -> None:
    there = await world()
    await then(there, rollbackTo={"type": "Previous"})
    there.registry.exists = False
    await there.settle()
    assert there.says("Promoted") == ("WaitingForModel", "registered model support-llama does not exist")
    there.registry.exists = True
    await there.settle()
    assert (there.status().phase, there.status().promoted, there.status().previous) == (
        "RolledBack",
        "1",
        "2",
    )
    there.registry.exists = False
    await there.settle()
    _, other = exchange(there, None)
    await there.settle()
    assert (there.says("RegistryReady"), other.aliases) == (("RegistryChanged", CHANGED), {})
    await then(there, onDrift="Adopt")
    assert other.aliases == {}
    assert there.says("Promoted") == (
        "NothingToRollBackTo",
        "spec.rollbackTo has type Previous, and no previous version is known: set rollbackTo: {type: Version, version: N} with "
        "a version of yours",
    )


async def test_a_move_in_the_journal_waits_for_its_registry() -> None:
    there = await world()
    there.registry.refusal = Problem(ConditionReason.MLFLOW_UNREACHABLE, "no answer in time")
    there.edit(source={"type": "Version", "version": "3"})
    for _ in range(3):
        there.seconds += 60
        await there.operator.look("champion")
    journal = there.status().move
    assert journal
    before, other = exchange(there)
    there.restart()
    await there.settle()
    assert (there.status().move, other.moves) == (journal, [])
    other.exists = False
    await there.settle()
    assert (there.status().move, there.moves()[2:]) == (journal, [])
    before.refusal = None
    there.registry = before
    await there.settle()
    assert before.aliases["champion"] == "3"
    assert there.moves()[2:] == [("Promoted", "2", "3")]


async def test_a_suspended_promotion_adopts_no_other_registry() -> None:
    there = await world(onDrift="Adopt")
    await then(there, suspend=True)
    before, other = exchange(there, "2")
    await there.settle()
    assert (there.status().phase, there.status().promoted, other.moves) == ("Suspended", "2", [])
    assert not there.holds("Ready")
    there.registry = before
    await then(there, suspend=False)
    assert (there.status().phase, there.status().promoted, len(there.moves())) == ("Promoted", "2", 2)


@dataclass
class Deletion:
    """A promotion that takes its alias with it, and the registry that it finds then."""

    exchanged: Callable[[World], Memory]
    aliases: dict[str, str]


def _same(there: World) -> Memory:
    return there.registry


def _version_made_anew(there: World) -> Memory:
    there.registry.versions["2"] = replace(there.registry.versions["2"], run_id="another")
    return there.registry


DELETIONS = {
    "the same registry": Deletion(_same, {}),
    "another registry": Deletion(lambda there: exchange(there, "2")[1], {"champion": "2"}),
    "a restored database": Deletion(_version_made_anew, {"champion": "2"}),
}


@pytest.mark.parametrize("case", DELETIONS.values(), ids=DELETIONS)
async def test_an_alias_is_removed_from_its_own_registry_alone(case: Deletion) -> None:
    there = await world(onDelete="RemoveAlias")
    registry = case.exchanged(there)
    there.remove()
    await there.settle()
    assert registry.aliases == case.aliases
    assert there.names() == []


async def test_a_registry_that_is_exchanged_during_a_pass_is_not_written_to() -> None:
    """What was decided on one registry is written to none that the spec leads to a moment later."""
    there = await world()
    there.edit(source={"type": "Version", "version": "3"})
    there.seconds += 5
    await there.operator.look("champion")
    assert there.status().move
    held = there.registry
    other = Memory(there.writes, number=2)
    other.versions, other.aliases = dict(held.versions), {"champion": "2"}
    reads = there.operator.reconciler.observer.open
    opened: list[Memory] = []

    def open_registry(*asked: Any) -> Any:
        opened.append(held if not opened else other)
        return opened[-1]

    there.operator.reconciler.observer.open = open_registry
    there.seconds += 5
    await there.operator.look("champion")
    assert (other.moves, len(opened)) == ([], 2)
    there.operator.reconciler.observer.open = reads
    await there.settle()
    assert held.aliases["champion"] == "3"
