"""Aliases that need approvals by the platform team's file: every way to the alias, on a registry and an API server in memory."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_operator.modelpromotion.decide.approvers import describe_approvers
from fixtures.fake_databricks import Workspace
from fixtures.operator_in_memory.promotions import World, back_to
from fixtures.operator_in_memory.serving import Databricks
from unit.operator.modelpromotion.champion import GATES, world

Json = dict[str, Any]
UNRECORDED = "because status.registry does not record that it had alias champion"


def by(*names: str, version: int | str = 3) -> list[Json]:
    return [{"version": version, "by": name} for name in names]


async def guarded(count: int = 2, **spec: Any) -> World:
    """Alias champion at version 2, which it had before the promotion, and version 3 in staging."""
    simulation = world(**spec)
    simulation.registry.aliases |= {"staging": "3", "champion": "2"}
    simulation.require_approvals(count)
    await simulation.settle()
    return simulation


async def then(simulation: World, **spec: Any) -> str:
    """Change the spec, and return the reason and the message of Promoted."""
    simulation.edit(**spec)
    await simulation.settle()
    return ": ".join(simulation.says("Promoted") or ())


def holder(simulation: World) -> str:
    return simulation.registry.aliases["champion"]


async def test_a_version_waits_until_enough_people_approved_it() -> None:
    simulation = await guarded()
    waits = "AwaitingApproval: version 3 passed its gates and waits for approval: "
    entry = "{version: 3, by: NAME} to spec.approvals"
    assert await then(simulation) == f"{waits}0 of 2; add {entry}"
    assert (
        await then(simulation, approvals=by("ana")) == f"{waits}1 of 2, by ana; another person adds {entry}"
    )
    other_version = [*by("ana"), *by("ben", version=1)]
    assert await then(simulation, approvals=other_version) == (
        f"{waits}1 of 2, by ana; another person adds {entry}; spec.approvals names version 1"
    )
    assert (simulation.status().phase, holder(simulation)) == ("AwaitingApproval", "2")
    assert await then(simulation, approvals=by("ana", "ben")) == (
        "Promoted: champion is version 3, which passed 2/2 gates, approved by ana and ben"
    )
    record = simulation.status().find_record("3")
    assert (holder(simulation), record and record.approved_by) == ("3", "ana and ben")
    assert simulation.registry.versions["3"].tags["promoted_champion_by"] == "ana and ben"


async def test_a_change_of_the_file_takes_effect_in_the_next_pass() -> None:
    simulation = await guarded(3, approvals=by("ana", "ben"))
    assert "2 of 3, by ana and ben" in await then(simulation)
    simulation.require_approvals(2)
    await simulation.settle()
    assert holder(simulation) == "3"


async def test_a_rule_for_another_alias_requires_nothing() -> None:
    simulation = world()
    simulation.registry.aliases["staging"] = "3"
    simulation.require_approvals(2, alias="staging")
    await simulation.settle()
    assert holder(simulation) == "3"


async def test_people_who_approve_a_version_that_needs_no_approval_are_recorded() -> None:
    simulation = world(approvals=by("ana"))
    simulation.registry.aliases["staging"] = "3"
    await simulation.settle()
    assert simulation.says("Promoted") == (
        "Promoted",
        "champion is version 3, which passed 2/2 gates, approved by ana",
    )


ROLLBACKS: dict[str, tuple[str, Json, str, str]] = {
    "to the version before": ("2", {}, "2", "RolledBack: champion is held at version 2 by spec.rollbackTo"),
    "to a version that was never approved": (
        "1",
        {},
        "3",
        f"AwaitingApproval: the rollback to version 1 waits for approval, {UNRECORDED}: 0 of 2; add {{version: 1, by: NAME}} to "
        "spec.approvals; spec.approvals names version 3",
    ),
    "to a version with one approval": (
        "1",
        {"approvals": by("ana", version=1)},
        "3",
        f"AwaitingApproval: the rollback to version 1 waits for approval, {UNRECORDED}: 1 of 2, by ana; another person adds {{version: 1, "
        "by: NAME} to spec.approvals",
    ),
    "to a version with its approvals": (
        "1",
        {"approvals": by("ana", "ben", version=1)},
        "1",
        "RolledBack: champion is held at version 1 by spec.rollbackTo",
    ),
}


@pytest.mark.parametrize(("target", "spec", "version", "message"), ROLLBACKS.values(), ids=ROLLBACKS.keys())
async def test_a_rollback_is_no_way_around_the_approvals(
    target: str, spec: Json, version: str, message: str
) -> None:
    simulation = await guarded(approvals=by("ana", "ben"))
    assert holder(simulation) == "3"
    assert await then(simulation, rollbackTo=back_to(target), **spec) == message
    assert holder(simulation) == version


async def test_a_version_that_somebody_moved_the_alias_to_is_not_kept_by_a_rollback() -> None:
    simulation = await guarded(onDrift="Warn")
    simulation.registry.aliases["champion"] = "1"
    await simulation.settle()
    await then(simulation, rollbackTo=back_to("1"), onDrift="Repair")
    assert (holder(simulation), simulation.status().promoted) == ("2", "2")
    assert (simulation.says("Promoted") or ("", ""))[0] == "AwaitingApproval"


@pytest.mark.parametrize("is_recorded", [True, False], ids=["from a version", "from nothing"])
async def test_a_rollback_to_where_somebody_moved_the_alias_says_how_many_approvals_it_lacks(
    is_recorded: bool,
) -> None:
    simulation = await guarded(onDrift="Warn")
    if not is_recorded:
        simulation.edit(onDrift="Repair")
        del simulation.registry.versions["2"], simulation.registry.aliases["champion"]
        await simulation.settle()
    simulation.registry.aliases["champion"] = "1"
    await simulation.settle()
    message = await then(simulation, rollbackTo=back_to("1"), approvals=by("ana", version=1))
    assert message.startswith("AwaitingApproval: the rollback to version 1 waits for approval")
    drift = ": ".join(simulation.says("Drifted") or ())
    assert drift.startswith("AliasMoved: somebody else")
    assert "approve the rollback" in drift
    assert "RolledBack" in await then(simulation, approvals=by("ana", "ben", version=1))


async def test_a_promotion_that_was_created_again_knows_no_version_that_had_the_alias() -> None:
    simulation = await guarded(approvals=by("ana", "ben"))
    simulation.remove()
    simulation.submit(gates=GATES, rollbackTo=back_to("1"))
    await simulation.settle()
    assert (simulation.phase_and_reason(), holder(simulation)) == ("AwaitingApproval: AwaitingApproval", "3")
    assert "RolledBack" in await then(simulation, rollbackTo=back_to("3"))


async def test_a_git_revert_needs_a_version_that_was_approved() -> None:
    simulation = world(source={"type": "Version", "version": "1"}, gates=GATES[:1])
    await simulation.settle()
    await then(simulation, source={"type": "Version", "version": "2"}, approvals=by("ana", version=2))
    simulation.require_approvals(1)
    await then(simulation, source={"type": "Version", "version": "1"})
    assert (simulation.status().phase, holder(simulation)) == ("AwaitingApproval", "2")
    await then(simulation, approvals=by("ana", version=1))
    await then(simulation, source={"type": "Version", "version": "2"}, approvals=[])
    assert simulation.moves()[-1] == ("Reverted", "1", "2")


async def test_an_endpoint_of_the_alias_serves_no_version_of_another_alias(databricks: Workspace) -> None:
    simulation = Databricks(databricks)
    await simulation.stage(1)
    simulation.require_approvals(2, endpoints=["support"])
    spec = simulation.held["spec"]
    version = {"type": "Version", "version": 3}
    simulation.submit("candidate", **spec | {"alias": "candidate", "source": version})
    candidate = simulation.kube.objects["ModelPromotion", "team", "candidate"]
    candidate["metadata"]["creationTimestamp"] = "2026-08-01T12:00:01Z"
    # Who may only update the promotion makes it one that is not permitted, so that it keeps the endpoint from nobody.
    simulation.edit(tags={"team": "{{secrets/other/key}}"})
    await simulation.settle()
    assert simulation.now == ("Blocked", {"staging": 1, "champion": 1}, {"1": 100})
    reason, message = simulation.says("Accepted", "candidate") or ("", "")
    assert (reason, message.partition(",")[0]) == ("NotPermitted", "spec.serving.endpoint support")


async def test_approvals_that_were_withdrawn_do_not_count() -> None:
    simulation = await guarded(approvals=by("ana", "ben"), soakSeconds=600)
    assert simulation.status().phase == "Soaking"
    await then(simulation, approvals=by("ana"))
    simulation.seconds += 600
    await simulation.settle()
    assert (simulation.status().phase, holder(simulation)) == ("AwaitingApproval", "2")


def test_names_that_are_too_long_for_the_status_are_counted() -> None:
    names = [letter * 253 for letter in "abcd"]
    assert describe_approvers(names) == f"{names[0]} and 3 more"
    assert [describe_approvers(names[:count]) for count in (0, 1)] == ["", names[0]]
    assert describe_approvers(["ana", "ben", "cid"]) == "ana, ben and cid"
