"""Rollbacks and reverts, on a registry and an API server in memory."""

from __future__ import annotations

from unit.operator.modelpromotion.champion import GATES, world


async def test_rollback_in_one_line_holds_until_the_spec_says_otherwise() -> None:
    there = world()
    there.registry.aliases |= {"staging": "2"}
    await there.settle()
    there.registry.aliases["staging"] = "3"
    await there.settle()
    there.edit(rollbackTo={"type": "Previous"})
    await there.settle()
    assert (there.status().phase, there.registry.aliases["champion"]) == ("RolledBack", "2")
    there.restart()
    await there.settle()
    assert there.registry.aliases["champion"] == "2"
    there.registry.add("4", eval_loss=1.0)
    there.registry.aliases["staging"] = "4"
    await there.settle()
    assert (there.status().phase, there.registry.aliases["champion"]) == ("RolledBack", "2")
    there.edit(rollbackTo=None)
    await there.settle()
    assert (there.status().phase, there.registry.aliases["champion"]) == ("Promoted", "4")
    assert there.moves() == [
        ("Promoted", None, "2"),
        ("Promoted", "2", "3"),
        ("RolledBack", "3", "2"),
        ("Promoted", "2", "4"),
    ]
    assert there.status().history[1].by == "kubectl-patch"


async def test_rollback_to_what_is_not_there_moves_nothing_and_says_so() -> None:
    there = world(rollbackTo={"type": "Previous"})
    there.registry.aliases |= {"staging": "2", "champion": "1"}
    await there.settle()
    assert (there.status().phase, there.registry.moves) == ("Failed", [])
    there.edit(rollbackTo={"type": "Version", "version": "9"})
    await there.settle()
    assert there.says("Promoted") == (
        "NothingToRollBackTo",
        "spec.rollbackTo: support-llama has no version 9: name another",
    )


async def test_git_revert_brings_a_version_back_that_passed_the_same_gates() -> None:
    there = world(source={"type": "Version", "version": 2}, approval={"required": True, "version": 2})
    there.registry.aliases["champion"] = "1"
    await there.settle()
    there.edit(
        source={"type": "Version", "version": 3},
        approval={"required": True, "version": 3},
        by="argocd-controller",
    )
    await there.settle()
    assert there.registry.aliases["champion"] == "3"
    there.edit(
        source={"type": "Version", "version": 2},
        approval={"required": True, "version": 2},
        by="argocd-controller",
    )
    await there.settle()
    assert (there.status().phase, there.registry.aliases["champion"]) == ("Promoted", "2")
    assert (there.status().history[0].reason, there.status().history[0].by) == (
        "Reverted",
        "argocd-controller",
    )


async def test_with_other_gates_a_version_is_judged_anew() -> None:
    there = world(source={"type": "Version", "version": 2})
    await there.settle()
    there.edit(source={"type": "Version", "version": 3})
    await there.settle()
    there.edit(
        source={"type": "Version", "version": 2},
        gates=[{"name": "loss", "type": "Metric", "metric": {"name": "eval_loss", "max": 2.1}}],
    )
    await there.settle()
    assert (there.status().phase, there.registry.aliases["champion"]) == ("Refused", "3")


async def test_going_back_asks_for_the_approval_that_was_not_asked_for_then() -> None:
    there = world(source={"type": "Version", "version": 1}, gates=GATES[:1])
    await there.settle()
    there.edit(source={"type": "Version", "version": 2}, approval={"required": True, "version": 2})
    await there.settle()
    there.edit(source={"type": "Version", "version": 1})
    await there.settle()
    assert (there.status().phase, there.registry.aliases["champion"]) == ("AwaitingApproval", "2")
