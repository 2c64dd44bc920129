"""Two installations of the operator on one registry: one of them owns an alias, and the other says so."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.registry.alias_owners import AliasOwners
from finetune_operator.registry.base import RegisteredModel
from finetune_operator.registry.ownership import LEASE_SECONDS, SETTLE_SECONDS
from fixtures.operator_in_memory.promotions import MODEL, Memory, World, Writes

TAG = "finetune_owner_champion"
UIDS = {
    "one": "11111111-1111-4111-8111-111111111111",
    "other": "22222222-2222-4222-8222-222222222222",
}


@dataclass
class Tagged(Memory):
    """A registry in memory whose models have tags."""

    tags: dict[str, str] = field(default_factory=dict)
    untaggable: Problem | None = None

    def model(self, name: str) -> RegisteredModel | None:
        found = super().model(name)
        return RegisteredModel(name, found.aliases, found.created, dict(self.tags)) if found else None

    def set_model_tag(self, name: str, key: str, value: str) -> None:
        self._ask()
        if self.untaggable:
            raise ExternalError(self.untaggable)
        with self.writes.one(f"tag {key} of {name}"):
            self.tags[key] = value


def installation(registry: Tagged, identity: str, **spec: Any) -> World:
    """A cluster with an operator and a promotion, for this registry."""
    world = World()
    world.registry = registry
    meta = {"name": "finetune-installation", "namespace": "system", "uid": UIDS[identity]}
    world.kube.keep({"kind": "Lease", "metadata": meta, "spec": {}})
    world.restart()
    world.submit(**({"source": {"type": "Version", "version": "1"}} | spec))
    return world


def new_registry() -> Tagged:
    registry = Tagged(Writes())
    for version in ("1", "2", "3"):
        registry.add(version, loss=2.0)
    return registry


def owner(registry: Tagged) -> str:
    uid = json.loads(registry.tags[TAG])["installation"]
    return next(name for name in UIDS if UIDS[name] == uid)


def record(**changes: Any) -> str:
    """The tag of the other installation."""
    fields = {
        "installation": UIDS["other"],
        "promotion": "team/champion",
        "time": "2026-08-01T12:00:00+00:00",
    }
    return json.dumps(fields | changes)


async def look_despite_errors(world: World, passes: int = 1, seconds: float = SETTLE_SECONDS) -> None:
    for _ in range(passes):
        with contextlib.suppress(ExternalError):
            await look(world, 1, seconds)


async def look(world: World, passes: int = 1, seconds: float = SETTLE_SECONDS) -> None:
    for _ in range(passes):
        world.seconds += seconds
        await world.operator.look("champion")


async def begin_move(registry: Tagged) -> World:
    """An installation that owns the alias, and whose journal has a move to version 3."""
    one = installation(registry, "one")
    await look(one, 6)
    one.edit(source=version("3"))
    await look(one)
    assert one.status().move
    return one


async def test_the_second_installation_is_a_conflict_with_the_owners_name() -> None:
    registry = new_registry()
    one, other = installation(registry, "one"), installation(registry, "other", source=version("2"))
    await look(one, 6)
    assert (one.status().phase, registry.aliases) == ("Promoted", {"champion": "1"})
    for _ in range(10):
        await look(other)
        await look(one)
    assert other.phase_and_reason() == "Blocked: Conflict"
    assert other.says("Accepted") == (
        "Conflict",
        f"ModelPromotion team/champion of installation {UIDS['one']} manages alias champion of support-llama in this registry: delete one "
        "of the two; this one takes over 45 min after the other installation has stopped. If that installation no longer exists, delete "
        "the tag finetune_owner_champion of the registered model",
    )
    assert (one.status().phase, registry.moves) == ("Promoted", [("champion", "1")])


async def test_two_that_begin_at_the_same_time_do_not_both_move_the_alias() -> None:
    registry = new_registry()
    one, other = installation(registry, "one"), installation(registry, "other", source=version("2"))
    for _ in range(10):
        await look(one)
        await look(other)
    phases = sorted(world.phase_and_reason() for world in (one, other))
    assert phases == ["Blocked: Conflict", "Promoted: Promoted"]
    assert len(registry.moves) == 1
    winner = one if one.status().phase == "Promoted" else other
    assert owner(registry) == ("one" if winner is one else "other")


async def test_both_that_read_before_either_wrote_settle_on_the_last_writer() -> None:
    registry = new_registry()
    one, other = installation(registry, "one"), installation(registry, "other", source=version("2"))
    await look(one)
    taken_by_one = registry.tags.pop(TAG)
    await look(other)
    assert owner(registry) == "other"
    # The write of the first arrives last.
    registry.tags[TAG] = taken_by_one
    for _ in range(6):
        await look(other)
        await look(one)
    assert (one.status().phase, other.phase_and_reason()) == ("Promoted", "Blocked: Conflict")
    assert registry.moves == [("champion", "1")]


async def test_the_first_move_waits_until_the_tag_is_settled() -> None:
    registry = new_registry()
    one = installation(registry, "one")
    await look(one, 4, seconds=0.1)
    assert (owner(registry), registry.moves) == ("one", [])
    await look(one, 3)
    assert registry.moves == [("champion", "1")]


async def test_an_owner_that_lost_the_alias_between_its_decision_and_its_write_moves_nothing() -> None:
    registry = new_registry()
    one = await begin_move(registry)

    def take() -> None:
        # In the pass that moves the alias, after the model was read once.
        if registry.asked > asked + 1:
            registry.tags[TAG] = record()

    asked = registry.asked
    registry.before_reading = take
    await look(one)
    registry.before_reading = lambda: None
    await look(one)
    assert (one.phase_and_reason(), registry.aliases["champion"]) == ("Blocked: Conflict", "1")


async def test_the_other_takes_over_when_the_owner_renews_no_more() -> None:
    registry = new_registry()
    one, other = installation(registry, "one"), installation(registry, "other", source=version("2"))
    await look(one, 6)
    renewed = registry.tags[TAG]
    await look(one, 2, seconds=16 * 60)
    assert registry.tags[TAG] != renewed
    await look(other, 2, seconds=LEASE_SECONDS - 60)
    assert other.phase_and_reason() == "Blocked: Conflict"
    # NB: the lease counts from when this process saw the tag first: the clock of the owner does not matter.
    await look(other, 1, seconds=120)
    await look(other, 6)
    assert (other.status().phase, registry.aliases["champion"], owner(registry)) == ("Promoted", "2", "other")
    await look(one, 2)
    assert one.phase_and_reason() == "Blocked: Conflict"


async def test_a_restart_and_a_move_to_another_namespace_keep_the_alias() -> None:
    registry = new_registry()
    one = installation(registry, "one")
    await look(one, 6)
    one.restart()
    writes = one.writes.count
    await look(one, 3)
    assert (one.status().phase, one.writes.count) == ("Promoted", writes)
    # The promotion of the same installation that is created elsewhere has the alias at once.
    registry.tags[TAG] = registry.tags[TAG].replace("team/champion", "elsewhere/champion")
    await look(one, 3)
    assert (one.status().phase, json.loads(registry.tags[TAG])["promotion"]) == ("Promoted", "team/champion")


async def test_a_registry_that_may_not_be_tagged_is_used_without_an_owner() -> None:
    registry = new_registry()
    registry.untaggable = Problem(ConditionReason.MLFLOW_FORBIDDEN, "HTTP 403")
    one = installation(registry, "one")
    await look(one, 6)
    assert (one.status().phase, registry.tags) == ("Promoted", {})


async def test_an_alias_that_another_credential_may_not_tag_is_still_owned() -> None:
    registry = new_registry()
    one = installation(registry, "one")
    registry.untaggable = Problem(ConditionReason.MLFLOW_FORBIDDEN, "HTTP 403")
    await look(one, 6)
    registry.untaggable = None
    # The refusal is forgotten after a renewal interval.
    await look(one, 1, seconds=16 * 60)
    await look(one)
    assert owner(registry) == "one"


@pytest.mark.parametrize(
    "reason",
    [
        ConditionReason.MLFLOW_ERROR,
        ConditionReason.MLFLOW_UNREACHABLE,
        ConditionReason.MLFLOW_FORBIDDEN,
        ConditionReason.MLFLOW_REFUSED,
    ],
)
async def test_one_renewal_that_fails_does_not_end_the_ownership(reason: ConditionReason) -> None:
    registry = new_registry()
    one, other = installation(registry, "one"), installation(registry, "other", source=version("2"))
    await look(one, 6)
    before = registry.tags[TAG]
    registry.untaggable = Problem(reason, "the tag is not set")
    await look_despite_errors(one, 1, seconds=16 * 60)
    registry.untaggable = None
    for _ in range(6):
        await look(one, 1, seconds=16 * 60)
        await look(other, 1, seconds=16 * 60)
    assert registry.tags[TAG] != before
    assert (one.status().phase, other.phase_and_reason()) == ("Promoted", "Blocked: Conflict")
    assert registry.moves == [("champion", "1")]


async def test_two_that_begin_during_an_error_of_the_registry_do_not_both_move_the_alias() -> None:
    registry = new_registry()
    one, other = installation(registry, "one"), installation(registry, "other", source=version("2"))
    registry.untaggable = Problem(ConditionReason.MLFLOW_ERROR, "HTTP 500")
    for world in (one, other):
        await look_despite_errors(world, 3)
    assert registry.moves == []
    registry.untaggable = None
    for _ in range(8):
        await look(one)
        await look(other)
    assert len(registry.moves) == 1
    assert sorted(world.phase_and_reason() for world in (one, other)) == [
        "Blocked: Conflict",
        "Promoted: Promoted",
    ]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "not JSON",
        "null",
        "[" * 1000,
        "[" * 3000,
        "x" * 100_000,
        json.dumps({"installation": UIDS["other"]}),
        record(time="2026-08-01T12:00:00"),
        record(time=7),
        record(time="yesterday"),
        record(installation=UIDS["one"], time="2026-08-01T12:00:00"),
        record(installation=["one"]),
        record(installation="x\nrun kubectl delete namespace team"),
        record(installation=f"{UIDS['other']}\n"),
        record(promotion=None),
        record(promotion="champion"),
        record(promotion="team/champion/x"),
        record(promotion="Team/run this"),
        record(promotion=f"team/{'x' * 254}"),
        record(promotion=f"{'x' * 64}/champion"),
        record(comment="x" * 1024),
    ],
)
async def test_a_tag_that_no_operator_wrote_is_no_owner(content: str) -> None:
    registry = new_registry()
    one = installation(registry, "one")
    await look(one, 6)
    registry.tags[TAG] = content
    await look(one, 3)
    assert (owner(registry), one.phase_and_reason()) == ("one", "Promoted: Promoted")


async def test_the_longest_name_of_a_promotion_is_an_owner() -> None:
    registry = new_registry()
    registry.tags[TAG] = record(promotion=f"{'x' * 63}/{'x' * 253}")
    one = installation(registry, "one")
    await look(one)
    assert one.phase_and_reason() == "Blocked: Conflict"


@pytest.mark.parametrize("minutes", [16, 46], ids=["a renewal", "a renewal after the lease"])
async def test_a_renewal_does_not_overwrite_the_tag_of_another_owner(minutes: int) -> None:
    registry = new_registry()
    one = installation(registry, "one")
    await look(one, 6)

    def take() -> None:
        # In the pass that renews the tag, after the model was read once.
        if registry.asked > asked + 1:
            registry.tags[TAG] = record()

    asked = registry.asked
    registry.before_reading = take
    await look(one, 1, seconds=60 * minutes)
    registry.before_reading = lambda: None
    assert owner(registry) == "other"
    await look(one)
    assert (owner(registry), one.phase_and_reason()) == ("other", "Blocked: Conflict")


async def test_an_owner_whose_lease_ended_settles_again_before_it_moves_the_alias() -> None:
    registry = new_registry()
    one = installation(registry, "one")
    await look(one, 6)
    one.edit(source=version("3"))
    await look(one, 1, seconds=LEASE_SECONDS + 60)
    await look(one, 1, seconds=0.1)
    assert (owner(registry), registry.aliases) == ("one", {"champion": "1"})
    await look(one, 4)
    assert (owner(registry), registry.aliases) == ("one", {"champion": "3"})


@pytest.mark.parametrize(
    ("on_drift", "aliases", "reason"),
    [
        ("Repair", {"champion": "2"}, "Promoted: Repaired"),
        ("Warn", {"champion": "3"}, "Blocked: AliasMoved"),
        ("Adopt", {"champion": "3"}, "Promoted: Adopted"),
    ],
)
async def test_a_foreign_tag_for_one_pass_does_not_hide_drift(
    on_drift: str, aliases: Mapping[str, str], reason: str
) -> None:
    registry = new_registry()
    one = installation(registry, "one", onDrift=on_drift)
    await look(one, 6)
    one.edit(source=version("2"))
    await look(one, 6)
    assert registry.aliases == {"champion": "2"}
    before = one.status()
    registry.tags[TAG] = record()
    registry.aliases["champion"] = "3"
    await look(one)
    assert one.phase_and_reason() == "Blocked: Conflict"
    during = one.status()
    assert (during.promoted, during.watch_start_time, during.registry) == (
        before.promoted,
        before.watch_start_time,
        before.registry,
    )
    del registry.tags[TAG]
    await look(one, 8)
    assert (registry.aliases, one.phase_and_reason()) == (aliases, reason)


async def test_a_move_that_took_effect_before_a_foreign_tag_is_no_drift() -> None:
    registry = new_registry()
    one = await begin_move(registry)
    registry.aliases["champion"] = "3"
    registry.tags[TAG] = record()
    await look(one, 2)
    assert one.phase_and_reason() == "Blocked: Conflict"
    del registry.tags[TAG]
    await look(one, 6)
    assert (one.phase_and_reason(), one.status().promoted) == ("Promoted: Promoted", "3")
    assert registry.moves == [("champion", "1")]


async def test_what_no_longer_counts_is_forgotten() -> None:
    registry = new_registry()
    seconds = [0.0]
    one = installation(registry, "one")
    owners = AliasOwners(one.kube, "system", clock=lambda: seconds[0])
    registry.untaggable = Problem(ConditionReason.MLFLOW_FORBIDDEN, "HTTP 403")
    model = RegisteredModel(MODEL, {}, registry.created, registry.tags)
    for number in range(3):
        registry.tags[f"finetune_owner_{number}"] = record()
        assert (await owners.find(registry, model, str(number), "team/a")).state == "Foreign"
        await owners.take(registry, MODEL, f"free-{number}", "team/a", is_new=True)
    assert (len(owners._sightings), len(owners._taken), len(owners._refused)) == (3, 3, 1)
    assert all(len(item.digest) == 64 for item in owners._sightings.values())
    seconds[0] = 25 * 3600.0
    await owners.find(registry, model, "0", "team/a")
    assert (len(owners._sightings), len(owners._taken), len(owners._refused)) == (1, 0, 0)


def version(number: str) -> Mapping[str, str]:
    """A source."""
    return {"type": "Version", "version": number}


async def test_only_the_tag_of_a_new_owner_may_be_refused() -> None:
    registry = new_registry()
    one = installation(registry, "one")
    owners = AliasOwners(one.kube, "system", lambda: one.seconds)
    registry.untaggable = Problem(ConditionReason.MLFLOW_FORBIDDEN, "HTTP 403")
    assert await owners.take(registry, MODEL, "champion", "team/champion", is_new=True)
    # Other installations still read the tag that this one wrote before.
    with pytest.raises(ExternalError, match="HTTP 403"):
        await owners.take(registry, MODEL, "champion", "team/champion", is_new=False)
