"""Whatever happens to a promotion, in whatever order: the promises that hold at every step."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from finetune_crds.conditions import ConditionReason
from finetune_crds.modelpromotion import ModelPromotionSpec
from finetune_crds.promotion_status import ModelPromotionStatus, Move
from finetune_operator.errors import Problem
from finetune_operator.modelpromotion.decide.digests import gates_digest
from worlds.memory.promotions import PREVIOUS, KilledError, World, back_to

Json = dict[str, Any]
AWAY = Problem(ConditionReason.MLFLOW_UNREACHABLE, "away")
LIMIT, TOLERANCE = 5, 1
STRICT = [
    {"name": "loss", "type": "Metric", "metric": {"name": "loss", "max": LIMIT}},
    {
        "name": "no-worse",
        "type": "Comparison",
        "comparison": {"metric": "loss", "goal": "Minimize", "notWorseThan": {"absolute": TOLERANCE}},
    },
]
LOOSE = [{"name": "loss", "type": "Metric", "metric": {"name": "loss", "max": 2 * LIMIT}}]
# What happens often, and what lets a version be promoted, stands here more than once.
VERSIONS = st.sampled_from([*"111222334567"])
APPROVED = [{"version": version} for version in "123"]
EDITS: dict[str, st.SearchStrategy[Any]] = {
    "gates": st.sampled_from([STRICT, STRICT, LOOSE, None]),
    "source": st.one_of(st.just({"type": "Alias", "alias": "staging"}), VERSIONS.map(back_to)),
    "approval": st.sampled_from([*[None] * 6, {}, {}, *APPROVED]),
    "soakSeconds": st.sampled_from([0, 0, 60]),
    "rollbackTo": st.sampled_from([*[None] * 6, PREVIOUS, PREVIOUS, *map(back_to, ("1", "3", "7"))]),
    "onDrift": st.sampled_from(["Repair", "Warn", "Adopt"]),
    "suspend": st.sampled_from([False, False, True]),
}
EDIT = st.sampled_from(sorted(EDITS)).flatmap(
    lambda part: st.tuples(st.just("edit"), st.fixed_dictionaries({part: EDITS[part]}))
)
LOSSES = st.sampled_from([2.0, 2.0, 3.0, 4.5, 6.0, 11.0, float("nan")])
STEPS = st.one_of(
    st.tuples(st.just("register"), LOSSES, st.sampled_from(["d1", "d1", "d1", "d2", None])),
    st.tuples(st.just("stage"), VERSIONS),
    st.tuples(st.just("stage"), VERSIONS),
    st.tuples(st.just("approve")),
    st.tuples(st.just("approve")),
    st.tuples(st.just("seize"), VERSIONS),
    st.tuples(st.just("unset")),
    st.tuples(st.just("delete"), VERSIONS),
    EDIT,
    EDIT,
    st.tuples(st.just("wait"), st.sampled_from([1, 30, 120])),
    st.tuples(st.just("away"), st.booleans()),
    st.tuples(st.just("die"), st.integers(1, 12), st.booleans()),
    st.tuples(st.just("settle")),
    st.tuples(st.just("settle")),
)


# Two versions that STRICT lets through, one that no gate does and one that LOOSE does, and two that cannot be compared.
BEGIN: list[tuple[Any, ...]] = [
    ("register", 3.0, "d1"),
    ("register", 2.0, "d1"),
    ("register", 11.0, "d1"),
    ("register", 6.0, "d1"),
    ("register", 2.0, "d2"),
    ("register", float("nan"), "d1"),
    ("stage", "1"),
]


@dataclass
class Model:
    """What the registry went through, and what may be said of it."""

    first: Json
    world: World = field(default_factory=World)
    source_version: str | None = None
    """The version that the source names, and since when."""
    source_version_since: float = 0.0
    last_read: tuple[str | None, float] = (None, 0.0)
    """Both, at the last pass that surely read the source: the operator cannot know what changed back unseen."""
    passed: set[tuple[str, str]] = field(default_factory=set)
    """Versions that were promoted, each with the digest of the gates that it passed."""
    rightful: set[str | None] = field(default_factory=set)
    """Where the alias may be: where it was found, and where it was moved with good reason."""
    first_version: str | None = None
    """Where the alias was at the first look."""
    deleted: int = 0

    def __post_init__(self) -> None:
        self.world.submit(**self.first)
        self.world.registry.judge = self.judge

    @property
    def spec(self) -> ModelPromotionSpec:
        return ModelPromotionSpec.model_validate(
            self.world.kube.objects["ModelPromotion", "team", "champion"]["spec"]
        )

    def judge(self, version: str | None) -> None:
        """The moment before the operator writes the alias: is that move allowed, as things stand?"""
        status, spec = self.world.status(), self.spec
        move = status.move
        assert move is not None, "a move that was not journalled"
        assert (move.from_version, move.to_version) == (self.world.registry.aliases.get("champion"), version)
        assert not spec.suspend
        if move.reason != "Repaired":
            self.rightful.add(version)
        if move.reason == "Promoted":
            assert spec.rollback_to is None, "the source counts for nothing during a rollback"
            self._meets_gates(spec, str(version))
            if spec.approval:
                assert spec.approval.version == version, "nobody approved it"
            assert version == self.source_version
            assert self.world.seconds - self.source_version_since >= spec.soak_seconds, "it did not soak"
            self.passed.add((str(version), gates_digest(spec.gates)))
        elif move.reason == "Reverted":
            assert spec.rollback_to is None, "the source counts for nothing during a rollback"
            assert (version, gates_digest(spec.gates)) in self.passed
        elif move.reason == "RolledBack":
            assert spec.rollback_to
            assert spec.rollback_to.text in (version, "Previous")
        elif move.reason == "Repaired":
            assert version is not None, "a repair removes no alias"
            assert version == status.promoted
            assert spec.on_drift == "Repair" or spec.rollback_to
            assert spec.on_drift != "Warn"
            assert version in self.rightful | self.accepted(status)

    def _meets_gates(self, spec: ModelPromotionSpec, version: str) -> None:
        """An oracle of its own for the two sets of gates that occur here."""
        registry = self.world.registry
        candidate = registry.versions[version]
        if not spec.gates:
            return
        strict = len(spec.gates) == len(STRICT)
        assert candidate.metrics["loss"] <= (LIMIT if strict else 2 * LIMIT)
        holder = registry.versions.get(registry.aliases.get("champion", ""))
        if strict and holder:
            assert candidate.evaluated_on is not None
            assert candidate.evaluated_on == holder.evaluated_on
            assert candidate.metrics["loss"] <= holder.metrics["loss"] + TOLERANCE + 1e-6

    async def step(self, verb: str, *arguments: Any) -> None:
        """One thing that happens."""
        await getattr(self, verb)(*arguments)
        source, registry = self.spec.source, self.world.registry
        source_version = source.version or registry.aliases.get(source.alias or "")
        if source_version != self.source_version:
            version, since = self.last_read
            self.source_version, self.source_version_since = (
                source_version,
                since if source_version == version else self.world.seconds,
            )

    async def approve(self) -> None:
        """A person approves what waits."""
        if self.spec.approval and self.source_version:
            self.world.edit(approval={"version": self.source_version})

    async def register(self, loss: float, data: str | None) -> None:
        number = str(len(self.world.registry.versions) + self.deleted + 1)
        self.world.registry.add(number, data, loss=loss)

    async def stage(self, version: str) -> None:
        if version in self.world.registry.versions:
            self.world.registry.aliases["staging"] = version

    async def seize(self, version: str) -> None:
        """Somebody moves the alias by hand; not where a move that is under way begins or ends: nobody could tell."""
        if version in self.world.registry.versions and version not in self._ends():
            self.world.registry.aliases["champion"] = version

    async def unset(self) -> None:
        if None not in self._ends():
            self.world.registry.aliases.pop("champion", None)

    def _ends(self) -> set[str | None]:
        """Where a move that is under way, or was given up, begins and ends."""
        status = self.world.status()
        moves = [move for move in (status.move, status.abandoned) if move]
        return {end for move in moves for end in (move.from_version, move.to_version)}

    async def delete(self, version: str) -> None:
        move = self.world.status().move
        if version in self.world.registry.versions and move is None:
            self.world.registry.delete(version)
            self.deleted += 1

    async def edit(self, parts: Json) -> None:
        self.world.edit(**parts)

    async def wait(self, seconds: int) -> None:
        self.world.seconds += seconds

    async def away(self, is_away: bool) -> None:
        self.world.registry.problem = AWAY if is_away else None

    async def look(self, passes: int) -> None:
        for _ in range(passes):
            await self._pass()

    async def _pass(self) -> None:
        self.world.seconds += 5
        self._find()
        before = self.world.status().history
        killed = False
        try:
            await self.world.operator.look("champion")
        except KilledError:
            killed = True
            self.world.restart()
        self._check_new(before)
        if self.world.status().phase == "Refused" or self._is_undecided():
            # A version must pass throughout its soak.
            self.source_version_since = self.world.seconds
        if not killed:
            self._see()

    def _is_undecided(self) -> bool:
        """Whether a gate cannot be judged yet, also while the registry is away."""
        reason, _ = self.world.says("Promoted") or ("", "")
        return self.world.status().phase == "Pending" and reason == ConditionReason.GATE_INCONCLUSIVE

    def _see(self) -> None:
        """A pass is over: if nothing kept the operator from it, it read the source."""
        spec = self.spec
        if not (spec.suspend or spec.rollback_to or self.world.registry.problem):
            self.last_read = self.source_version, self.source_version_since

    def _check_new(self, before: list[Move]) -> None:
        """A pass that wrote a rollback, or a move by hand that stays, into the history was asked for one."""
        status = self.world.status()
        for move in status.history[: len(status.history) - len(before)]:
            if move.reason == "RolledBack":
                assert self.spec.rollback_to
                assert self.spec.rollback_to.text in (move.to_version, "Previous")
            if move.reason == "Adopted":
                deleted = any(item.reason == "VersionDeleted" for item in status.history)
                assert self.spec.on_drift == "Adopt" or deleted, "a move by hand that nobody adopts"

    def _find(self) -> None:
        """What is there at the first look is where things start."""
        if self.world.status().watch_start_time is None:
            self.first_version = self.world.registry.aliases.get("champion")
            self.rightful.add(self.first_version)

    async def die(self, writes: int, before: bool) -> None:
        """The operator will die at a write that comes soon."""
        self.world.writes.kill_soon(writes, before=before)

    async def settle(self) -> None:
        """Everything comes to rest, and the status says what is so."""
        self.world.writes.spare()
        self.world.registry.problem = None
        self.world.restart()
        self._find()
        await self.world.settle(rounds=60)
        self._see()
        self.check_at_rest(self.world.status())

    @staticmethod
    def accepted(status: ModelPromotionStatus) -> set[str | None]:
        """Where a hand, or the deletion of its version, left the alias, and a person's spec agrees."""
        reasons = ("Adopted", "VersionDeleted", "RolledBack")
        return {move.to_version for move in status.history if move.reason in reasons}

    async def promote_at_last(self) -> None:
        """A version that meets everything is promoted in the end, whatever happened before."""
        await self.settle()
        self.world.edit(suspend=None, rollbackTo=None, onDrift="Adopt")
        await self.settle()
        await self.register(1.0, "d1")
        best = max(self.world.registry.versions, key=int)
        parts: Json = {
            "source": {"type": "Version", "version": best},
            "gates": LOOSE,
            "soakSeconds": 60,
            "onDrift": "Repair",
        }
        self.world.edit(**parts, approval={"version": best})
        self.source_version, self.source_version_since = best, self.world.seconds
        await self.settle()
        self.world.seconds += 60
        await self.settle()
        status = self.world.status()
        assert (status.phase, status.promoted) == ("Promoted", best)
        assert self.world.registry.aliases["champion"] == best

    def check_at_rest(self, status: ModelPromotionStatus) -> None:
        champion = self.world.registry.aliases.get("champion")
        assert status.current == champion
        assert status.move is None
        spec = self.spec
        rollback = status.rollback
        requested = spec.rollback_to.text if spec.rollback_to else None
        target = rollback.version if rollback and rollback.requested == requested else None
        if target in self.world.registry.versions and not spec.suspend and not self.world.holds("Drifted"):
            assert (self.world.phase_and_reason(), champion) == ("Promoted: RolledBack", target), (
                "a rollback that was not made"
            )
        asked_for = {status.rollback.version} if status.rollback else set()
        if status.phase == "Promoted":
            assert status.promoted == champion
            assert champion in self.rightful | self.accepted(status) | asked_for
        assert status.previous in {None} | self.rightful | self.accepted(status) | asked_for
        is_rolled_back = self.world.phase_and_reason() == "Promoted: RolledBack"
        if status.phase == "Promoted" and not is_rolled_back and status.gates and not status.withheld:
            assert status.gates.version == champion
        if status.phase == "Blocked" and self.world.holds("Drifted"):
            assert spec.on_drift == "Warn" or status.promoted is None, "a drift that was not repaired"
        if is_rolled_back:
            assert champion == (status.rollback.version if status.rollback else None)
        if status.phase == "Promoted":
            last = next(
                (move.to_version for move in status.history if move.reason != "Overtaken"), self.first_version
            )
            assert champion == last, "a move, by the promotion or by hand, that history does not have"
        if len(status.history) < 20:
            history = iter([move.to_version for move in reversed(status.history)])
            moved_to = [version for alias, version in self.world.registry.moves if alias == "champion"]
            assert all(version in history for version in moved_to), "a move that history does not have"


SPECS = st.fixed_dictionaries(
    {part: EDITS[part] for part in ("gates", "approval", "onDrift", "soakSeconds", "rollbackTo")}
)
# Each thing that happens, and how many passes follow it.
SEQUENCES = st.lists(st.tuples(STEPS, st.integers(0, 4)), min_size=6, max_size=30)


def check(spec: Json, steps: list[tuple[tuple[Any, ...], int]]) -> None:
    """Let it all happen to a promotion, and demand that the next good version is promoted."""

    async def all_of_it() -> None:
        model = Model(spec)
        for step in BEGIN:
            await model.step(*step)
        for step, passes in steps:
            await model.step(*step)
            await model.look(passes)
        await model.promote_at_last()

    asyncio.run(all_of_it())
