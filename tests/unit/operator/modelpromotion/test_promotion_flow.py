"""Promotions from beginning to end, on a registry and an API server in memory."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator import names
from finetune_operator.errors import Problem
from finetune_operator.settings import Settings
from unit.operator.modelpromotion.champion import AWAY, world
from worlds.memory.promotions import World


async def test_it_waits_for_the_model_the_alias_and_then_moves() -> None:
    there = world()
    there.registry.exists = False
    await there.settle()
    assert there.status().phase == "Pending"
    assert there.says("SourceReady") == (
        "WaitingForModel",
        "registered model support-llama does not exist",
    )
    there.registry.exists = True
    await there.settle()
    assert there.says("SourceReady") == ("WaitingForAlias", "support-llama has no alias staging yet")
    there.registry.aliases["staging"] = "1"
    await there.settle()
    status = there.status()
    assert (status.phase, status.current, status.promoted, status.previous, status.candidate) == (
        "Promoted",
        "1",
        "1",
        None,
        "1",
    )
    assert there.registry.moves == [("champion", "1")]
    assert there.moves() == [("Promoted", None, "1")]


async def test_a_version_says_who_promoted_it_when_from_where_and_by_which_gates() -> None:
    there = world(tags={"team": "support"})
    there.registry.aliases |= {"staging": "2", "champion": "1"}
    await there.settle()
    tags = there.registry.versions["2"].tags
    status = there.status()
    assert dict(tags) == {
        "team": "support",
        names.TAG_PROMOTED_ALIAS: "champion",
        names.TAG_PROMOTED_BY: "ModelPromotion team/champion",
        names.TAG_PROMOTED_AT: status.history[0].time.strftime("%Y-%m-%dT%H:%M:%SZ"),
        names.TAG_PROMOTED_FROM: "1",
        names.TAG_PROMOTED_GATES: status.gates.digest if status.gates else "",
    }
    assert (status.previous, status.current) == ("1", "2")


async def test_a_worse_version_is_refused_with_its_numbers() -> None:
    there = world()
    there.registry.add("4", eval_loss=2.3)
    there.registry.aliases |= {"staging": "4", "champion": "3"}
    await there.settle()
    status = there.status()
    assert (status.phase, status.current, status.candidate) == ("Refused", "3", "4")
    assert status.gates
    assert [item.to_json() for item in status.gates.verdicts] == [
        {
            "name": "loss",
            "verdict": "Passed",
            "value": "2.3",
            "limit": "<= 2.5",
            "message": "eval_loss is 2.3, as it must be <= 2.5",
        },
        {
            "name": "no-worse",
            "verdict": "Failed",
            "value": "2.3",
            "limit": "<= 2.1",
            "holder": "2",
            "message": "eval_loss is 2.3, that of version 3, which has the alias, is 2: but it must be <= 2.1",
        },
    ]
    assert (status.gates.summary, there.registry.moves) == ("1/2", [])


async def test_approval_counts_for_its_version_alone() -> None:
    there = world(approval={"required": True, "version": "2", "by": "jane"})
    there.registry.aliases |= {"staging": "3", "champion": "1"}
    await there.settle()
    assert there.status().phase == "AwaitingApproval"
    assert there.says("Promoted") == (
        "AwaitingApproval",
        "version 3 passed its gates and waits for approval: set spec.approval.version to 3; approval.version 2 is not it",
    )
    there.edit(approval={"required": True, "version": 3, "by": "jane"})
    await there.settle()
    assert (there.status().phase, there.status().history[0].by) == ("Promoted", "jane")
    assert there.registry.aliases["champion"] == "3"


async def test_approval_that_takes_too_long_is_no_approval() -> None:
    there = world(approval={"required": True, "timeoutSeconds": 3600})
    there.registry.aliases |= {"staging": "3", "champion": "1"}
    await there.settle()
    there.seconds += 3600
    there.edit(approval={"required": True, "timeoutSeconds": 3600, "version": "3"})
    await there.settle()
    assert there.status().phase == "Refused"
    there.edit(approval={"required": True, "timeoutSeconds": 7200, "version": "3"})
    await there.settle()
    assert there.status().phase == "Promoted"


async def test_the_soak_counts_from_passing_and_survives_a_restart() -> None:
    there = world(soakSeconds=600)
    there.registry.aliases |= {"staging": "3", "champion": "1"}
    await there.settle()
    soak = there.status().soak
    assert there.status().phase == "Soaking"
    there.seconds += 300
    there.restart()
    await there.settle()
    assert (there.status().phase, there.status().soak) == ("Soaking", soak)
    there.seconds += 300
    await there.settle()
    assert there.status().phase == "Promoted"
    assert there.status().soak is None


async def test_another_candidate_soaks_anew_and_a_deleted_one_no_longer() -> None:
    there = world(soakSeconds=600)
    there.registry.aliases |= {"staging": "2", "champion": "1"}
    await there.settle()
    there.seconds += 500
    there.registry.aliases["staging"] = "3"
    await there.settle()
    there.seconds += 200
    await there.settle()
    assert there.status().phase == "Soaking"
    there.registry.delete("3")
    there.seconds += 600
    await there.settle()
    assert (there.status().phase, there.status().soak) == ("Pending", None)
    assert there.registry.aliases == {"champion": "1"}


async def test_an_approval_may_do_without_the_soak() -> None:
    there = world(soakSeconds=600, approval={"required": True, "bypassSoak": True})
    there.registry.aliases |= {"staging": "3", "champion": "1"}
    await there.settle()
    assert there.status().phase == "AwaitingApproval"
    there.edit(approval={"required": True, "bypassSoak": True, "version": "3"})
    await there.settle()
    assert there.status().phase == "Promoted"


async def test_the_registry_being_away_changes_nothing_but_what_is_said_of_it() -> None:
    there = world(soakSeconds=600)
    there.registry.aliases |= {"staging": "3", "champion": "1"}
    await there.settle()
    before = there.status()
    there.registry.problem = AWAY
    await there.settle()
    after = there.status()
    assert there.says("RegistryReady") == ("MlflowUnreachable", AWAY.message)
    assert after.model_copy(update={"conditions": before.conditions}) == before
    there.registry.problem = None
    await there.settle()
    assert there.status().phase == "Soaking"


async def test_suspended_moves_nothing() -> None:
    there = world(suspend=True)
    there.registry.aliases |= {"staging": "3", "champion": "1"}
    await there.settle()
    assert (there.status().phase, there.registry.moves) == ("Suspended", [])
    there.edit(suspend=False)
    await there.settle()
    assert there.status().phase == "Promoted"


async def test_three_aliases_in_a_row() -> None:
    there = world(gates=None)
    there.submit("staging", source={"type": "Alias", "alias": "candidate"})
    there.registry.aliases["candidate"] = "2"
    await there.settle()
    assert there.registry.aliases == {"candidate": "2", "staging": "2", "champion": "2"}


async def test_at_rest_nothing_is_written_and_the_model_alone_is_read() -> None:
    there = world()
    there.registry.aliases["staging"] = "2"
    await there.settle()
    there.restart()
    there.registry.asked = 0
    before = there.writes.count
    await there.operator.look("champion")
    assert (there.writes.count - before, there.registry.asked) == (0, 1)


async def test_people_are_told() -> None:
    there = world()
    there.registry.aliases["staging"] = "2"
    await there.settle()
    assert there.events() == ["SourceResolved", "GatesPassed", "Promoting", "Promoted"]


async def test_without_a_registry_a_promotion_waits_until_the_installation_has_one() -> None:
    there = world()
    there.registry.aliases["staging"] = "2"
    there.settings, configured = Settings(namespace="system"), there.settings
    there.restart()
    await there.settle()
    message = (
        "no model registry is known: set spec.tracking.registryUri, or install the chart with tracking.uri"
    )
    assert (there.status().phase, there.says("Reconciling")) == ("Pending", ("MlflowNotConfigured", message))
    assert there.says("Stalled") is None
    there.settings = configured
    there.restart()
    await there.settle()
    assert (there.status().phase, there.registry.aliases["champion"]) == ("Promoted", "2")


async def test_a_move_that_is_refused_is_said_once_and_tried_in_peace() -> None:
    there = world()
    there.registry.aliases["staging"] = "2"
    there.seconds += 5
    await there.operator.look("champion")
    there.registry.refusal = Problem(ConditionReason.MLFLOW_FORBIDDEN, "MLflow refuses access")
    for _ in range(3):
        there.seconds += 60
        await there.operator.look("champion")
    message = "alias champion of support-llama cannot be moved: MLflow refuses access"
    assert (there.status().phase, there.says("Promoted")) == ("Promoting", ("MoveRefused", message))
    before = there.writes.log.count("status ModelPromotion")
    for _ in range(3):
        there.seconds += 60
        await there.operator.look("champion")
    assert there.writes.log.count("status ModelPromotion") == before
    there.registry.refusal = None
    await there.settle()
    assert (there.status().phase, there.registry.aliases["champion"]) == ("Promoted", "2")


async def test_sentences_that_are_too_long_are_cut() -> None:
    long = "x" * 4096
    there = world(gates=[{"name": "tag", "type": "Tag", "tag": {"name": "t", "equals": long}}])
    there.registry.add("4", tags={"t": long[1:]}, eval_loss=1.0)
    there.registry.aliases["staging"] = "4"
    await there.settle()
    assert there.status().phase == "Refused"


async def test_a_source_that_names_nothing_is_not_taken_for_the_one_before() -> None:
    there = world()
    there.registry.aliases["staging"] = "2"
    await there.settle()
    del there.registry.aliases["staging"]
    await there.settle()
    assert there.status().phase == "Promoted"
    there.edit(source={"type": "Alias", "alias": "stagging"})
    await there.settle()
    assert (there.status().phase, there.says("SourceReady")) == (
        "Pending",
        ("WaitingForAlias", "support-llama has no alias stagging yet"),
    )


async def test_aliases_in_a_loop_move_nothing() -> None:
    there = World()
    for version in ("1", "2", "3"):
        there.registry.add(version)
    for alias, source, version in (("a", "b", "1"), ("b", "c", "2"), ("c", "a", "3")):
        there.submit(alias, source={"type": "Alias", "alias": source})
        there.registry.aliases[alias] = version
    await there.settle()
    assert there.registry.moves == []
    assert {there.status(alias).phase for alias in "abc"} == {"Conflict"}
    there.edit("c", source={"type": "Version", "version": "3"})
    await there.settle()
    assert there.registry.aliases == {"a": "3", "b": "3", "c": "3"}


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
        "Failed",
        ("JobFailed", "FineTuneJob tune has failed: there is no version to promote"),
    ),
    "another model": (
        job("Succeeded", registers="other"),
        "Failed",
        ("JobFailed", "FineTuneJob tune registered other, not support-llama: name its model"),
    ),
    "another registry": (
        job("Succeeded", uri="http://elsewhere"),
        "Failed",
        (
            "JobFailed",
            "FineTuneJob tune registered its version in http://elsewhere, which is another registry: name that one in "
            "spec.tracking",
        ),
    ),
    "done": (job("Succeeded"), "Promoted", ("SourceResolved", "FineTuneJob tune is version 2")),
}


@pytest.mark.parametrize(("source", "phase", "said"), JOBS.values(), ids=JOBS)
async def test_a_version_from_a_job(source: dict[str, Any] | None, phase: str, said: tuple[str, str]) -> None:
    there = world(source={"type": "FineTuneJob", "fineTuneJobRef": {"name": "tune"}})
    if source:
        there.kube.keep(source)
    await there.settle()
    assert (there.status().phase, there.says("SourceReady")) == (phase, said)
