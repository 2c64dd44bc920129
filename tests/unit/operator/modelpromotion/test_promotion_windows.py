"""Windows: when the alias may move, and what does not wait for one. The clock starts at 2026-08-01T12:00:00Z, a Saturday."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.errors import Problem
from fixtures.fake_databricks import Workspace
from fixtures.operator_in_memory.promotions import PREVIOUS, World, back_to
from fixtures.operator_in_memory.serving import GATE, STEPS, Databricks
from unit.operator.modelpromotion.champion import world

HOUR = 3600
AFTERNOON = {"name": "afternoon", "schedule": "0 14 * * *", "durationSeconds": HOUR}
OPENS = "2026-08-01T14:00:00Z"


async def begin(**spec: Any) -> World:
    """A promotion with a window in two hours, whose alias is at version 1."""
    simulation = world(windows=[AFTERNOON], **spec)
    simulation.registry.aliases |= {"staging": "1", "champion": "1"}
    await simulation.settle()
    return simulation


async def test_the_alias_waits_for_a_window_and_then_moves() -> None:
    simulation = await begin()
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    status = simulation.status()
    assert simulation.phase_and_reason() == "Pending: AwaitingWindow"
    assert simulation.says("Promoted") == (
        "AwaitingWindow",
        f"version 2 meets every requirement; alias champion moves in the next window, afternoon, which opens at {OPENS}",
    )
    assert simulation.holds("Ready")
    assert (status.candidate, status.current, status.gates and status.gates.summary) == ("2", "1", "2/2")
    simulation.seconds = 2 * HOUR - 90
    assert await simulation.operator.look("champion") == 90
    simulation.seconds = 2 * HOUR
    await simulation.settle()
    assert simulation.phase_and_reason() == "Promoted: Promoted"
    assert simulation.registry.moves == [("champion", "2")]
    writes = simulation.writes.count
    await simulation.settle()
    assert simulation.writes.count == writes


async def test_gates_approval_and_soak_go_on_outside_of_a_window() -> None:
    simulation = await begin(approval={}, soakSeconds=600)
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    assert simulation.phase_and_reason() == "AwaitingApproval: AwaitingApproval"
    simulation.edit(approvals=[{"version": "2", "by": "kim"}])
    await simulation.settle()
    assert simulation.phase_and_reason() == "Soaking: Soaking"
    simulation.seconds += 600
    await simulation.settle()
    assert simulation.phase_and_reason() == "Pending: AwaitingWindow"
    assert (simulation.holds("Approved"), simulation.holds("Soaked")) == (True, True)
    simulation.registry.add("2", eval_loss=9.0)
    await simulation.settle()
    assert simulation.phase_and_reason() == "Refused: GateFailed"


async def test_the_alias_is_not_created_outside_of_a_window() -> None:
    simulation = world(windows=[AFTERNOON])
    simulation.registry.aliases["staging"] = "1"
    await simulation.settle()
    assert simulation.phase_and_reason() == "Pending: AwaitingWindow"
    assert simulation.registry.moves == []


async def test_a_rollback_and_a_repair_do_not_wait() -> None:
    simulation = await begin()
    simulation.edit(rollbackTo=back_to("2"))
    await simulation.settle()
    assert simulation.moves() == [("RolledBack", "1", "2")]
    simulation.registry.aliases["champion"] = "3"
    await simulation.settle()
    assert simulation.moves()[1:] == [("Repaired", "3", "2")]
    simulation.edit(rollbackTo=PREVIOUS)
    await simulation.settle()
    assert simulation.registry.aliases["champion"] == "1"


async def test_a_git_revert_to_an_older_version_does_not_wait_and_one_to_a_newer_version_does() -> None:
    simulation = world(source=back_to("2"), gates=None)
    await simulation.settle()
    simulation.edit(source=back_to("3"))
    await simulation.settle()
    simulation.edit(windows=[AFTERNOON], source=back_to("2"))
    await simulation.settle()
    assert simulation.moves()[-1] == ("Reverted", "3", "2")
    simulation.edit(source=back_to("3"))
    await simulation.settle()
    assert (simulation.phase_and_reason(), simulation.registry.aliases["champion"]) == (
        "Pending: AwaitingWindow",
        "2",
    )
    simulation.seconds = 2 * HOUR
    await simulation.settle()
    assert simulation.moves()[-1] == ("Reverted", "2", "3")


@pytest.mark.parametrize("passes", [1, 4])
async def test_a_move_that_began_in_a_window_finishes(passes: int) -> None:
    """After one pass, the move is only in the journal; after more, the registry has refused to make it."""
    simulation = await begin()
    simulation.registry.refusal = Problem(ConditionReason.MLFLOW_ERROR, "HTTP 500")
    simulation.registry.aliases["staging"] = "2"
    simulation.seconds = 3 * HOUR - 60
    for _ in range(passes):
        simulation.seconds += 5
        await simulation.operator.look("champion")
    assert simulation.status().move
    assert simulation.registry.moves == []
    simulation.registry.refusal = None
    simulation.seconds = 3 * HOUR + 1
    await simulation.settle()
    assert (simulation.phase_and_reason(), simulation.registry.moves) == (
        "Promoted: Promoted",
        [("champion", "2")],
    )


async def test_a_move_that_the_registry_refuses_does_not_finish_days_later() -> None:
    simulation = await begin()
    simulation.registry.refusal = Problem(ConditionReason.MOVE_REFUSED, "no permission")
    simulation.registry.aliases["staging"] = "2"
    simulation.seconds = 3 * HOUR - 60
    for _ in range(4):
        simulation.seconds += 5
        await simulation.operator.look("champion")
    assert simulation.phase_and_reason() == "Promoting: MoveRefused"
    simulation.seconds += 600
    await simulation.operator.look("champion")
    assert simulation.phase_and_reason() == "Pending: AwaitingWindow"
    simulation.registry.refusal = None
    simulation.seconds += 3600
    await simulation.settle()
    assert simulation.registry.moves == []
    simulation.seconds = 26 * HOUR
    await simulation.settle()
    assert simulation.registry.moves == [("champion", "2")]


async def test_a_rollback_that_was_called_off_opens_no_window() -> None:
    simulation = await begin()
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    simulation.edit(rollbackTo=back_to("2"))
    await simulation.operator.look("champion")
    move = simulation.status().move
    assert move
    assert (move.reason, move.to_version) == ("RolledBack", "2")
    simulation.edit(rollbackTo=None)
    await simulation.settle()
    assert (simulation.phase_and_reason(), simulation.registry.moves) == ("Pending: AwaitingWindow", [])


async def test_another_candidate_does_not_inherit_the_move_that_began() -> None:
    simulation = await begin()
    simulation.registry.aliases["staging"] = "2"
    simulation.seconds = 3 * HOUR - 5
    await simulation.operator.look("champion")
    assert simulation.status().move
    simulation.registry.aliases["staging"] = "3"
    simulation.seconds = 3 * HOUR
    await simulation.settle()
    assert (simulation.phase_and_reason(), simulation.registry.moves) == ("Pending: AwaitingWindow", [])


async def test_a_canary_begins_in_a_window_and_a_rollout_that_began_finishes(databricks: Workspace) -> None:
    simulation = Databricks(databricks, canary={"steps": STEPS, "gates": [GATE]}, alias_moves=None)
    await simulation.stage(1)
    simulation.edit(windows=[AFTERNOON])
    await simulation.stage(2)
    assert simulation.now == ("Pending", {"staging": 2, "champion": 1}, {"1": 100})
    assert simulation.phase_and_reason() == "Pending: AwaitingWindow"
    simulation.seconds = 3 * HOUR - 300
    await simulation.settle()
    before = {"staging": 2, "champion": 1}
    assert simulation.now == ("Promoting", before, {"2": 10, "1": 90})
    await simulation.later(10)
    assert simulation.now == ("Promoting", before, {"2": 50, "1": 50})
    await simulation.later(11)
    assert simulation.now == ("Promoted", {"staging": 2, "champion": 2}, {"2": 100})


async def test_a_version_whose_endpoint_fails_loses_the_alias_outside_of_a_window(
    databricks: Workspace,
) -> None:
    simulation = Databricks(databricks)
    await simulation.stage(1)
    simulation.edit(windows=[AFTERNOON | {"schedule": "* * * * *", "durationSeconds": 60}])
    databricks.endpoints.broken = {"2": "no machine"}
    await simulation.operator.look("champion")
    await simulation.stage(2)
    simulation.edit(windows=[AFTERNOON])
    await simulation.settle()
    assert simulation.moves()[-1] == ("Withdrawn", "2", "1")
