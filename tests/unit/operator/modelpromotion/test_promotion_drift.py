"""Drift, and its repair, adoption or warning, on a registry and an API server in memory."""

from __future__ import annotations

import pytest

from unit.operator.modelpromotion.champion import GATES, world

DRIFT = {
    "Repair": ("Promoted: Repaired", "2", ["Promoted", "Repaired"]),
    "Warn": ("Blocked: AliasMoved", "1", ["Promoted"]),
    "Adopt": ("Promoted: Adopted", "1", ["Promoted", "Adopted"]),
}


@pytest.mark.parametrize(("on_drift", "expected"), DRIFT.items(), ids=DRIFT)
async def test_an_alias_that_somebody_else_moved(on_drift: str, expected: tuple[str, str, list[str]]) -> None:
    simulation = world(onDrift=on_drift)
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    simulation.registry.aliases["champion"] = "1"
    await simulation.settle()
    assert (
        simulation.phase_and_reason(),
        simulation.registry.aliases["champion"],
        [move[0] for move in simulation.moves()],
    ) == expected
    assert simulation.status().current == simulation.registry.aliases["champion"]
    assert simulation.status().previous == ("2" if on_drift == "Adopt" else None)


async def test_what_was_adopted_stays_until_a_new_version_comes() -> None:
    simulation = world(onDrift="Adopt")
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    simulation.registry.aliases["champion"] = "1"
    await simulation.settle()
    simulation.restart()
    await simulation.settle()
    assert simulation.registry.aliases["champion"] == "1"
    simulation.registry.aliases["staging"] = "3"
    await simulation.settle()
    assert (simulation.status().phase, simulation.registry.aliases["champion"]) == ("Promoted", "3")


REMOVED = {
    "Repair": ("Promoted: Repaired", "2"),
    "Warn": ("Blocked: AliasRemoved", None),
    "Adopt": ("Promoted: Adopted", None),
}


@pytest.mark.parametrize(("on_drift", "expected"), REMOVED.items(), ids=REMOVED)
async def test_an_alias_that_somebody_else_removed(on_drift: str, expected: tuple[str, str | None]) -> None:
    simulation = world(onDrift=on_drift)
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    del simulation.registry.aliases["champion"]
    await simulation.settle()
    assert (simulation.phase_and_reason(), simulation.registry.aliases.get("champion")) == expected
    assert simulation.status().current == expected[1]


async def test_a_version_that_was_deleted_under_the_alias_is_not_brought_back() -> None:
    simulation = world()
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    simulation.registry.delete("2")
    await simulation.settle()
    assert (simulation.status().phase, simulation.status().current) == ("Pending", None)
    simulation.registry.aliases["staging"] = "3"
    await simulation.settle()
    assert (simulation.phase_and_reason(), simulation.registry.aliases) == (
        "Pending: GateInconclusive",
        {"staging": "3"},
    )
    simulation.edit(gates=GATES[:1])
    await simulation.settle()
    assert simulation.registry.aliases["champion"] == "3"


@pytest.mark.parametrize("bound", ["champion-was-nowhere", "champion-was-deleted"])
async def test_a_version_that_was_refused_is_drift_when_somebody_points_the_alias_at_it(
    bound: str,
) -> None:
    simulation = world()
    simulation.registry.add("4", eval_loss=9.0)
    if bound == "champion-was-deleted":
        simulation.registry.aliases["staging"] = "1"
        await simulation.settle()
        simulation.registry.delete("1")
    simulation.registry.aliases["staging"] = "4"
    await simulation.settle()
    assert simulation.status().phase == "Refused"
    simulation.registry.aliases["champion"] = "4"
    await simulation.settle()
    assert (simulation.phase_and_reason(), simulation.registry.aliases) == (
        "Blocked: AliasMoved",
        {"staging": "4", "champion": "4"},
    )
    assert "4" not in {to for _, _, to in simulation.moves()}


async def test_a_move_that_was_overtaken_is_no_promotion_to_go_back_to() -> None:
    simulation = world(
        source={"type": "Version", "version": 2}, approval={}, approvals=[{"version": 2, "by": "kim"}]
    )
    simulation.registry.aliases["champion"] = "1"
    simulation.seconds += 5
    await simulation.operator.look("champion")
    assert simulation.status().move is not None
    simulation.registry.aliases["champion"] = "3"
    simulation.edit(approvals=[])
    await simulation.settle()
    assert (simulation.status().phase, simulation.registry.aliases["champion"]) == ("AwaitingApproval", "1")
    assert [move[0] for move in simulation.moves()] == ["Overtaken", "Repaired"]


async def test_what_was_adopted_stays_when_the_gates_change() -> None:
    simulation = world(onDrift="Adopt")
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    simulation.registry.aliases["champion"] = "1"
    await simulation.settle()
    simulation.edit(gates=None)
    await simulation.settle()
    assert simulation.registry.aliases["champion"] == "1"


async def test_warn_does_not_wait_for_a_version_that_was_deleted() -> None:
    simulation = world(onDrift="Warn", gates=GATES[:1])
    simulation.registry.aliases["staging"] = "1"
    await simulation.settle()
    simulation.registry.delete("1")
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    assert (simulation.status().phase, simulation.registry.aliases["champion"]) == ("Promoted", "2")
