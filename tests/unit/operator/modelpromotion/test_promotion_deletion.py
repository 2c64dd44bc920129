"""Deleted promotions, and promotions that wait for the alias of an older one."""

from __future__ import annotations

from finetune_crds.conditions import ConditionReason
from finetune_operator.errors import Problem
from unit.operator.modelpromotion.champion import AWAY, world


async def test_the_older_of_two_wins_and_the_younger_takes_over_when_it_goes() -> None:
    simulation = world()
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    simulation.submit("other", alias="champion", source={"type": "Version", "version": 1})
    objects = simulation.kube.objects["ModelPromotion", "team", "other"]
    objects["metadata"]["creationTimestamp"] = "2026-08-01T12:00:01Z"
    await simulation.settle()
    assert (simulation.phase_and_reason("other"), simulation.status().phase) == (
        "Blocked: Conflict",
        "Promoted",
    )
    assert simulation.says("Accepted", "other") == (
        "Conflict",
        "ModelPromotion team/champion is older and manages alias champion of support-llama: delete one of the two",
    )
    simulation.remove("champion")
    await simulation.settle()
    assert (simulation.status("other").phase, simulation.registry.aliases["champion"]) == ("Promoted", "1")


async def test_deletion_leaves_the_alias_unless_asked() -> None:
    simulation = world()
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    simulation.remove()
    await simulation.settle()
    assert (simulation.names(), simulation.registry.aliases["champion"]) == ([], "2")


async def test_deletion_removes_the_alias_when_asked_and_waits_for_the_registry() -> None:
    simulation = world(onDelete="RemoveAlias")
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    simulation.registry.problem = AWAY
    simulation.remove()
    await simulation.settle()
    assert simulation.says("RegistryReady") == (
        "MlflowUnreachable",
        "the deletion waits until the operator can remove alias champion of support-llama in the registry "
        f"({AWAY.message}): to delete the ModelPromotion and keep the alias, set spec.onDelete to KeepAlias",
    )
    ready = simulation.says("Ready")
    assert ready
    assert ready[0] == "MlflowUnreachable"
    simulation.registry.problem = None
    await simulation.settle()
    assert (simulation.names(), simulation.registry.aliases) == ([], {"staging": "2"})


async def test_a_promotion_that_is_deleted_before_its_first_pass_goes() -> None:
    simulation = world(onDelete="RemoveAlias")
    await simulation.settle()
    body = simulation.kube.objects["ModelPromotion", "team", "champion"]
    simulation.kube.keep({key: value for key, value in body.items() if key != "status"})
    simulation.remove()
    await simulation.settle()
    assert simulation.names() == []


async def test_deletion_does_not_wait_for_a_secret_that_is_gone() -> None:
    simulation = world(onDelete="RemoveAlias")
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    simulation.registry.problem = Problem(ConditionReason.CREDENTIALS_MISSING, "Secret mlflow does not exist")
    await simulation.settle()
    simulation.remove()
    await simulation.settle()
    assert (simulation.names(), simulation.registry.aliases["champion"]) == ([], "2")
    # The Event outlives the status, although RegistryReady had the same reason before the deletion.
    last_event = [body for (kind, _, _), body in simulation.kube.objects.items() if kind == "Event"][-1]
    assert (last_event["reason"], last_event["message"]) == (
        "CredentialsMissing",
        "the ModelPromotion is deleted, but alias champion of support-llama remains because the operator cannot log in to the "
        "registry (Secret mlflow does not exist): remove the alias in the registry",
    )


async def test_the_younger_waits_until_the_older_has_taken_its_alias_away() -> None:
    simulation = world(onDelete="RemoveAlias")
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    simulation.submit("other", alias="champion", source={"type": "Version", "version": 1})
    simulation.kube.objects["ModelPromotion", "team", "other"]["metadata"]["creationTimestamp"] = (
        "2026-08-01T12:00:01Z"
    )
    await simulation.settle()
    simulation.remove()
    simulation.seconds += 5
    await simulation.operator.look("other")
    assert (simulation.phase_and_reason("other"), simulation.registry.aliases["champion"]) == (
        "Blocked: Conflict",
        "2",
    )
    await simulation.settle()
    assert (simulation.names(), simulation.moves("other")) == (["other"], [("Promoted", None, "1")])
