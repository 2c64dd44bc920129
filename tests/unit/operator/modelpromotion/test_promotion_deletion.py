"""Deleted promotions, and promotions that wait for the alias of an older one."""

from __future__ import annotations

from finetune_crds.conditions import ConditionReason
from finetune_operator.errors import Problem
from unit.operator.modelpromotion.champion import AWAY, world


async def test_the_older_of_two_wins_and_the_younger_takes_over_when_it_goes() -> None:
    there = world()
    there.registry.aliases["staging"] = "2"
    await there.settle()
    there.submit("other", alias="champion", source={"type": "Version", "version": 1})
    held = there.kube.objects["ModelPromotion", "team", "other"]
    held["metadata"]["creationTimestamp"] = "2026-08-01T12:00:01Z"
    await there.settle()
    assert (there.status("other").phase, there.status().phase) == ("Conflict", "Promoted")
    assert there.says("Accepted", "other") == (
        "Conflict",
        "ModelPromotion team/champion is older and keeps the alias champion of support-llama: delete one of the two",
    )
    there.remove("champion")
    await there.settle()
    assert (there.status("other").phase, there.registry.aliases["champion"]) == ("Promoted", "1")


async def test_deletion_leaves_the_alias_unless_asked() -> None:
    there = world()
    there.registry.aliases["staging"] = "2"
    await there.settle()
    there.remove()
    await there.settle()
    assert (there.names(), there.registry.aliases["champion"]) == ([], "2")


async def test_deletion_removes_the_alias_when_asked_and_waits_for_the_registry() -> None:
    there = world(onDelete="RemoveAlias")
    there.registry.aliases["staging"] = "2"
    await there.settle()
    there.registry.problem = AWAY
    there.remove()
    await there.settle()
    assert there.says("RegistryReady") == (
        "MlflowUnreachable",
        "deletion waits for the registry, to remove alias champion of support-llama: "
        f"{AWAY.message}; or set spec.onDelete to KeepAlias",
    )
    ready = there.says("Ready")
    assert ready
    assert ready[0] == "MlflowUnreachable"
    there.registry.problem = None
    await there.settle()
    assert (there.names(), there.registry.aliases) == ([], {"staging": "2"})


async def test_a_promotion_that_is_deleted_before_its_first_pass_goes() -> None:
    there = world(onDelete="RemoveAlias")
    await there.settle()
    body = there.kube.objects["ModelPromotion", "team", "champion"]
    there.kube.keep({key: value for key, value in body.items() if key != "status"})
    there.remove()
    await there.settle()
    assert there.names() == []


async def test_deletion_does_not_wait_for_a_secret_that_is_gone() -> None:
    there = world(onDelete="RemoveAlias")
    there.registry.aliases["staging"] = "2"
    await there.settle()
    there.registry.problem = Problem(ConditionReason.CREDENTIALS_MISSING, "Secret mlflow does not exist")
    there.remove()
    await there.settle()
    assert (there.names(), there.registry.aliases["champion"]) == ([], "2")


async def test_the_younger_waits_until_the_older_has_taken_its_alias_away() -> None:
    there = world(onDelete="RemoveAlias")
    there.registry.aliases["staging"] = "2"
    await there.settle()
    there.submit("other", alias="champion", source={"type": "Version", "version": 1})
    there.kube.objects["ModelPromotion", "team", "other"]["metadata"]["creationTimestamp"] = (
        "2026-08-01T12:00:01Z"
    )
    await there.settle()
    there.remove()
    there.seconds += 5
    await there.operator.look("other")
    assert (there.status("other").phase, there.registry.aliases["champion"]) == ("Conflict", "2")
    await there.settle()
    assert (there.names(), there.moves("other")) == (["other"], [("Promoted", None, "1")])
