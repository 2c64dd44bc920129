"""The run of a job is created or found, and closed if the job was deleted meanwhile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from finetune_operator.controller.store import Store
from finetune_operator.finetunejob.decision import ActionResult, EnsureRun
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.observe.run_creator import RunCreator
from finetune_operator.finetunejob.observe.run_poller import RunPoller
from finetune_operator.mlflow.model import Run
from finetune_operator.mlflow.runs import Server
from finetune_operator.settings import Settings
from fixtures.fake_kube import StandIn
from fixtures.operator_in_memory.decisions import NO_MLFLOW, SETTINGS, ftj
from fixtures.operator_in_memory.reads import wait_for_answers

ACTION = EnsureRun("team", "tune", {"b": "2", "a": "1"})


def do_nothing() -> None:
    """What happens during a creation by default."""


@dataclass
class World:
    """A creator, the store with its job, and an MLflow server.

    Attributes:
        during_creation: is called while the server creates a run.
        experiment_ids: the known ids of the experiments in which it was asked to create runs.
        closed: the runs that it was asked to close, with their status.
    """

    settings: Settings = SETTINGS
    seconds: float = 0.0
    during_creation: Callable[[], None] = do_nothing
    experiment_ids: list[str | None] = field(default_factory=list)
    closed: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = Store()
        self.store.put("FineTuneJob", body(ftj()))
        poller = RunPoller(StandIn(), self.settings, wait_for_answers(lambda: self.seconds))
        self.creator = RunCreator(poller, self.store, lambda: self.seconds)

    def ensure_run(
        self, _uid: str, _experiment: str, _name: str, _tags: object, experiment_id: str | None
    ) -> Run:
        self.experiment_ids.append(experiment_id)
        self.during_creation()
        return Run(f"run-{len(self.experiment_ids)}", "e1", "RUNNING")

    def finish_run(self, run_id: str, status: str) -> None:
        self.closed.append((run_id, status))


def body(job: FineTuneJob) -> dict[str, Mapping[str, str]]:
    return {
        "metadata": {"name": job.name, "namespace": job.namespace, "uid": job.uid, "resourceVersion": "7"}
    }


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(Server, "ensure_run", lambda _server, *arguments: world.ensure_run(*arguments))
    monkeypatch.setattr(Server, "finish_run", lambda _server, *arguments: world.finish_run(*arguments))
    return world


def created(number: int) -> ActionResult:
    return ActionResult(ACTION, run=Run(f"run-{number}", "e1", "RUNNING"), server="http://mlflow:5000")


async def test_a_run_is_created_for_each_request(world: World) -> None:
    assert [await world.creator.create(ftj(), ACTION) for _ in range(2)] == [created(1), created(2)]
    assert world.closed == []


async def test_the_id_of_an_experiment_is_used_again_for_a_minute(world: World) -> None:
    for world.seconds in (0.0, 1.0, 59.0, 60.0):
        await world.creator.create(ftj(), ACTION)
    await world.creator.create(ftj(), dataclasses.replace(ACTION, experiment="another"))
    assert world.experiment_ids == [None, "e1", "e1", None, None]


async def test_without_a_server_there_is_nothing_to_create() -> None:
    assert await World(NO_MLFLOW).creator.create(ftj(), ACTION) == ActionResult(ACTION)


DELETIONS: dict[str, list[FineTuneJob]] = {
    "deleted": [],
    "deleted and created again": [dataclasses.replace(ftj(), uid="u2")],
}


@pytest.mark.parametrize("next_jobs", DELETIONS.values(), ids=DELETIONS)
async def test_a_run_whose_job_was_deleted_during_its_creation_is_closed(
    world: World, next_jobs: list[FineTuneJob]
) -> None:
    def delete() -> None:
        world.store.replace("FineTuneJob", map(body, next_jobs), 8)

    world.during_creation = delete
    await world.creator.create(ftj(), ACTION)
    assert world.closed == [("run-1", "KILLED")]


async def test_whether_a_run_was_requested_is_known_until_the_job_is_deleted(world: World) -> None:
    assert not world.creator.forget(ftj())
    await world.creator.create(ftj(), ACTION)
    assert [world.creator.forget(ftj()) for _ in range(2)] == [True, False]
