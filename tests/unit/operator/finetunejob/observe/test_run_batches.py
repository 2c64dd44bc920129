"""Reads of runs that come together are one search, and searches keep a distance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.finetunejob.observe.run_batches import RunBatches
from finetune_operator.mlflow.model import Run
from finetune_operator.mlflow.runs import Server

SERVER, OTHER = Server("http://a", "http://a"), Server("http://b", "http://b")


@dataclass
class World:
    """Searches that wait for `answer`, and a clock that sleeping moves."""

    clock: float = 100.0
    searches: list[tuple[float, list[str]]] = field(default_factory=list)
    answer: asyncio.Event = field(default_factory=asyncio.Event)
    problem: Problem | None = None

    def __post_init__(self) -> None:
        self.batches = RunBatches(lambda: self.clock)

    async def search(self, ask: Callable[[], Mapping[str, Run]]) -> Mapping[str, Run]:
        runs = ask()
        self.searches.append((round(self.clock - 100, 3), sorted(runs)))
        await self.answer.wait()
        if self.problem:
            raise ExternalError(self.problem)
        return {run_id: run for run_id, run in runs.items() if run_id != "gone"}

    async def read(self, run_id: str, server: Server = SERVER) -> str | None:
        run = await self.batches.find_run(server, run_id, "e1", self.search)
        return run.run_id if run else None


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    batches = World()
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        batches.clock += seconds
        await real_sleep(0)

    def find_runs(_server: Server, experiments: Mapping[str, str]) -> dict[str, Run]:
        return {run_id: Run(run_id, experiment, "RUNNING") for run_id, experiment in experiments.items()}

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(Server, "find_runs", find_runs)
    return batches


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_reads_that_come_during_a_search_are_the_next_one(world: World) -> None:
    reads = [asyncio.create_task(world.read("r0"))]
    await settle()
    reads += [asyncio.create_task(world.read(run_id)) for run_id in ("r1", "gone", "r2", "r1")]
    reads.append(asyncio.create_task(world.read("r9", OTHER)))
    await settle()
    assert world.searches == [(0.0, ["r0"]), (0.0, ["r9"])]
    world.answer.set()
    assert await asyncio.gather(*reads) == ["r0", "r1", None, "r2", "r1", "r9"]
    assert world.searches[2:] == [(0.2, ["gone", "r1", "r2"])]
    assert await world.read("r3") == "r3"
    assert world.searches[3:] == [(0.4, ["r3"])]
    assert (world.batches._collecting, world.batches._last) == ({}, {})


async def test_two_thousand_reads_are_twenty_searches_in_four_seconds(world: World) -> None:
    world.answer.set()
    await asyncio.gather(*(world.read(f"r{number}") for number in range(2000)))
    assert [(at, len(run_ids)) for at, run_ids in world.searches] == [
        (round(0.2 * number, 3), 100) for number in range(20)
    ]


async def test_a_search_that_fails_fails_every_read_of_it_and_no_other(world: World) -> None:
    world.problem = Problem(ConditionReason.MLFLOW_UNREACHABLE, "away")
    reads = [asyncio.create_task(world.read(f"r{number}")) for number in range(3)]
    await settle()
    reads[0].cancel()
    world.answer.set()
    outcomes = await asyncio.gather(*reads, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError, ExternalError, ExternalError]
    world.problem = None
    assert await world.read("r5") == "r5"
