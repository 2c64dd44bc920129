"""Which passes there are: those that watches and passes themselves ask for, with one list at the beginning alone.

No pass relies on an event about the status that it wrote, and none comes of one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.modelpromotion import enqueue
from fixtures.fake_databricks import Workspace, running
from fixtures.operator_in_memory.promotions import Json, World
from fixtures.operator_in_memory.serving import GATE, MODEL, STEPS, Databricks
from unit.operator.modelpromotion.test_promotion_faults import STORIES, Story, outcome

# Far less than any test needs that does not go round in circles.
MOST = 200


class Watch:
    """The operator of a world as it runs: its queue, and a watch that delivers after each pass what changed."""

    def __init__(self, world: World) -> None:
        self.there, self.passes = world, 0
        self.told: dict[tuple[str, str, str], Json] = {}
        world.settle = self.settle  # type: ignore[method-assign]

    def deliver(self) -> None:
        operator, notified = self.there.operator, self.told
        operator.reconciler.applier.moved = self.moved
        now = {key: body for key, body in self.there.kube.objects.items() if key[0] == "ModelPromotion"}
        for key in notified.keys() - now.keys():
            enqueue.on_event(operator.store, operator.queue, "DELETED", notified[key])
        for key, body in now.items():
            if notified.get(key, {}).get("metadata") != body["metadata"]:
                enqueue.on_event(operator.store, operator.queue, "MODIFIED", body)
        self.told = now

    def moved(self, model: str) -> None:
        enqueue.on_model(self.there.operator.store, self.there.operator.queue, model)

    async def run(self, seconds: int) -> None:
        """All keys that are due in this time, second by second."""
        for tick in range(seconds + 1):
            self.there.seconds += bool(tick)
            self.deliver()
            while (key := await self._due()) is not None:
                self.passes += 1
                assert self.passes < MOST, f"it goes round in circles: {self.there.writes.log[-8:]}"
                await self.there.operator.reconciler.handle(key)
                self.there.operator.queue.done(key)
                self.deliver()

    async def _due(self) -> str | None:
        """The next key, unless time has to pass first."""
        taking = asyncio.create_task(self.there.operator.queue.take())
        await asyncio.sleep(0)
        if taking.done():
            return taking.result()
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        return None

    async def settle(self, **_: object) -> None:
        """One list, and as long as it takes at most for the endpoint to be changed and changed back."""
        self.passes = 0
        self.there.seconds += self.there.settings.poll_seconds
        for name in self.there.names():
            self.there.operator.queue.add(f"team/{name}")
        await self.run(100)


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
async def test_every_step_is_asked_for(story: Story) -> None:
    undisturbed, simulation = World(), World()
    await story(undisturbed)
    Watch(simulation)
    await story(simulation)
    assert outcome(simulation) == outcome(undisturbed)


async def test_an_alias_that_was_moved_is_news_to_those_that_follow_it() -> None:
    simulation = World()
    simulation.registry.add("1")
    simulation.registry.aliases["candidate"] = "1"
    simulation.submit("staging", source={"type": "Alias", "alias": "candidate"})
    simulation.submit("champion")
    simulation.submit("live", source={"type": "Alias", "alias": "champion"})
    Watch(simulation)
    await simulation.settle()
    names = ("candidate", "staging", "champion", "live")
    assert simulation.registry.aliases == dict.fromkeys(names, "1")


@pytest.fixture
def state() -> Iterator[Workspace]:
    with running() as workspace:
        yield workspace


async def test_every_step_of_an_endpoint_is_asked_for(state: Workspace) -> None:
    simulation = Databricks(state, canary={"steps": STEPS, "gates": [GATE]})
    watch = Watch(simulation)
    await simulation.stage(1)
    assert simulation.now == ("Promoted", {"staging": 1, "champion": 1}, {"1": 100})
    await simulation.stage(2)
    assert simulation.now == ("Promoting", {"staging": 2, "champion": 2}, {"2": 10, "1": 90})
    watch.passes = 0
    await watch.run(700)
    assert simulation.now == ("Promoting", {"staging": 2, "champion": 2}, {"2": 50, "1": 50})
    state.add_version(MODEL, 2, {"error_rate": 0.2})
    await simulation.settle()
    assert simulation.now == ("Refused", {"staging": 2, "champion": 1}, {"1": 100})


def numbered(reason: ConditionReason) -> Callable[[], Problem]:
    """A problem in other words each time."""
    count = 0

    def problem() -> Problem:
        nonlocal count
        count += 1
        return Problem(reason, f"denied to request {count}")

    return problem


async def at_rest() -> tuple[World, Watch]:
    """A promotion whose first version has the alias, just before the second one is to have it."""
    simulation = World()
    for version in ("1", "2"):
        simulation.registry.add(version)
    simulation.registry.aliases["staging"] = "1"
    simulation.submit()
    watch = Watch(simulation)
    await simulation.settle()
    simulation.registry.aliases["staging"] = "2"
    return simulation, watch


async def test_a_registry_that_answers_in_other_words_each_time_is_asked_in_peace() -> None:
    simulation, watch = await at_rest()
    problem = numbered(ConditionReason.DATABRICKS_FORBIDDEN)

    def refuse() -> None:
        simulation.registry.problem = problem()

    simulation.registry.before_reading = refuse
    await simulation.settle()
    # A poll is 5 s, and longer the longer the registry is away.
    assert 3 < watch.passes <= 21


async def test_a_move_that_is_refused_in_other_words_each_time_is_tried_less_and_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation, watch = await at_rest()
    problem = numbered(ConditionReason.DATABRICKS_FORBIDDEN)

    def refuse(*_: object) -> None:
        raise ExternalError(problem())

    monkeypatch.setattr(simulation.registry, "set_alias", refuse)
    await simulation.settle()
    # After 0.5, 1, 2, 4, 8, 16 and 32 s.
    assert 6 < watch.passes <= 12
    monkeypatch.undo()
    await simulation.settle()
    assert (simulation.status().phase, simulation.registry.aliases["champion"]) == ("Promoted", "2")


async def test_a_promotion_at_rest_is_read_once_per_resync_interval() -> None:
    simulation, watch = await at_rest()
    await simulation.settle()
    watch.passes = 0
    await watch.run(int(3 * simulation.settings.resync_seconds))
    assert 3 <= watch.passes <= 4
