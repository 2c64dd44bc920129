"""What goes wrong around a promotion, and the version that the alias must not end on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.errors import Problem
from fixtures.operator_in_memory.promotions import World

NO_WORSE = [
    {
        "name": "no-worse",
        "type": "Comparison",
        "comparison": {"metric": "loss", "goal": "Minimize", "notWorseThan": {"absolute": 0.1}},
    }
]


async def world(**spec: Any) -> World:
    """Champion is version 1, or where the spec says; 4 is the best and 5 the worst."""
    simulation = World()
    for version, loss in (("1", 3.0), ("2", 2.0), ("3", 2.5), ("4", 1.0), ("5", 9.0)):
        simulation.registry.add(version, loss=loss)
    simulation.registry.aliases["staging"] = "1"
    simulation.submit(**spec)
    await simulation.settle()
    return simulation


async def found_at(version: str, **spec: Any) -> World:
    """The alias points at this version when the promotion first sees it."""
    simulation = await world(source={"type": "Version", "version": version}, suspend=True)
    simulation.remove()
    simulation.registry.aliases["champion"] = version
    simulation.submit(**{"source": {"type": "Version", "version": version}} | spec)
    await simulation.settle()
    assert simulation.moves() == []
    return simulation


async def then(rollout: World, **spec: Any) -> World:
    """Change the spec, and let everything come to rest."""
    rollout.edit(**spec)
    await rollout.settle()
    return rollout


async def seized(**spec: Any) -> World:
    """Version 2 became champion, and a hand pointed the alias at 3."""
    simulation = await world(**spec)
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    simulation.registry.aliases["champion"] = "3"
    await simulation.settle()
    return simulation


async def without_answer(rollout: World, **spec: Any) -> None:
    """Change the spec, and let the operator try in vain."""
    rollout.registry.refusal = Problem(ConditionReason.MLFLOW_UNREACHABLE, "the request timed out")
    rollout.edit(**spec)
    for _ in range(3):
        rollout.seconds += 60
        await rollout.operator.look("champion")
    assert rollout.status().move is not None


async def test_a_refused_version_gets_no_chance_by_the_deletion_of_the_one_it_was_refused_for() -> None:
    simulation = await world(source={"type": "Version", "version": "2"}, gates=NO_WORSE)
    await then(simulation, source={"type": "Version", "version": "5"})
    simulation.registry.delete("2")
    await simulation.settle()
    assert (simulation.phase_and_reason(), simulation.registry.aliases) == (
        "Pending: GateInconclusive",
        {"staging": "1"},
    )
    assert simulation.moves()[-1] == ("VersionDeleted", "2", None)
    assert simulation.says("GatesPassed") == (
        "GateInconclusive",
        "version 5 cannot be judged yet: no-worse: loss is 9, and version 2, which had the alias, was deleted: set "
        "spec.rollbackTo to the version that the alias should point at",
    )
    await then(simulation, rollbackTo={"type": "Version", "version": "3"})
    await then(simulation, rollbackTo=None)
    assert (simulation.status().phase, simulation.registry.aliases["champion"]) == ("Refused", "3")


@pytest.mark.parametrize("on_drift", ["Repair", "Adopt"])
async def test_the_version_that_a_hand_chose_for_a_deleted_one_stays_if_it_was_there_before(
    on_drift: str,
) -> None:
    simulation = await world(source={"type": "Version", "version": "1"}, gates=NO_WORSE, onDrift=on_drift)
    await then(simulation, source={"type": "Version", "version": "2"})
    await then(simulation, source={"type": "Version", "version": "5"})
    simulation.registry.aliases["champion"] = "1"
    simulation.registry.delete("2")
    await simulation.settle()
    assert simulation.registry.aliases["champion"] == "1"
    assert simulation.moves()[-2:] == [("VersionDeleted", "2", None), ("Adopted", None, "1")]


async def test_the_version_that_the_alias_was_found_at_is_right_when_a_hand_chooses_it_for_a_deleted_one() -> (
    None
):
    """The repair removed it: the history knew it only as where the alias came from."""
    simulation = await found_at("4")
    await then(simulation, source={"type": "Version", "version": "5"})
    simulation.registry.delete("5")
    simulation.registry.aliases["champion"] = "4"
    await simulation.settle()
    assert simulation.registry.aliases["champion"] == "4"
    assert simulation.moves()[-2:] == [("VersionDeleted", "5", None), ("Adopted", None, "4")]


async def test_a_repair_removes_no_alias() -> None:
    simulation = await world(
        source={"type": "Version", "version": "5"},
        gates=[{"name": "loss", "type": "Metric", "metric": {"name": "loss", "max": 5}}],
    )
    assert (simulation.status().phase, "champion" in simulation.registry.aliases) == ("Refused", False)
    simulation.registry.aliases["champion"] = "3"
    await simulation.settle()
    assert (simulation.phase_and_reason(), simulation.registry.aliases["champion"]) == (
        "Blocked: AliasMoved",
        "3",
    )
    assert simulation.says("Drifted") == (
        "AliasMoved",
        "somebody else pointed alias champion at version 3, and no earlier version is recorded: to keep the alias there, set "
        "spec.rollbackTo to {type: Version, version: 3} or spec.onDrift to Adopt; otherwise remove the alias",
    )
    await then(simulation, onDrift="Adopt")
    assert (simulation.status().promoted, simulation.registry.aliases["champion"]) == ("3", "3")


async def test_a_version_that_never_passed_is_left_and_said_when_the_deleted_one_cannot_come_back() -> None:
    simulation = await world(source={"type": "Version", "version": "2"}, gates=NO_WORSE)
    await then(simulation, source={"type": "Version", "version": "5"})
    simulation.registry.aliases["champion"] = "5"
    simulation.registry.delete("2")
    await simulation.settle()
    assert (simulation.phase_and_reason(), simulation.registry.aliases) == (
        "Blocked: AliasMoved",
        {"staging": "1", "champion": "5"},
    )
    assert simulation.moves()[-1] == ("VersionDeleted", "2", None)
    await then(simulation, rollbackTo={"type": "Version", "version": "3"})
    await then(simulation, rollbackTo=None)
    assert (simulation.status().phase, simulation.registry.aliases["champion"]) == ("Refused", "3")


@pytest.mark.parametrize("on_drift", ["Warn", "Adopt"])
async def test_a_write_that_comes_late_is_taken_back_whatever_becomes_of_drift(on_drift: str) -> None:
    simulation = await world(source={"type": "Version", "version": "1"}, onDrift=on_drift)
    await without_answer(simulation, source={"type": "Version", "version": "5"})
    await then(simulation, gates=[{"name": "loss", "type": "Metric", "metric": {"name": "loss", "max": 5}}])
    assert (simulation.status().phase, simulation.status().move) == ("Refused", None)
    simulation.registry.refusal = None
    simulation.registry.aliases["champion"] = "5"
    await simulation.settle()
    assert simulation.registry.aliases["champion"] == "1"
    assert simulation.moves()[-1] == ("Repaired", "5", "1")
    assert "took effect after it was abandoned" in simulation.status().history[0].message


async def test_the_first_move_that_comes_late_is_a_move() -> None:
    """The alias did not exist before: there is nothing to move it back to."""
    simulation = World()
    for version in ("1", "2"):
        simulation.registry.add(version, loss=2.0)
    simulation.submit(source={"type": "Version", "version": "1"})
    await without_answer(simulation, soakSeconds=0)
    await then(simulation, source={"type": "Version", "version": "2"}, approval={})
    assert (simulation.status().phase, simulation.status().move) == ("AwaitingApproval", None)
    simulation.registry.refusal = None
    simulation.registry.aliases["champion"] = "1"
    await simulation.settle()
    assert (simulation.status().phase, simulation.moves()) == ("AwaitingApproval", [("Promoted", None, "1")])
    assert (simulation.status().abandoned, simulation.says("Drifted")) == (None, None)
    await then(simulation, approvals=[{"version": "2", "by": "kim"}])
    assert (simulation.status().phase, simulation.registry.aliases) == ("Promoted", {"champion": "2"})


async def test_a_hand_is_a_hand_again_when_no_write_can_come_any_more() -> None:
    simulation = await world(source={"type": "Version", "version": "1"}, onDrift="Adopt")
    await without_answer(simulation, source={"type": "Version", "version": "5"})
    await then(simulation, gates=[{"name": "loss", "type": "Metric", "metric": {"name": "loss", "max": 5}}])
    simulation.registry.refusal = None
    simulation.seconds += 3600
    simulation.registry.aliases["champion"] = "5"
    await simulation.settle()
    assert simulation.moves()[-1] == ("Adopted", "1", "5")


@pytest.mark.parametrize(("on_drift", "message"), [("Repair", "1"), ("Warn", "3"), ("Adopt", "1")])
async def test_a_promotion_that_begins_with_a_rollback_notices_a_hand(on_drift: str, message: str) -> None:
    simulation = await world(rollbackTo={"type": "Version", "version": "1"}, onDrift=on_drift)
    simulation.registry.aliases["champion"] = "3"
    await simulation.settle()
    assert (simulation.registry.aliases["champion"], simulation.status().previous) == (message, None)
    assert (simulation.says("Drifted") is not None) == (on_drift == "Warn")


async def test_what_was_adopted_does_not_outlive_a_rollback() -> None:
    simulation = await seized(onDrift="Adopt")
    await then(simulation, rollbackTo={"type": "Version", "version": "1"})
    assert simulation.registry.aliases["champion"] == "1"
    await then(simulation, rollbackTo=None)
    assert (simulation.status().phase, simulation.registry.aliases["champion"]) == ("Promoted", "2")


async def test_adopt_passes_over_no_candidate_that_came_at_the_same_time() -> None:
    simulation = await world(onDrift="Adopt")
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    simulation.registry.aliases |= {"champion": "3", "staging": "4"}
    await simulation.settle()
    assert simulation.registry.aliases["champion"] == "4"
    assert simulation.moves()[-2:] == [("Adopted", "2", "3"), ("Promoted", "3", "4")]


async def test_the_younger_of_two_has_nothing_to_repair_once_the_older_is_gone() -> None:
    simulation = await world()
    simulation.submit("older", alias="champion", source={"type": "Version", "version": "4"})
    older = simulation.kube.objects["ModelPromotion", "team", "older"]
    older["metadata"]["creationTimestamp"] = "2020-01-01T00:00:00Z"
    simulation.kube.keep(older)
    await simulation.settle()
    assert simulation.phase_and_reason() == "Blocked: Conflict"
    assert (
        simulation.status().current,
        simulation.status().promoted,
        simulation.registry.aliases["champion"],
    ) == (
        None,
        None,
        "4",
    )
    simulation.remove("older")
    await simulation.settle()
    assert simulation.moves()[-1] == ("Promoted", "4", "1")


async def test_gates_of_a_version_that_is_wanted_no_more_are_gone() -> None:
    simulation = await world(
        source={"type": "Version", "version": "1"},
        gates=[{"name": "loss", "type": "Metric", "metric": {"name": "loss", "max": 5}}],
    )
    await then(simulation, source={"type": "Version", "version": "5"})
    assert simulation.status().phase == "Refused"
    await then(simulation, source={"type": "Version", "version": "1"})
    status = simulation.status()
    assert (status.phase, status.gates, simulation.says("GatesPassed")) == ("Promoted", None, None)


async def test_a_move_by_hand_that_a_rollback_approves_of_is_in_the_history() -> None:
    simulation = await seized(onDrift="Warn")
    await then(simulation, rollbackTo={"type": "Version", "version": "3"})
    assert simulation.moves()[-1] == ("RolledBack", "2", "3")
    assert (simulation.phase_and_reason(), simulation.status().previous) == ("Promoted: RolledBack", "2")


async def test_a_rollback_to_a_version_that_is_not_ready_says_so() -> None:
    simulation = await world()
    simulation.registry.versions["3"] = replace(simulation.registry.versions["3"], ready=False)
    await then(simulation, rollbackTo={"type": "Version", "version": "3"})
    assert simulation.status().phase == "Blocked"
    assert simulation.says("Promoted") == (
        "NothingToRollBackTo",
        "version 3 of support-llama is not ready: set spec.rollbackTo to another version",
    )


async def test_an_approval_in_time_counts_although_the_operator_was_away() -> None:
    approval = {"timeoutSeconds": 600}
    simulation = await world(approval=approval)
    simulation.seconds += 500
    simulation.edit(approvals=[{"version": "1", "by": "kim"}])
    simulation.seconds += 200
    simulation.restart()
    await simulation.settle()
    assert (simulation.status().phase, simulation.registry.aliases["champion"]) == ("Promoted", "1")


async def test_an_approval_that_comes_late_does_not_count() -> None:
    approval = {"timeoutSeconds": 600}
    simulation = await world(approval=approval)
    simulation.seconds += 700
    await then(simulation, approvals=[{"version": "1", "by": "kim"}])
    assert (simulation.status().phase, "champion" in simulation.registry.aliases) == ("Refused", False)


async def test_a_long_name_of_data_is_cut() -> None:
    simulation = await world(gates=NO_WORSE)
    simulation.registry.add("2", data="x" * 4500, loss=2.0)
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    assert simulation.phase_and_reason() == "Pending: GateInconclusive"


@pytest.mark.parametrize(("safe", "end"), [("yes", "Promoted"), ("no", "Refused")])
async def test_a_version_that_was_rolled_back_is_judged_anew(safe: str, end: str) -> None:
    simulation = await world(
        source={"type": "Version", "version": "1"},
        gates=[{"name": "safe", "type": "Tag", "tag": {"name": "safe", "equals": "yes"}}],
    )
    for version in ("1", "2"):
        simulation.registry.add(version, tags={"safe": "yes"})
    await simulation.settle()
    await then(simulation, source={"type": "Version", "version": "2"})
    await then(simulation, rollbackTo={"type": "Previous"})
    simulation.registry.add("2", tags={"safe": safe})
    await then(simulation, rollbackTo=None)
    assert simulation.status().phase == end
    assert simulation.moves()[3:] == ([("Promoted", "1", "2")] if end == "Promoted" else [])


async def test_a_git_revert_does_not_bring_back_what_a_tag_speaks_against_by_now() -> None:
    simulation = await world(
        source={"type": "Version", "version": "1"},
        gates=[{"name": "safe", "type": "Tag", "tag": {"name": "safe", "equals": "yes"}}],
    )
    for version in ("1", "2"):
        simulation.registry.add(version, tags={"safe": "yes"})
    await simulation.settle()
    await then(simulation, source={"type": "Version", "version": "2"})
    simulation.registry.add("1", tags={"safe": "no"})
    await then(simulation, source={"type": "Version", "version": "1"})
    assert (simulation.status().phase, simulation.registry.aliases["champion"]) == ("Refused", "2")


async def test_a_stored_comparison_without_a_goal_promotes_nothing() -> None:
    """It minimized by default: accuracy 0.5 replaced 0.95."""
    gates = [
        {
            "name": "better",
            "type": "Comparison",
            "comparison": {"metric": "accuracy", "betterBy": {"absolute": 0.1}},
        }
    ]
    simulation = await world(gates=gates, source={"type": "Version", "version": "2"})
    for version, accuracy in (("1", 0.95), ("2", 0.5)):
        simulation.registry.add(version, accuracy=accuracy)
    simulation.registry.aliases["champion"] = "1"
    await simulation.settle()
    assert (simulation.status().phase, simulation.registry.aliases["champion"]) == ("Blocked", "1")
    assert simulation.says("Accepted") == ("InvalidSpec", "spec.gates.0.comparison.goal: Field required")


async def test_a_spec_that_cannot_be_read_leaves_the_finalizer_and_what_is_known_of_the_endpoint() -> None:
    serving = {"type": "Databricks", "endpoint": "support"}
    simulation = await world(
        source={"type": "Version", "version": "1"}, serving=serving, onDelete="RemoveAlias"
    )
    objects = simulation.kube.objects["ModelPromotion", "team", "champion"]
    assert objects["metadata"]["finalizers"]
    serving_json = {"endpoint": "support", "version": "1"}
    simulation.kube.keep({**objects, "status": {**objects["status"], "serving": serving_json}})
    await then(
        simulation,
        gates=[
            {
                "name": "later",
                "type": "Comparison",
                "comparison": {"metric": "loss", "betterBy": {"absolute": 0}},
            }
        ],
    )
    objects = simulation.kube.objects["ModelPromotion", "team", "champion"]
    assert simulation.phase_and_reason() == "Blocked: InvalidSpec"
    assert (objects["metadata"]["finalizers"], objects["status"]["serving"]) == (
        ["finetune.dev/remove-alias"],
        serving_json,
    )
