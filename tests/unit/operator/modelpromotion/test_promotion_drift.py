"""Drift, and its repair, adoption or warning, on a registry and an API server in memory."""

from __future__ import annotations

import pytest

from unit.operator.modelpromotion.champion import GATES, world

DRIFT = {
    "Repair": ("Promoted", "2", ["Promoted", "Repaired"]),
    "Warn": ("Drifted", "1", ["Promoted"]),
    "Adopt": ("Promoted", "1", ["Promoted", "Adopted"]),
}


@pytest.mark.parametrize(("on_drift", "expected"), DRIFT.items(), ids=DRIFT)
async def test_an_alias_that_somebody_else_moved(on_drift: str, expected: tuple[str, str, list[str]]) -> None:
    there = world(onDrift=on_drift)
    there.registry.aliases["staging"] = "2"
    await there.settle()
    there.registry.aliases["champion"] = "1"
    await there.settle()
    assert (
        there.status().phase,
        there.registry.aliases["champion"],
        [move[0] for move in there.moves()],
    ) == expected
    assert there.status().current == there.registry.aliases["champion"]
    assert there.status().previous == ("2" if on_drift == "Adopt" else None)


async def test_what_was_adopted_stays_until_a_new_version_comes() -> None:
    there = world(onDrift="Adopt")
    there.registry.aliases["staging"] = "2"
    await there.settle()
    there.registry.aliases["champion"] = "1"
    await there.settle()
    there.restart()
    await there.settle()
    assert there.registry.aliases["champion"] == "1"
    there.registry.aliases["staging"] = "3"
    await there.settle()
    assert (there.status().phase, there.registry.aliases["champion"]) == ("Promoted", "3")


REMOVED = {"Repair": ("Promoted", "2"), "Warn": ("Drifted", None), "Adopt": ("Promoted", None)}


@pytest.mark.parametrize(("on_drift", "expected"), REMOVED.items(), ids=REMOVED)
async def test_an_alias_that_somebody_else_removed(on_drift: str, expected: tuple[str, str | None]) -> None:
    there = world(onDrift=on_drift)
    there.registry.aliases["staging"] = "2"
    await there.settle()
    del there.registry.aliases["champion"]
    await there.settle()
    assert (there.status().phase, there.registry.aliases.get("champion")) == expected
    assert there.status().current == expected[1]


async def test_a_version_that_was_deleted_under_the_alias_is_not_brought_back() -> None:
    there = world()
    there.registry.aliases["staging"] = "2"
    await there.settle()
    there.registry.delete("2")
    await there.settle()
    assert (there.status().phase, there.status().current) == ("Pending", None)
    there.registry.aliases["staging"] = "3"
    await there.settle()
    assert (there.status().phase, there.registry.aliases) == ("Evaluating", {"staging": "3"})
    there.edit(gates=GATES[:1])
    await there.settle()
    assert there.registry.aliases["champion"] == "3"


@pytest.mark.parametrize("bound", ["champion-was-nowhere", "champion-was-deleted"])
async def test_a_version_that_was_refused_is_drift_when_somebody_points_the_alias_at_it(
    bound: str,
) -> None:
    there = world()
    there.registry.add("4", eval_loss=9.0)
    if bound == "champion-was-deleted":
        there.registry.aliases["staging"] = "1"
        await there.settle()
        there.registry.delete("1")
    there.registry.aliases["staging"] = "4"
    await there.settle()
    assert there.status().phase == "Refused"
    there.registry.aliases["champion"] = "4"
    await there.settle()
    assert (there.status().phase, there.registry.aliases) == ("Drifted", {"staging": "4", "champion": "4"})
    assert "4" not in {to for _, _, to in there.moves()}


async def test_a_move_that_was_overtaken_is_no_promotion_to_go_back_to() -> None:
    there = world(source={"type": "Version", "version": 2}, approval={"required": True, "version": 2})
    there.registry.aliases["champion"] = "1"
    there.seconds += 5
    await there.operator.look("champion")
    assert there.status().move is not None
    there.registry.aliases["champion"] = "3"
    there.edit(approval={"required": True})
    await there.settle()
    assert (there.status().phase, there.registry.aliases["champion"]) == ("AwaitingApproval", "1")
    assert [move[0] for move in there.moves()] == ["Overtaken", "Repaired"]


async def test_what_was_adopted_stays_when_the_gates_change() -> None:
    there = world(onDrift="Adopt")
    there.registry.aliases["staging"] = "2"
    await there.settle()
    there.registry.aliases["champion"] = "1"
    await there.settle()
    there.edit(gates=None)
    await there.settle()
    assert there.registry.aliases["champion"] == "1"


async def test_warn_does_not_wait_for_a_version_that_was_deleted() -> None:
    there = world(onDrift="Warn", gates=GATES[:1])
    there.registry.aliases["staging"] = "1"
    await there.settle()
    there.registry.delete("1")
    there.registry.aliases["staging"] = "2"
    await there.settle()
    assert (there.status().phase, there.registry.aliases["champion"]) == ("Promoted", "2")
