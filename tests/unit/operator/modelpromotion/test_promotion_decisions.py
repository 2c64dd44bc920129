"""What a promotion decided about a version stays decided: whatever else was staged since, and whatever the clock says."""

from __future__ import annotations

from finetune_crds.promotion_status import MAX_VERSION_RECORDS
from fixtures.fake_databricks import Workspace
from fixtures.operator_in_memory.promotions import MODEL as SUPPORT
from fixtures.operator_in_memory.promotions import Memory, World
from fixtures.operator_in_memory.serving import MODEL, Databricks
from unit.operator.modelpromotion.champion import GATES, world

COMPARISON = [
    {
        "name": "no-worse",
        "type": "Comparison",
        "comparison": {"metric": "eval_loss", "goal": "Minimize", "notWorseThan": {"absolute": 0.1}},
    }
]


async def move_to_another_registry(simulation: World) -> Memory:
    """The spec leads to a registry with other versions of the same numbers, and the promotion starts over there."""
    registry = Memory(simulation.writes, number=2)
    for version in ("1", "2", "3"):
        registry.add(version, eval_loss=2.0)
    registry.aliases = {"champion": "1", "staging": "2"}
    simulation.registry = registry
    simulation.restart()
    await simulation.settle()
    assert simulation.phase_and_reason() == "Blocked: RegistryChanged"
    simulation.edit(onDrift="Adopt")
    await simulation.settle()
    return registry


async def test_an_approval_from_before_the_promotion_started_over_does_not_count() -> None:
    simulation = world(approval={}, approvals=[{"version": "2", "by": "kim"}])
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    assert simulation.registry.aliases["champion"] == "2"
    registry = await move_to_another_registry(simulation)
    assert (simulation.status().phase, registry.aliases["champion"]) == ("AwaitingApproval", "1")
    assert simulation.says("Approved") == (
        "AwaitingApproval",
        "version 2 passed its gates and waits for approval: add {version: 2, by: NAME} to spec.approvals; remove the approval of kim before "
        "it is added again, because it is from before the promotion started over",
    )
    simulation.edit(approvals=[])
    await simulation.settle()
    simulation.edit(approvals=[{"version": "2", "by": "kim"}])
    await simulation.settle()
    assert (simulation.status().phase, registry.aliases["champion"]) == ("Promoted", "2")


async def test_another_approver_may_approve_the_same_number_after_the_promotion_started_over() -> None:
    simulation = world(approval={}, approvals=[{"version": "2", "by": "kim"}])
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    registry = await move_to_another_registry(simulation)
    simulation.edit(approvals=[{"version": "2", "by": "lee"}])
    await simulation.settle()
    assert (simulation.status().phase, registry.aliases["champion"]) == ("Promoted", "2")


async def test_a_version_that_failed_at_its_endpoint_is_not_tried_again_after_another_one(
    databricks: Workspace,
) -> None:
    """Staging moves from 2 to 3 and back: champion must not move to 2 and back to 1 a second time."""
    simulation = Databricks(databricks)
    await simulation.stage(1)
    await simulation.later(1)
    databricks.endpoints.broken = {"2": "no machine", "3": "no machine"}
    for version in (2, 3, 2, 3):
        await simulation.stage(version)
    champion = [move for move in simulation.moves() if move[0] == "Promoted"]
    assert champion == [("Promoted", None, "1"), ("Promoted", "1", "2"), ("Promoted", "1", "3")]
    assert simulation.says("Promoted") == (
        "Withdrawn",
        "version 3 failed at its endpoint before: change spec.gates or spec.serving to try it again, or set spec.rollbackTo to it",
    )
    assert simulation.state.models[MODEL].aliases["champion"] == 1


async def test_what_a_hand_took_the_alias_from_stays_passed_over_after_a_refused_version() -> None:
    simulation = world(onDrift="Adopt")
    simulation.registry.add("4", eval_loss=9.0)
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    simulation.registry.aliases["champion"] = "1"
    await simulation.settle()
    for staged in ("4", "2"):
        simulation.registry.aliases["staging"] = staged
        await simulation.settle()
    assert (simulation.phase_and_reason(), simulation.registry.aliases["champion"]) == (
        "Promoted: Adopted",
        "1",
    )
    # Once the promotion has moved the alias again, what the hand chose is no longer there to be kept.
    for staged in ("3", "2"):
        simulation.registry.aliases["staging"] = staged
        await simulation.settle()
    assert simulation.moves()[-1] == ("Promoted", "1", "3")
    assert simulation.phase_and_reason() == "Refused: GateFailed"


