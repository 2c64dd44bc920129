"""Promotions from beginning to end, on a registry and an API server in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator import names
from finetune_operator.errors import Problem
from finetune_operator.settings import Settings
from fixtures.operator_in_memory.promotions import KilledError, Memory, World
from unit.operator.modelpromotion.champion import AWAY, world


async def test_it_waits_for_the_model_the_alias_and_then_moves() -> None:
    simulation = world()
    simulation.registry.exists = False
    await simulation.settle()
    assert simulation.status().phase == "Pending"
    assert simulation.says("SourceReady") == (
        "WaitingForModel",
        "registered model support-llama does not exist",
    )
    simulation.registry.exists = True
    await simulation.settle()
    assert simulation.says("SourceReady") == ("WaitingForAlias", "support-llama has no alias staging yet")
    simulation.registry.aliases["staging"] = "1"
    await simulation.settle()
    status = simulation.status()
    assert (status.phase, status.current, status.promoted, status.previous, status.candidate) == (
        "Promoted",
        "1",
        "1",
        None,
        "1",
    )
    assert simulation.registry.moves == [("champion", "1")]
    assert simulation.moves() == [("Promoted", None, "1")]


async def test_a_version_says_who_promoted_it_when_from_where_and_by_which_gates() -> None:
    simulation = world(tags={"team": "support"})
    simulation.registry.aliases |= {"staging": "2", "champion": "1"}
    await simulation.settle()
    tags = simulation.registry.versions["2"].tags
    status = simulation.status()
    assert dict(tags) == {
        "team": "support",
        "promoted_champion_by": "ModelPromotion team/champion",
        "promoted_champion_at": status.history[0].time.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "promoted_champion_from": "1",
        "promoted_champion_gates": status.gates.digest if status.gates else "",
    }
    assert (status.previous, status.current) == ("1", "2")


async def test_two_aliases_of_a_version_have_tags_of_their_own() -> None:
    simulation = world(approval={}, approvals=[{"version": "2", "by": "kim"}])
    simulation.submit("shadow", source={"type": "Version", "version": "2"})
    simulation.registry.aliases |= {"staging": "2", "shadow": "1"}
    await simulation.settle()
    tags = simulation.registry.versions["2"].tags
    assert (tags["promoted_champion_by"], tags["promoted_champion_from"]) == ("kim", "none")
    assert (tags["promoted_shadow_by"], tags["promoted_shadow_from"]) == ("ModelPromotion team/shadow", "1")


async def test_a_version_whose_move_was_refused_has_no_tags() -> None:
    simulation = world()
    simulation.registry.aliases["staging"] = "2"
    simulation.registry.refusal = Problem(ConditionReason.MLFLOW_FORBIDDEN, "the alias is protected")
    for _ in range(3):
        simulation.seconds += 60
        await simulation.operator.look("champion")
    assert simulation.phase_and_reason() == "Promoting: MoveRefused"
    assert simulation.registry.versions["2"].tags == {}


async def test_tags_that_are_missing_after_the_move_are_written_by_a_later_pass() -> None:
    simulation = world()
    simulation.registry.aliases["staging"] = "2"

    def die_after_the_alias(_: str | None) -> None:
        simulation.writes.kill_after = simulation.writes.count

    simulation.registry.judge = die_after_the_alias
    with pytest.raises(KilledError):
        await simulation.settle()
    assert (simulation.registry.moves, simulation.registry.versions["2"].tags) == ([("champion", "2")], {})
    simulation.writes.spare()
    simulation.seconds += 120  # the Lease expires
    simulation.restart()
    await simulation.settle()
    assert simulation.registry.versions["2"].tags["promoted_champion_from"] == "none"
    assert simulation.registry.moves == [("champion", "2")]
    assert simulation.status().journal is None


async def promote_with_refused_tags() -> World:
    """A promotion whose alias has moved, and whose version the registry does not let it tag."""
    simulation = world()
    simulation.registry.aliases |= {"staging": "2", "champion": "1"}
    simulation.registry.tag_refusal = Problem(ConditionReason.MLFLOW_FORBIDDEN, "HTTP 403")
    for _ in range(6):
        simulation.seconds += 60
        await simulation.operator.look("champion")
    return simulation


async def test_tags_that_the_registry_refuses_block_no_rollback_and_are_reported() -> None:
    simulation = await promote_with_refused_tags()
    assert (simulation.phase_and_reason(), simulation.registry.aliases["champion"]) == (
        "Promoted: Promoted",
        "2",
    )
    assert (simulation.says("Promoted") or ("", ""))[1].endswith(
        "; the tags of the version cannot be set: HTTP 403"
    )
    # The refusal is not written anew in each pass.
    count = len(simulation.writes.log)
    simulation.seconds += 60
    await simulation.operator.look("champion")
    assert [what for what in simulation.writes.log[count:] if what.startswith("status")] == []
    simulation.edit(rollbackTo={"type": "Version", "version": "1"})
    for _ in range(6):
        simulation.seconds += 60
        await simulation.operator.look("champion")
    assert simulation.registry.aliases["champion"] == "1"


async def test_tags_that_the_registry_refuses_block_no_finalizer() -> None:
    simulation = await promote_with_refused_tags()
    simulation.edit(onDelete="RemoveAlias")
    waits = set()
    for _ in range(4):
        simulation.seconds += 60
        waits.add(await simulation.operator.look("champion"))
    body = simulation.kube.objects["ModelPromotion", "team", "champion"]
    assert body["metadata"]["finalizers"] == [names.FINALIZER]
    # None is the resync interval.
    assert waits == {None}
    # The tags are set once the registry accepts them.
    simulation.registry.tag_refusal = None
    await simulation.settle()
    assert simulation.registry.versions["2"].tags["promoted_champion_from"] == "1"
    assert simulation.says("Promoted") == ("Promoted", "champion is version 2, which passed 2/2 gates")


class ForgetfulMemory(Memory):
    """A registry that accepts tags and returns other values."""

    def set_tags(self, name: str, version: str, tags: Mapping[str, str]) -> None:
        super().set_tags(name, version, {key: value.upper() for key, value in tags.items()})


async def test_tags_that_the_registry_changes_are_not_written_again() -> None:
    simulation = world()
    simulation.registry = ForgetfulMemory(simulation.writes)
    simulation.registry.add("1", eval_loss=2.0)
    simulation.restart()
    simulation.registry.aliases |= {"staging": "1"}
    await simulation.settle()
    assert (simulation.status().phase, simulation.status().journal) == ("Promoted", None)
    writes = simulation.writes.count
    for _ in range(6):
        simulation.seconds += 600
        await simulation.settle()
    assert simulation.writes.count == writes


async def test_a_worse_version_is_refused_with_its_numbers() -> None:
    simulation = world()
    simulation.registry.add("4", eval_loss=2.3)
    simulation.registry.aliases |= {"staging": "4", "champion": "3"}
    await simulation.settle()
    status = simulation.status()
    assert (status.phase, status.current, status.candidate) == ("Refused", "3", "4")
    assert status.gates
    assert [item.to_json() for item in status.gates.verdicts] == [
        {
            "name": "loss",
            "verdict": "Passed",
            "value": "2.3",
            "limit": "<= 2.5",
            "message": "eval_loss is 2.3, which meets <= 2.5",
        },
        {
            "name": "no-worse",
            "verdict": "Failed",
            "value": "2.3",
            "limit": "<= 2.1",
            "holder": "2",
            "message": "eval_loss is 2.3, which does not meet <= 2.1, since version 3, which has the alias, has 2",
        },
    ]
    assert (status.gates.summary, simulation.registry.moves) == ("1/2", [])


async def test_approval_counts_for_its_version_alone() -> None:
    simulation = world(approval={}, approvals=[{"version": "2", "by": "jane"}])
    simulation.registry.aliases |= {"staging": "3", "champion": "1"}
    await simulation.settle()
    assert simulation.status().phase == "AwaitingApproval"
    assert simulation.says("Promoted") == (
        "AwaitingApproval",
        "version 3 passed its gates and waits for approval: add {version: 3, by: NAME} to spec.approvals; spec.approvals names version 2",
    )
    simulation.edit(approvals=[{"version": 3, "by": "jane"}])
    await simulation.settle()
    assert (simulation.status().phase, simulation.status().history[0].by) == ("Promoted", "jane")
    assert simulation.registry.aliases["champion"] == "3"


async def test_approval_that_takes_too_long_is_no_approval() -> None:
    simulation = world(approval={"timeoutSeconds": 3600})
    simulation.registry.aliases |= {"staging": "3", "champion": "1"}
    await simulation.settle()
    simulation.seconds += 3600
    simulation.edit(approval={"timeoutSeconds": 3600}, approvals=[{"version": "3", "by": "kim"}])
    await simulation.settle()
    assert simulation.status().phase == "Refused"
    simulation.edit(approval={"timeoutSeconds": 7200}, approvals=[{"version": "3", "by": "kim"}])
    await simulation.settle()
    assert simulation.status().phase == "Promoted"


async def test_the_soak_counts_from_passing_and_survives_a_restart() -> None:
    simulation = world(soakSeconds=600)
    simulation.registry.aliases |= {"staging": "3", "champion": "1"}
    await simulation.settle()
    soak = simulation.status().soak
    assert simulation.status().phase == "Soaking"
    simulation.seconds += 300
    simulation.restart()
    await simulation.settle()
    assert (simulation.status().phase, simulation.status().soak) == ("Soaking", soak)
    simulation.seconds += 300
    await simulation.settle()
    assert simulation.status().phase == "Promoted"
    assert simulation.status().soak is None


async def test_another_candidate_soaks_anew_and_a_deleted_one_no_longer() -> None:
    simulation = world(soakSeconds=600)
    simulation.registry.aliases |= {"staging": "2", "champion": "1"}
    await simulation.settle()
    simulation.seconds += 500
    simulation.registry.aliases["staging"] = "3"
    await simulation.settle()
    simulation.seconds += 200
    await simulation.settle()
    assert simulation.status().phase == "Soaking"
    simulation.registry.delete("3")
    simulation.seconds += 600
    await simulation.settle()
    assert (simulation.status().phase, simulation.status().soak) == ("Pending", None)
    assert simulation.registry.aliases == {"champion": "1"}


async def test_a_version_that_waits_for_approval_does_not_have_the_soak_of_the_one_before() -> None:
    simulation = world(soakSeconds=600, approval={}, approvals=[{"version": "2", "by": "kim"}])
    simulation.registry.aliases |= {"staging": "2", "champion": "1"}
    await simulation.settle()
    assert simulation.says("Soaked")
    simulation.registry.aliases["staging"] = "3"
    await simulation.settle()
    assert simulation.status().phase == "AwaitingApproval"
    assert simulation.says("Soaked") is None


async def test_an_approval_may_do_without_the_soak() -> None:
    simulation = world(soakSeconds=600, approval={"bypassSoak": True})
    simulation.registry.aliases |= {"staging": "3", "champion": "1"}
    await simulation.settle()
    assert simulation.status().phase == "AwaitingApproval"
    simulation.edit(approval={"bypassSoak": True}, approvals=[{"version": "3", "by": "kim"}])
    await simulation.settle()
    assert simulation.status().phase == "Promoted"


async def test_the_registry_being_away_changes_nothing_but_what_is_said_of_it() -> None:
    simulation = world(soakSeconds=600)
    simulation.registry.aliases |= {"staging": "3", "champion": "1"}
    await simulation.settle()
    before = simulation.status()
    simulation.registry.problem = AWAY
    await simulation.settle()
    after = simulation.status()
    assert simulation.says("RegistryReady") == ("MlflowUnreachable", AWAY.message)
    assert after.model_copy(update={"conditions": before.conditions}) == before
    simulation.registry.problem = None
    await simulation.settle()
    assert simulation.status().phase == "Soaking"


async def test_suspended_moves_nothing() -> None:
    simulation = world(suspend=True)
    simulation.registry.aliases |= {"staging": "3", "champion": "1"}
    await simulation.settle()
    assert (simulation.status().phase, simulation.registry.moves) == ("Suspended", [])
    simulation.edit(suspend=False)
    await simulation.settle()
    assert simulation.status().phase == "Promoted"


async def test_three_aliases_in_a_row() -> None:
    simulation = world(gates=None)
    simulation.submit("staging", source={"type": "Alias", "alias": "candidate"})
    simulation.registry.aliases["candidate"] = "2"
    await simulation.settle()
    assert simulation.registry.aliases == {"candidate": "2", "staging": "2", "champion": "2"}


async def test_at_rest_nothing_is_written_and_the_model_alone_is_read() -> None:
    simulation = world()
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    simulation.restart()
    simulation.registry.asked = 0
    before = simulation.writes.count
    await simulation.operator.look("champion")
    assert (simulation.writes.count - before, simulation.registry.asked) == (0, 1)


async def test_people_are_told() -> None:
    simulation = world()
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    assert simulation.events() == ["SourceResolved", "GatesPassed", "Promoting", "Promoted"]


async def test_without_a_registry_a_promotion_waits_until_the_installation_has_one() -> None:
    simulation = world()
    simulation.registry.aliases["staging"] = "2"
    simulation.settings, configured = Settings(namespace="system"), simulation.settings
    simulation.restart()
    await simulation.settle()
    message = (
        "no model registry is configured: install the chart with tracking.uri, or create a ModelPromotion with "
        "another name and spec.tracking.registryUri"
    )
    assert (simulation.status().phase, simulation.says("Reconciling")) == (
        "Pending",
        ("MlflowNotConfigured", message),
    )
    assert simulation.says("Stalled") is None
    simulation.settings = configured
    simulation.restart()
    await simulation.settle()
    assert (simulation.status().phase, simulation.registry.aliases["champion"]) == ("Promoted", "2")


async def test_a_move_that_is_refused_is_said_once_and_tried_in_peace() -> None:
    simulation = world()
    simulation.registry.aliases["staging"] = "2"
    simulation.seconds += 5
    await simulation.operator.look("champion")
    simulation.registry.refusal = Problem(ConditionReason.MLFLOW_FORBIDDEN, "MLflow refuses access")
    for _ in range(3):
        simulation.seconds += 60
        await simulation.operator.look("champion")
    message = "alias champion of support-llama cannot be moved: MLflow refuses access"
    assert (simulation.status().phase, simulation.says("Promoted")) == ("Promoting", ("MoveRefused", message))
    before = simulation.writes.log.count("status ModelPromotion")
    for _ in range(3):
        simulation.seconds += 60
        await simulation.operator.look("champion")
    assert simulation.writes.log.count("status ModelPromotion") == before
    simulation.registry.refusal = None
    await simulation.settle()
    assert (simulation.status().phase, simulation.registry.aliases["champion"]) == ("Promoted", "2")


async def test_sentences_that_are_too_long_are_cut() -> None:
    long = "x" * 4096
    simulation = world(gates=[{"name": "tag", "type": "Tag", "tag": {"name": "t", "equals": long}}])
    simulation.registry.add("4", tags={"t": long[1:]}, eval_loss=1.0)
    simulation.registry.aliases["staging"] = "4"
    await simulation.settle()
    assert simulation.status().phase == "Refused"


async def test_a_source_that_names_nothing_is_not_taken_for_the_one_before() -> None:
    simulation = world()
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    del simulation.registry.aliases["staging"]
    await simulation.settle()
    assert simulation.status().phase == "Promoted"
    simulation.edit(source={"type": "Alias", "alias": "stagging"})
    await simulation.settle()
    assert (simulation.status().phase, simulation.says("SourceReady")) == (
        "Pending",
        ("WaitingForAlias", "support-llama has no alias stagging yet"),
    )


async def test_aliases_in_a_loop_move_nothing() -> None:
    simulation = World()
    for version in ("1", "2", "3"):
        simulation.registry.add(version)
    for alias, source, version in (("a", "b", "1"), ("b", "c", "2"), ("c", "a", "3")):
        simulation.submit(alias, source={"type": "Alias", "alias": source})
        simulation.registry.aliases[alias] = version
    await simulation.settle()
    assert simulation.registry.moves == []
    assert {simulation.phase_and_reason(alias) for alias in "abc"} == {"Blocked: Conflict"}
    simulation.edit("c", source={"type": "Version", "version": "3"})
    await simulation.settle()
    assert simulation.registry.aliases == {"a": "3", "b": "3", "c": "3"}


def job(phase: str, *, registers: str = "support-llama", uri: str | None = None) -> dict[str, Any]:
    """A FineTuneJob that registered version 2 of a model."""
    status = {"phase": phase, "model": {"name": registers, "version": "2"}}
    tracking = {"uri": uri} if uri else {}
    spec = {"model": {"base": "/m"}, "tracking": tracking, "register": {"model": registers}}
    return {"kind": "FineTuneJob", "metadata": {"name": "tune"}, "spec": spec, "status": status}


JOBS: dict[str, tuple[dict[str, Any] | None, str, tuple[str, str]]] = {
    "there is none": (
        None,
        "Pending",
        ("WaitingForJob", "FineTuneJob tune does not exist in this namespace"),
    ),
    "under way": (job("Training"), "Pending", ("WaitingForJob", "FineTuneJob tune is Training")),
    "failed": (
        job("Failed"),
        "Blocked",
        (
            "JobFailed",
            "FineTuneJob tune has failed and has no version to promote: set spec.source to another FineTuneJob",
        ),
    ),
    "another model": (
        job("Succeeded", registers="other"),
        "Blocked",
        (
            "JobFailed",
            (
                "FineTuneJob tune registered a version of other, not of support-llama: set spec.source to a "
                "FineTuneJob that registers support-llama, or create a ModelPromotion of other"
            ),
        ),
    ),
    "another registry": (
        job("Succeeded", uri="http://elsewhere"),
        "Blocked",
        (
            "JobFailed",
            "FineTuneJob tune registered its version in http://elsewhere, which is another registry: create a "
            "ModelPromotion with another name and that registry in spec.tracking",
        ),
    ),
    "done": (job("Succeeded"), "Promoted", ("SourceResolved", "FineTuneJob tune registered version 2")),
}


@pytest.mark.parametrize(("source", "phase", "reported"), JOBS.values(), ids=JOBS)
async def test_a_version_from_a_job(
    source: dict[str, Any] | None, phase: str, reported: tuple[str, str]
) -> None:
    simulation = world(source={"type": "FineTuneJob", "fineTuneJobRef": {"name": "tune"}})
    if source:
        simulation.kube.keep(source)
    await simulation.settle()
    assert (simulation.status().phase, simulation.says("SourceReady")) == (phase, reported)


NO_MODEL = ("WaitingForModel", "registered model support-llama does not exist")


@pytest.mark.parametrize("case", JOBS)
async def test_a_first_version_from_a_job(case: str) -> None:
    source, phase, reported = JOBS[case]
    simulation = world(source={"type": "FineTuneJob", "fineTuneJobRef": {"name": "tune"}})
    simulation.registry.exists = False
    if source:
        simulation.kube.keep(source)
    await simulation.settle()
    has_ended = source is not None and source["status"]["phase"] == "Succeeded"
    expected = ("Pending", NO_MODEL) if has_ended else (phase, reported)
    assert (simulation.status().phase, simulation.says("SourceReady")) == expected
    assert simulation.says("Promoted") == expected[1]
