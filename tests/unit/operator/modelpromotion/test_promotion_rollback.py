"""Rollbacks and reverts, on a registry and an API server in memory."""

from __future__ import annotations

from unit.operator.modelpromotion.champion import GATES, world


async def test_rollback_in_one_line_holds_until_the_spec_says_otherwise() -> None:
    simulation = world()
    simulation.registry.aliases |= {"staging": "2"}
    await simulation.settle()
    simulation.registry.aliases["staging"] = "3"
    await simulation.settle()
    simulation.edit(rollbackTo={"type": "Previous"})
    await simulation.settle()
    assert (simulation.phase_and_reason(), simulation.registry.aliases["champion"]) == (
        "Promoted: RolledBack",
        "2",
    )
    simulation.restart()
    await simulation.settle()
    assert simulation.registry.aliases["champion"] == "2"
    simulation.registry.add("4", eval_loss=1.0)
    simulation.registry.aliases["staging"] = "4"
    await simulation.settle()
    assert (simulation.phase_and_reason(), simulation.registry.aliases["champion"]) == (
        "Promoted: RolledBack",
        "2",
    )
    simulation.edit(rollbackTo=None)
    await simulation.settle()
    assert (simulation.status().phase, simulation.registry.aliases["champion"]) == ("Promoted", "4")
    assert simulation.moves() == [
        ("Promoted", None, "2"),
        ("Promoted", "2", "3"),
        ("RolledBack", "3", "2"),
        ("Promoted", "2", "4"),
    ]
    assert simulation.status().history[1].by == "kubectl-patch"


async def test_rollback_to_what_is_not_there_moves_nothing_and_says_so() -> None:
    simulation = world(rollbackTo={"type": "Previous"})
    simulation.registry.aliases |= {"staging": "2", "champion": "1"}
    await simulation.settle()
    assert (simulation.phase_and_reason(), simulation.registry.moves) == ("Blocked: NothingToRollBackTo", [])
    simulation.edit(rollbackTo={"type": "Version", "version": "9"})
    await simulation.settle()
    assert simulation.says("Promoted") == (
        "NothingToRollBackTo",
        "support-llama has no version 9: set spec.rollbackTo to another version",
    )


async def test_git_revert_brings_a_version_back_that_passed_the_same_gates() -> None:
    simulation = world(
        source={"type": "Version", "version": 2}, approval={}, approvals=[{"version": 2, "by": "kim"}]
    )
    simulation.registry.aliases["champion"] = "1"
    await simulation.settle()
    simulation.edit(
        source={"type": "Version", "version": 3},
        approvals=[{"version": 3, "by": "kim"}],
        by="argocd-controller",
    )
    await simulation.settle()
    assert simulation.registry.aliases["champion"] == "3"
    simulation.edit(
        source={"type": "Version", "version": 2},
        approvals=[{"version": 2, "by": "kim"}],
        by="argocd-controller",
    )
    await simulation.settle()
    assert (simulation.phase_and_reason(), simulation.registry.aliases["champion"]) == (
        "Promoted: Reverted",
        "2",
    )
    assert (simulation.status().history[0].reason, simulation.status().history[0].by) == (
        "Reverted",
        "argocd-controller",
    )


async def test_with_other_gates_a_version_is_judged_anew() -> None:
    simulation = world(source={"type": "Version", "version": 2})
    await simulation.settle()
    simulation.edit(source={"type": "Version", "version": 3})
    await simulation.settle()
    simulation.edit(
        source={"type": "Version", "version": 2},
        gates=[{"name": "loss", "type": "Metric", "metric": {"name": "eval_loss", "max": 2.1}}],
    )
    await simulation.settle()
    assert (simulation.status().phase, simulation.registry.aliases["champion"]) == ("Refused", "3")


async def test_going_back_asks_for_the_approval_that_was_not_asked_for_then() -> None:
    simulation = world(source={"type": "Version", "version": 1}, gates=GATES[:1])
    await simulation.settle()
    simulation.edit(
        source={"type": "Version", "version": 2}, approval={}, approvals=[{"version": 2, "by": "kim"}]
    )
    await simulation.settle()
    simulation.edit(source={"type": "Version", "version": 1})
    await simulation.settle()
    assert (simulation.status().phase, simulation.registry.aliases["champion"]) == ("AwaitingApproval", "2")
