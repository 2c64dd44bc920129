"""Whatever happens to a promotion with an endpoint, in whatever order: what holds when everything is at rest."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from finetune_crds.promotion_status import ModelPromotionStatus, Move
from standins.databricks import Workspace, running
from worlds.memory.promotions import PREVIOUS, KilledError, back_to
from worlds.memory.serving import ALIASES, GATE, MODEL, STEPS, Databricks

Json = dict[str, Any]
GOOD, BAD = 0.001, 0.5
_SECONDS_OF_A_STEP = min(step["durationSeconds"] for step in STEPS)
VERSIONS = st.integers(1, 3).map(str)
# Most that can go wrong does so during a canary.
BEGIN: list[tuple[Any, ...]] = [("stage", "1"), ("settle",), ("stage", "2"), ("wait", 1)]
EDITS: dict[str, st.SearchStrategy[Any]] = {
    "rollbackTo": st.one_of(st.none(), st.just(PREVIOUS), VERSIONS.map(back_to)),
    "onDrift": st.sampled_from(["Repair", "Warn", "Adopt"]),
}
# What happens often comes often.
STEPS_OF_THE_WORLD = st.one_of(
    st.tuples(st.just("stage"), VERSIONS),
    st.tuples(st.just("stage"), VERSIONS),
    st.tuples(st.just("judge"), VERSIONS, st.sampled_from([GOOD, BAD, BAD])),
    st.tuples(st.just("seize"), VERSIONS),
    st.tuples(st.just("refuse"), st.booleans()),
    st.tuples(st.just("spoil"), st.one_of(st.none(), VERSIONS)),
    st.sampled_from(sorted(EDITS)).flatmap(
        lambda part: st.tuples(st.just("edit"), st.fixed_dictionaries({part: EDITS[part]}))
    ),
    st.tuples(st.just("wait"), st.sampled_from([1, 11])),
    st.tuples(st.just("wait"), st.sampled_from([1, 11])),
    st.tuples(st.just("die"), st.integers(1, 8), st.booleans()),
    st.tuples(st.just("settle")),
)


@dataclass
class Model:
    """What the workspace went through, and what may be said of it."""

    state: Workspace
    on_drift: str
    failed: set[str | None] = field(default_factory=set)
    """Versions that were taken back from, and that nobody has asked for since."""
    proved: set[str | None] = field(default_factory=set)
    """Versions that had all of the traffic."""
    shares: dict[str, tuple[int, float]] = field(default_factory=dict)
    """The share of the traffic that a version has, in percent, and since when."""
    history_before: list[Move] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world = Databricks(self.state, canary={"steps": STEPS, "gates": [GATE]})
        self.world.edit(onDrift=self.on_drift)

    async def step(self, verb: str, *arguments: Any) -> None:
        """One thing that happens, and three passes after it."""
        await getattr(self, verb)(*arguments)
        for _ in range(3):
            await self.look()

    async def look(self) -> None:
        self.world.seconds += 5
        try:
            await self.world.operator.look("champion")
        except KilledError:
            self.world.restart()
        self._read_history()
        self._read_shares()

    def _read_shares(self) -> None:
        """A version that never had all of the traffic has each share for its minutes before it gets the next one."""
        shares, now = self.shares, self.world.seconds
        self.shares = {}
        for version, percent in self.routes.items():
            before, since = shares.get(version, (0, now))
            if percent > before > 0 and version not in self.proved:
                assert now - since >= _SECONDS_OF_A_STEP, "a step that was too short"
            self.shares[version] = percent, since if percent == before else now
        self.proved |= {version for version, percent in self.routes.items() if percent == 100}

    def _read_history(self) -> None:
        history = self.world.status().history
        new = next(
            count
            for count in range(len(history) + 1)
            if history[count:] == self.history_before[: len(history) - count]
        )
        for move in reversed(history[:new]):
            if move.reason == "Withdrawn":
                self.failed.add(move.from_version)
                assert move.to_version in self.proved, (
                    "back at a version that never came to the end of its canary"
                )
            elif move.reason in ("RolledBack", "Adopted"):
                self.failed.discard(move.to_version)
            elif move.reason in ("Promoted", "Reverted"):
                assert move.to_version not in self.failed, (
                    "what failed is tried again, and nobody asked for it"
                )
        self.history_before = history

    async def stage(self, version: str) -> None:
        """The source names a version; asked for anew, it has its own chance."""
        if self.state.models[MODEL].aliases.get("staging") != int(version):
            self.failed.discard(version)
        self.state.set_alias(MODEL, "staging", int(version))

    async def judge(self, version: str, errors: float) -> None:
        self.state.add_version(MODEL, int(version), {"error_rate": errors})

    async def seize(self, version: str) -> None:
        """Somebody moves the alias by hand; not where a move that is under way begins or ends: nobody could tell."""
        move = self.world.status().move
        if version not in ((move.from_version, move.to_version) if move else ()):
            self.state.set_alias(MODEL, "champion", int(version))

    async def refuse(self, refused: bool) -> None:
        self.state.denied = {f"PUT {ALIASES}"} if refused else set()

    async def spoil(self, version: str | None) -> None:
        """A version cannot be deployed from now on; not one that is served, or that the endpoint may go back to."""
        serving = self.world.status().serving
        saved = {route.version for route in (serving.saved if serving else None) or []}
        spared = saved | set(self.routes)
        self.state.endpoints.broken = {version: "no machine"} if version and version not in spared else {}

    async def edit(self, parts: Json) -> None:
        self.world.edit(**parts)

    async def wait(self, minutes: int) -> None:
        self.world.seconds += 60 * minutes

    async def die(self, writes: int, before: bool) -> None:
        """The operator will die at a write that comes soon."""
        self.world.writes.kill_soon(writes, before=before)

    async def settle(self) -> None:
        """Everything comes to rest, and the status says what is so."""
        self.world.writes.spare()
        self.state.denied, self.state.endpoints.broken = set(), {}
        self.world.restart()
        await self.world.settle(rounds=60)
        await self.look()
        self.check_at_rest(self.world.status())

    @property
    def routes(self) -> dict[str, int]:
        """Who gets how much of the traffic in truth."""
        return self.state.endpoints.routes("support") if "support" in self.state.endpoints.held else {}

    @property
    def holder(self) -> str | None:
        champion = self.state.models[MODEL].aliases.get("champion")
        return None if champion is None else str(champion)

    def check_at_rest(self, status: ModelPromotionStatus) -> None:
        assert (status.current, status.move) == (self.holder, None)
        if status.phase == "Promoted":
            assert (status.promoted, self.routes) == (self.holder, {self.holder: 100})
        serving = status.serving
        if serving and serving.step and serving.version:
            errors = self.world.state.runs[f"run-{MODEL}-{serving.version}"].data
            assert errors
            assert [metric.value for metric in errors.metrics or []] == [GOOD], (
                "a canary that should have failed"
            )
        asked_for = status.rollback.version if status.rollback else None
        failed = self.failed - {asked_for}
        assert not failed & set(self.routes), "what failed has traffic"
        if not self.world.holds("Drifted"):
            assert self.holder not in failed, "what failed has the alias"
            assert not self.routes or self.holder in self.routes, (
                "the alias stays where the endpoint went back"
            )

    async def promote_at_last(self) -> None:
        """A good version is promoted and served in the end, whatever happened before."""
        await self.settle()
        await self.edit({"rollbackTo": None, "onDrift": "Adopt"})
        await self.settle()
        await self.judge("4", GOOD)
        await self.step("stage", "4")
        for _ in STEPS:
            await self.settle()
            await self.wait(11)
        await self.settle()
        assert (self.world.status().phase, self.holder, self.routes) == ("Promoted", "4", {"4": 100})


SEQUENCES = st.lists(STEPS_OF_THE_WORLD, min_size=2, max_size=12)


def check(on_drift: str, steps: list[tuple[Any, ...]]) -> None:
    """Let it all happen to a promotion with an endpoint, and demand that the next good version is served."""

    async def all_of_it() -> None:
        with running() as state:
            model = Model(state, on_drift)
            for step in [*BEGIN, *steps]:
                await model.step(*step)
            await model.promote_at_last()

    asyncio.run(all_of_it())
