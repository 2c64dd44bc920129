"""What goes wrong around a promotion, and the version that the alias must not end on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.errors import Problem
from worlds.memory.promotions import World

NO_WORSE = [
    {
        "name": "no-worse",
        "type": "Comparison",
        "comparison": {"metric": "loss", "goal": "Minimize", "notWorseThan": {"absolute": 0.1}},
    }
]


async def world(**spec: Any) -> World:
    """Champion is version 1, or where the spec says; 4 is the best and 5 the worst."""
    made = World()
    for version, loss in (("1", 3.0), ("2", 2.0), ("3", 2.5), ("4", 1.0), ("5", 9.0)):
        made.registry.add(version, loss=loss)
    made.registry.aliases["staging"] = "1"
    made.submit(**spec)
    await made.settle()
    return made


async def found_at(version: str, **spec: Any) -> World:
    """The alias points at this version when the promotion first sees it."""
    made = await world(source={"type": "Version", "version": version}, suspend=True)
    made.remove()
    made.registry.aliases["champion"] = version
    made.submit(**{"source": {"type": "Version", "version": version}} | spec)
    await made.settle()
    assert made.moves() == []
    return made


async def then(there: World, **spec: Any) -> World:
    """Change the spec, and let everything come to rest."""
    there.edit(**spec)
    await there.settle()
    return there


async def seized(**spec: Any) -> World:
    """Version 2 became champion, and a hand pointed the alias at 3."""
    there = await world(**spec)
    there.registry.aliases["staging"] = "2"
    await there.settle()
    there.registry.aliases["champion"] = "3"
    await there.settle()
    return there


async def without_answer(there: World, **spec: Any) -> None:
    """Change the spec, and let the operator try in vain."""
    there.registry.refusal = Problem(ConditionReason.MLFLOW_UNREACHABLE, "no answer in time")
    there.edit(**spec)
    for _ in range(3):
        there.seconds += 60
        await there.operator.look("champion")
    assert there.status().move is not None


async def test_a_refused_version_gets_no_chance_by_the_deletion_of_the_one_it_was_refused_for() -> None:
    there = await world(source={"type": "Version", "version": "2"}, gates=NO_WORSE)
    await then(there, source={"type": "Version", "version": "5"})
    there.registry.delete("2")
    await there.settle()
    assert (there.status().phase, there.registry.aliases) == ("Evaluating", {"staging": "1"})
    assert there.moves()[-1] == ("VersionDeleted", "2", None)
    assert there.says("GatesPassed") == (
        "GateInconclusive",
        "version 5 cannot be judged yet: no-worse: loss is 9, and version 2, which had the alias, was deleted: set "
        "spec.rollbackTo to the version that is to have it now",
    )
    await then(there, rollbackTo={"type": "Version", "version": "3"})
    await then(there, rollbackTo=None)
    assert (there.status().phase, there.registry.aliases["champion"]) == ("Refused", "3")


@pytest.mark.parametrize("on_drift", ["Repair", "Adopt"])
async def test_the_version_that_a_hand_chose_for_a_deleted_one_stays_if_it_was_there_before(
    on_drift: str,
) -> None:
    there = await world(source={"type": "Version", "version": "1"}, gates=NO_WORSE, onDrift=on_drift)
    await then(there, source={"type": "Version", "version": "2"})
    await then(there, source={"type": "Version", "version": "5"})
    there.registry.aliases["champion"] = "1"
    there.registry.delete("2")
    await there.settle()
    assert there.registry.aliases["champion"] == "1"
    assert there.moves()[-2:] == [("VersionDeleted", "2", None), ("Adopted", None, "1")]


async def test_the_version_that_the_alias_was_found_at_is_right_when_a_hand_chooses_it_for_a_deleted_one() -> (
    None
):
    """The repair removed it: the history knew it only as where the alias came from."""
    there = await found_at("4")
    await then(there, source={"type": "Version", "version": "5"})
    there.registry.delete("5")
    there.registry.aliases["champion"] = "4"
    await there.settle()
    assert there.registry.aliases["champion"] == "4"
    assert there.moves()[-2:] == [("VersionDeleted", "5", None), ("Adopted", None, "4")]


async def test_a_repair_removes_no_alias() -> None:
    there = await world(
        source={"type": "Version", "version": "5"},
        gates=[{"name": "loss", "type": "Metric", "metric": {"name": "loss", "max": 5}}],
    )
    assert (there.status().phase, "champion" in there.registry.aliases) == ("Refused", False)
    there.registry.aliases["champion"] = "3"
    await there.settle()
    assert (there.status().phase, there.registry.aliases["champion"]) == ("Drifted", "3")
    assert there.says("Drifted") == (
        "AliasMoved",
        "somebody else pointed alias champion at version 3, and there is no version to move it back to: set "
        "spec.rollbackTo to {type: Version, version: 3}, or spec.onDrift to Adopt, to keep it there, or remove the alias",
    )
    await then(there, onDrift="Adopt")
    assert (there.status().promoted, there.registry.aliases["champion"]) == ("3", "3")


async def test_a_version_that_never_passed_is_left_and_said_when_the_deleted_one_cannot_come_back() -> None:
    there = await world(source={"type": "Version", "version": "2"}, gates=NO_WORSE)
    await then(there, source={"type": "Version", "version": "5"})
    there.registry.aliases["champion"] = "5"
    there.registry.delete("2")
    await there.settle()
    assert (there.status().phase, there.registry.aliases) == ("Drifted", {"staging": "1", "champion": "5"})
    assert there.moves()[-1] == ("VersionDeleted", "2", None)
    await then(there, rollbackTo={"type": "Version", "version": "3"})
    await then(there, rollbackTo=None)
    assert (there.status().phase, there.registry.aliases["champion"]) == ("Refused", "3")


@pytest.mark.parametrize("on_drift", ["Warn", "Adopt"])
async def test_a_write_that_comes_late_is_taken_back_whatever_becomes_of_drift(on_drift: str) -> None:
    there = await world(source={"type": "Version", "version": "1"}, onDrift=on_drift)
    await without_answer(there, source={"type": "Version", "version": "5"})
    await then(there, gates=[{"name": "loss", "type": "Metric", "metric": {"name": "loss", "max": 5}}])
    assert (there.status().phase, there.status().move) == ("Refused", None)
    there.registry.refusal = None
    there.registry.aliases["champion"] = "5"
    await there.settle()
    assert there.registry.aliases["champion"] == "1"
    assert there.moves()[-1] == ("Repaired", "5", "1")
    assert "was given up came late" in there.status().history[0].message


async def test_the_first_move_that_comes_late_is_a_move() -> None:
    """The alias did not exist before: there is nothing to move it back to."""
    there = World()
    for version in ("1", "2"):
        there.registry.add(version, loss=2.0)
    there.submit(source={"type": "Version", "version": "1"})
    await without_answer(there, soakSeconds=0)
    await then(there, source={"type": "Version", "version": "2"}, approval={"required": True})
    assert (there.status().phase, there.status().move) == ("AwaitingApproval", None)
    there.registry.refusal = None
    there.registry.aliases["champion"] = "1"
    await there.settle()
    assert (there.status().phase, there.moves()) == ("AwaitingApproval", [("Promoted", None, "1")])
    assert (there.status().abandoned, there.says("Drifted")) == (None, None)
    await then(there, approval={"required": True, "version": "2"})
    assert (there.status().phase, there.registry.aliases) == ("Promoted", {"champion": "2"})


async def test_a_hand_is_a_hand_again_when_no_write_can_come_any_more() -> None:
    there = await world(source={"type": "Version", "version": "1"}, onDrift="Adopt")
    await without_answer(there, source={"type": "Version", "version": "5"})
    await then(there, gates=[{"name": "loss", "type": "Metric", "metric": {"name": "loss", "max": 5}}])
    there.registry.refusal = None
    there.seconds += 3600
    there.registry.aliases["champion"] = "5"
    await there.settle()
    assert there.moves()[-1] == ("Adopted", "1", "5")


@pytest.mark.parametrize(("on_drift", "held"), [("Repair", "1"), ("Warn", "3"), ("Adopt", "1")])
async def test_a_promotion_that_begins_with_a_rollback_notices_a_hand(on_drift: str, held: str) -> None:
    there = await world(rollbackTo={"type": "Version", "version": "1"}, onDrift=on_drift)
    there.registry.aliases["champion"] = "3"
    await there.settle()
    assert (there.registry.aliases["champion"], there.status().previous) == (held, None)
    assert (there.says("Drifted") is not None) == (on_drift == "Warn")


async def test_what_was_adopted_does_not_outlive_a_rollback() -> None:
    there = await seized(onDrift="Adopt")
    await then(there, rollbackTo={"type": "Version", "version": "1"})
    assert there.registry.aliases["champion"] == "1"
    await then(there, rollbackTo=None)
    assert (there.status().phase, there.registry.aliases["champion"]) == ("Promoted", "2")


async def test_adopt_passes_over_no_candidate_that_came_at_the_same_time() -> None:
    there = await world(onDrift="Adopt")
    there.registry.aliases["staging"] = "2"
    await there.settle()
    there.registry.aliases |= {"champion": "3", "staging": "4"}
    await there.settle()
    assert there.registry.aliases["champion"] == "4"
    assert there.moves()[-2:] == [("Adopted", "2", "3"), ("Promoted", "3", "4")]


async def test_the_younger_of_two_has_nothing_to_repair_once_the_older_is_gone() -> None:
    there = await world()
    there.submit("older", alias="champion", source={"type": "Version", "version": "4"})
    older = there.kube.objects["ModelPromotion", "team", "older"]
    older["metadata"]["creationTimestamp"] = "2020-01-01T00:00:00Z"
    there.kube.keep(older)
    await there.settle()
    assert there.status().phase == "Conflict"
    assert (there.status().current, there.status().promoted, there.registry.aliases["champion"]) == (
        None,
        None,
        "4",
    )
    there.remove("older")
    await there.settle()
    assert there.moves()[-1] == ("Promoted", "4", "1")


async def test_gates_of_a_version_that_is_wanted_no_more_are_gone() -> None:
    there = await world(
        source={"type": "Version", "version": "1"},
        gates=[{"name": "loss", "type": "Metric", "metric": {"name": "loss", "max": 5}}],
    )
    await then(there, source={"type": "Version", "version": "5"})
    assert there.status().phase == "Refused"
    await then(there, source={"type": "Version", "version": "1"})
    status = there.status()
    assert (status.phase, status.gates, there.says("GatesPassed")) == ("Promoted", None, None)


async def test_a_move_by_hand_that_a_rollback_approves_of_is_in_the_history() -> None:
    there = await seized(onDrift="Warn")
    await then(there, rollbackTo={"type": "Version", "version": "3"})
    assert there.moves()[-1] == ("RolledBack", "2", "3")
    assert (there.status().phase, there.status().previous) == ("RolledBack", "2")


async def test_a_rollback_to_a_version_that_is_not_ready_says_so() -> None:
    there = await world()
    there.registry.versions["3"] = replace(there.registry.versions["3"], ready=False)
    await then(there, rollbackTo={"type": "Version", "version": "3"})
    assert there.status().phase == "Failed"
    assert there.says("Promoted") == (
        "NothingToRollBackTo",
        "spec.rollbackTo: version 3 of support-llama is not ready: name another",
    )


async def test_an_approval_in_time_counts_although_the_operator_was_away() -> None:
    approval = {"required": True, "timeoutSeconds": 600}
    there = await world(approval=approval)
    there.seconds += 500
    there.edit(approval={**approval, "version": "1", "by": "kim"})
    there.seconds += 200
    there.restart()
    await there.settle()
    assert (there.status().phase, there.registry.aliases["champion"]) == ("Promoted", "1")


async def test_an_approval_that_comes_late_does_not_count() -> None:
    approval = {"required": True, "timeoutSeconds": 600}
    there = await world(approval=approval)
    there.seconds += 700
    await then(there, approval={**approval, "version": "1", "by": "kim"})
    assert (there.status().phase, "champion" in there.registry.aliases) == ("Refused", False)


async def test_a_long_name_of_data_is_cut() -> None:
    there = await world(gates=NO_WORSE)
    there.registry.add("2", data="x" * 4500, loss=2.0)
    there.registry.aliases["staging"] = "2"
    await there.settle()
    assert there.status().phase == "Evaluating"


@pytest.mark.parametrize(("safe", "end"), [("yes", "Promoted"), ("no", "Refused")])
async def test_a_version_that_was_rolled_back_is_judged_anew(safe: str, end: str) -> None:
    there = await world(
        source={"type": "Version", "version": "1"},
        gates=[{"name": "safe", "type": "Tag", "tag": {"name": "safe", "equals": "yes"}}],
    )
    for version in ("1", "2"):
        there.registry.add(version, tags={"safe": "yes"})
    await there.settle()
    await then(there, source={"type": "Version", "version": "2"})
    await then(there, rollbackTo={"type": "Previous"})
    there.registry.add("2", tags={"safe": safe})
    await then(there, rollbackTo=None)
    assert there.status().phase == end
    assert there.moves()[3:] == ([("Promoted", "1", "2")] if end == "Promoted" else [])


async def test_a_git_revert_does_not_bring_back_what_a_tag_speaks_against_by_now() -> None:
    there = await world(
        source={"type": "Version", "version": "1"},
        gates=[{"name": "safe", "type": "Tag", "tag": {"name": "safe", "equals": "yes"}}],
    )
    for version in ("1", "2"):
        there.registry.add(version, tags={"safe": "yes"})
    await there.settle()
    await then(there, source={"type": "Version", "version": "2"})
    there.registry.add("1", tags={"safe": "no"})
    await then(there, source={"type": "Version", "version": "1"})
    assert (there.status().phase, there.registry.aliases["champion"]) == ("Refused", "2")


async def test_a_stored_comparison_without_a_goal_promotes_nothing() -> None:
    """It minimized by default: accuracy 0.5 replaced 0.95."""
    gates = [
        {
            "name": "better",
            "type": "Comparison",
            "comparison": {"metric": "accuracy", "betterBy": {"absolute": 0.1}},
        }
    ]
    there = await world(gates=gates, source={"type": "Version", "version": "2"})
    for version, accuracy in (("1", 0.95), ("2", 0.5)):
        there.registry.add(version, accuracy=accuracy)
    there.registry.aliases["champion"] = "1"
    await there.settle()
    assert (there.status().phase, there.registry.aliases["champion"]) == ("Failed", "1")
    assert there.says("Accepted") == ("InvalidSpec", "spec.gates.0.comparison.goal: Field required")


async def test_a_spec_that_cannot_be_read_leaves_the_finalizer_and_what_is_known_of_the_endpoint() -> None:
    serving = {"type": "Databricks", "databricks": {"endpoint": "support"}}
    there = await world(source={"type": "Version", "version": "1"}, serving=serving, onDelete="RemoveAlias")
    held = there.kube.objects["ModelPromotion", "team", "champion"]
    assert held["metadata"]["finalizers"]
    known = {"endpoint": "support", "version": "1"}
    there.kube.keep({**held, "status": {**held["status"], "serving": known}})
    await then(
        there,
        gates=[
            {
                "name": "later",
                "type": "Comparison",
                "comparison": {"metric": "loss", "betterBy": {"absolute": 0}},
            }
        ],
    )
    held = there.kube.objects["ModelPromotion", "team", "champion"]
    assert there.status().phase == "Failed"
    assert (held["metadata"]["finalizers"], held["status"]["serving"]) == (
        ["finetune.dev/remove-alias"],
        known,
    )
