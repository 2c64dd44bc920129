"""How long a pass waits for the run that it creates, and who gets a run that comes later."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.finetunejob.model import ActionResult, EnsureRun
from finetune_operator.finetunejob.observe.run_creator import RunCreator
from finetune_operator.finetunejob.observe.run_poller import RunPoller
from finetune_operator.mlflow.model import Run
from finetune_operator.mlflow.runs import Server
from fixtures.fake_kube import StandIn
from fixtures.operator_in_memory.decisions import NO_MLFLOW, SETTINGS, ftj
from fixtures.operator_in_memory.reads import wait_for_answers

ACTION = EnsureRun("team", "tune", {"b": "2", "a": "1"})
PENDING = ActionResult(ACTION, pending_seconds=0.0)
TIMEOUT_SECONDS = 10.0


@dataclass
class SlowMlflow:
    """An MLflow server that answers only when it may.

    Attributes:
        uids: of the jobs whose runs it was asked to create.
        experiment_ids: the known ids of the experiments of these runs.
        problem: its answer, in place of a run.
    """

    uids: list[str] = field(default_factory=list)
    experiment_ids: list[str | None] = field(default_factory=list)
    may_answer: threading.Event = field(default_factory=threading.Event)
    problem: Problem | None = None

    def ensure_run(
        self, uid: str, _experiment: str, _name: str, _tags: object, experiment_id: str | None
    ) -> Run:
        self.uids.append(uid)
        self.experiment_ids.append(experiment_id)
        self.may_answer.wait(TIMEOUT_SECONDS)
        if self.problem:
            raise ExternalError(self.problem)
        return Run(f"run-{len(self.uids)}", "e1", "RUNNING")


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowMlflow]:
    server = SlowMlflow()
    monkeypatch.setattr(Server, "ensure_run", lambda _server, *arguments: server.ensure_run(*arguments))
    yield server
    server.may_answer.set()


@dataclass
class World:
    """A creator, and the passes that it queues."""

    patience_seconds: float = 0.01
    woken: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        pace = wait_for_answers(lambda: self.seconds, self._wake)
        pace.patience_seconds = self.patience_seconds
        self.creator = RunCreator(RunPoller(StandIn(), SETTINGS, pace), pace)

    def _wake(self, key: str, *, is_routine: bool) -> None:
        assert not is_routine
        self.woken.put_nowait(key)


def created(number: int) -> ActionResult:
    return ActionResult(ACTION, run=Run(f"run-{number}", "e1", "RUNNING"), server="http://mlflow:5000")


async def test_a_pass_gets_the_run_of_a_fast_server(mlflow: SlowMlflow) -> None:
    mlflow.may_answer.set()
    world = World(TIMEOUT_SECONDS)
    assert await world.creator.create(ftj(), ACTION) == created(1)
    # A pass that requests the run again, for example because it was deleted, gets another answer.
    assert await world.creator.create(ftj(), ACTION) == created(2)
    assert world.woken.empty()


async def test_a_later_pass_gets_the_run_of_a_slow_server(mlflow: SlowMlflow) -> None:
    world = World()
    for world.seconds in (0.0, 3.0):
        pending = ActionResult(ACTION, pending_seconds=world.seconds)
        assert await world.creator.create(ftj(), ACTION) == pending
    mlflow.may_answer.set()
    assert await asyncio.wait_for(world.woken.get(), TIMEOUT_SECONDS) == "team/tune"
    assert await world.creator.create(ftj(), ACTION) == created(1)
    assert len(mlflow.uids) == 1


async def test_a_pass_with_other_tags_begins_no_creation_beside_another(mlflow: SlowMlflow) -> None:
    """For example, the uid of the namespace is a tag only if the namespace can be read."""
    world = World()
    assert await world.creator.create(ftj(), ACTION) == PENDING
    other_tags = dataclasses.replace(ACTION, tags={"b": "2"})
    pending = ActionResult(other_tags, pending_seconds=0.0)
    assert await world.creator.create(ftj(), other_tags) == pending
    mlflow.may_answer.set()
    await asyncio.wait_for(world.woken.get(), TIMEOUT_SECONDS)
    assert len(mlflow.uids) == 1


async def test_a_later_pass_gets_the_error_of_a_slow_server(mlflow: SlowMlflow) -> None:
    world = World()
    assert await world.creator.create(ftj(), ACTION) == PENDING
    mlflow.problem = Problem(ConditionReason.MLFLOW_UNREACHABLE, "away")
    mlflow.may_answer.set()
    await asyncio.wait_for(world.woken.get(), TIMEOUT_SECONDS)
    with pytest.raises(ExternalError, match="away"):
        await world.creator.create(ftj(), ACTION)


@pytest.mark.usefixtures("mlflow")
async def test_while_a_server_is_slow_no_other_pass_waits_for_it() -> None:
    world = World()
    assert await world.creator.create(ftj(), ACTION) == PENDING
    # With this patience, a pass that waited would end the test.
    world.creator.pace.patience_seconds = 2 * TIMEOUT_SECONDS
    other_job = dataclasses.replace(ftj(), name="other", uid="u2")
    async with asyncio.timeout(TIMEOUT_SECONDS / 2):
        assert await world.creator.create(other_job, ACTION) == PENDING


async def test_the_id_of_an_experiment_is_used_again_for_a_minute(mlflow: SlowMlflow) -> None:
    mlflow.may_answer.set()
    world = World(TIMEOUT_SECONDS)
    for world.seconds in (0.0, 1.0, 59.0, 60.0):
        await world.creator.create(ftj(), ACTION)
    await world.creator.create(ftj(), dataclasses.replace(ACTION, experiment="another"))
    assert mlflow.experiment_ids == [None, "e1", "e1", None, None]


async def test_nothing_is_kept_of_a_deleted_job(mlflow: SlowMlflow) -> None:
    world = World()
    assert await world.creator.create(ftj(), ACTION) == PENDING
    world.creator.forget(ftj())
    mlflow.may_answer.set()
    await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=TIMEOUT_SECONDS)
    creations = world.creator._creations
    assert (creations._outcomes, creations._reads, world.creator._began_at) == ({}, {}, {})


async def test_without_a_server_there_is_nothing_to_create() -> None:
    pace = wait_for_answers(lambda: 0.0)
    creator = RunCreator(RunPoller(StandIn(), NO_MLFLOW, pace), pace)
    assert await creator.create(ftj(), ACTION) == ActionResult(ACTION)