async def test_a_clock_that_was_set_back_lets_no_refused_version_pass() -> None:
    simulation = world(gates=COMPARISON)
    simulation.registry.add("4", eval_loss=9.0)
    simulation.registry.aliases["staging"] = "3"
    await simulation.settle()
    simulation.registry.aliases["staging"] = "4"
    await simulation.settle()
    assert simulation.status().phase == "Refused"
    simulation.seconds -= 7 * 24 * 3600
    simulation.registry.delete("3")
    simulation.restart()
    await simulation.settle()
    assert simulation.phase_and_reason() == "Pending: GateInconclusive"
    assert "champion" not in simulation.registry.aliases


async def test_a_git_revert_finds_its_version_after_more_moves_than_the_history_holds() -> None:
    simulation = world(gates=COMPARISON, source={"type": "Version", "version": "2"})
    await simulation.settle()
    simulation.edit(source={"type": "Version", "version": "3"})
    await simulation.settle()
    for _ in range(21):
        simulation.registry.aliases["champion"] = "1"
        await simulation.settle()
    assert {move[0] for move in simulation.moves()} == {"Repaired"}
    simulation.edit(source={"type": "Version", "version": "2"})
    await simulation.settle()
    # Version 2 is worse than 3, and would not pass the comparison.
    assert simulation.moves()[-1] == ("Reverted", "3", "2")


async def test_a_git_revert_keeps_the_name_of_the_approver() -> None:
    source, gates = {"type": "Version", "version": "2"}, GATES[:1]
    simulation = world(gates=gates, source=source, approval={}, approvals=[{"version": "2", "by": "kim"}])
    await simulation.settle()
    simulation.edit(source={"type": "Version", "version": "3"}, approvals=[{"version": "3", "by": "lee"}])
    await simulation.settle()
    for _ in range(2):
        simulation.edit(source=source)
        await simulation.settle()
    assert simulation.moves()[-1] == ("Reverted", "3", "2")
    approved_by = {version: simulation.status().find_record(version) for version in ("2", "3")}
    assert [record and record.approved_by for record in approved_by.values()] == ["kim", "lee"]


async def test_moves_before_another_promotion_kept_the_alias_count_no_more_whatever_the_clock_says() -> None:
    simulation = world(
        gates=GATES[:1],
        source={"type": "Version", "version": "2"},
        approval={},
        approvals=[{"version": "2", "by": "kim"}],
    )
    await simulation.settle()
    simulation.edit(approvals=[{"version": "3", "by": "kim"}], source={"type": "Version", "version": "3"})
    await simulation.settle()
    simulation.submit("older", alias="champion", source={"type": "Version", "version": "3"})
    older = simulation.kube.objects["ModelPromotion", "team", "older"]
    older["metadata"]["creationTimestamp"] = "2020-01-01T00:00:00Z"
    simulation.kube.keep(older)
    await simulation.settle()
    assert simulation.phase_and_reason() == "Blocked: Conflict"
    simulation.remove("older")
    simulation.seconds -= 7 * 24 * 3600
    simulation.restart()
    simulation.edit(source={"type": "Version", "version": "2"}, approvals=[])
    await simulation.settle()
    assert (simulation.status().phase, simulation.registry.aliases["champion"]) == ("AwaitingApproval", "3")


async def test_the_records_of_the_lowest_versions_are_dropped_first() -> None:
    simulation = World()
    simulation.submit(model=SUPPORT)
    count = MAX_VERSION_RECORDS + 6
    for number in range(1, count + 1):
        simulation.registry.add(str(number))
        simulation.registry.aliases["staging"] = str(number)
        await simulation.settle()
    registry = simulation.status().registry
    assert registry
    expected = [str(number) for number in range(count - MAX_VERSION_RECORDS + 1, count + 1)]
    assert [item.version for item in registry.versions] == expected


async def test_a_status_of_an_earlier_release_is_read_from_its_history() -> None:
    """Its journal and identities have none of these decisions; nothing is written until something happens."""
    simulation = world(gates=COMPARISON, source={"type": "Version", "version": "2"})
    await simulation.settle()
    simulation.edit(source={"type": "Version", "version": "3"})
    await simulation.settle()
    body = simulation.kube.objects["ModelPromotion", "team", "champion"]
    registry = dict(body["status"]["registry"])
    registry.pop("hasDecisions")
    registry["versions"] = [
        {key: item[key] for key in ("version", "creationTime", "runId")} for item in registry["versions"]
    ]
    simulation.kube.keep({**body, "status": {**body["status"], "registry": registry}})
    simulation.restart()
    before = simulation.writes.count
    await simulation.settle()
    assert simulation.writes.count == before
    simulation.edit(source={"type": "Version", "version": "2"})
    await simulation.settle()
    assert simulation.moves()[-1] == ("Reverted", "3", "2")
