"""Which versions the aliases of a job point at, as a workspace of Unity Catalog answers over HTTP."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Hashable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import FineTuneJobStatus
from finetune_operator.errors import Problem
from finetune_operator.finetunejob.model import AliasVersion, FineTuneJob
from finetune_operator.finetunejob.observe.alias_versions import AliasVersionReader
from finetune_operator.finetunejob.observe.run_poller import RunPoller, find_place
from finetune_operator.kube import KubeError
from finetune_operator.registry.base import RegisteredModel
from finetune_operator.registry.mlflow import MlflowRegistry
from finetune_operator.registry.outages import Outages
from finetune_operator.settings import Settings
from fixtures.fake_databricks import Workspace
from fixtures.fake_kube import StandIn
from fixtures.operator_in_memory.decisions import ACCEPTED, SETTINGS, condition, ftj, status
from fixtures.operator_in_memory.reads import wait_for_answers

MODEL = "main.llm.support"
TRACKING = {"uri": "databricks", "secretRef": {"name": "databricks"}}
REFUSED = condition(ConditionType.ACCEPTED, "False", ConditionReason.INVALID_SPEC)
OF_MODELS = "/api/2.1/unity-catalog/models/"


@dataclass
class World:
    """A reader, the workspace that it asks, and a clock that the test moves."""

    workspace: Workspace
    kube: StandIn = field(default_factory=StandIn)
    clock: float = 0.0

    def __post_init__(self) -> None:
        settings, pace = Settings(), wait_for_answers(lambda: self.clock)
        poller = RunPoller(self.kube, settings, pace)
        self.reader = AliasVersionReader(poller, settings, pace)
        data = {
            name: base64.b64encode(value.encode()).decode() for name, value in self.workspace.secret.items()
        }
        self.kube.keep({"kind": "Secret", "metadata": {"name": "databricks"}, "data": data})
        for number in (1, 2):
            self.workspace.add_version(MODEL, number)
        self.workspace.set_alias(MODEL, "champion", 2)

    def asked(self) -> list[str]:
        """The models that the workspace was asked for."""
        return [
            path.removeprefix(OF_MODELS) for _, path in self.workspace.asked if path.startswith(OF_MODELS)
        ]


def job(base: str = f"models:/{MODEL}@champion", teacher: str = "", **tracking: Any) -> FineTuneJob:
    parts: dict[str, Any] = {"model": {"base": base}, "tracking": TRACKING | tracking}
    if teacher:
        parts["objective"] = {"type": "Distillation", "distillation": {"teacher": teacher}}
    return ftj(status(ACCEPTED), **parts)


async def test_aliases_of_both_models(databricks: Workspace) -> None:
    answer = await World(databricks).reader.read(job(teacher=f"models:/{MODEL}@staging"))
    assert answer == {"base": AliasVersion(exists=True, version="2"), "teacher": AliasVersion(exists=True)}


async def test_a_model_that_does_not_exist(databricks: Workspace) -> None:
    answer = await World(databricks).reader.read(job("models:/main.llm.other@champion"))
    assert answer == {"base": AliasVersion(exists=False)}


async def test_the_registry_is_asked_once_in_a_poll_interval(databricks: Workspace) -> None:
    world = World(databricks)
    for seconds in (0.0, 1.0, 60.0):
        world.clock = seconds
        await world.reader.read(job())
    assert world.asked() == [MODEL, MODEL]


async def test_jobs_that_wait_for_one_model_share_the_answer(databricks: Workspace) -> None:
    world = World(databricks)
    uids = [f"uid-{number}" for number in range(5)]
    answers = await asyncio.gather(*(world.reader.read(replace(job(), uid=uid)) for uid in uids))
    answer = await world.reader.read(replace(job(f"models:/{MODEL}@staging"), uid="one-more"))
    assert answers == [{"base": AliasVersion(exists=True, version="2")}] * 5
    assert (answer, world.asked()) == ({"base": AliasVersion(exists=True)}, [MODEL])


async def test_a_shared_read_does_not_wait_for_one_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MlflowRegistry, "model", lambda _, name: RegisteredModel(name, {"champion": "7"}))
    pace = wait_for_answers(lambda: 0.0)
    reader = AliasVersionReader(RunPoller(StandIn(), SETTINGS, pace), SETTINGS, pace)
    waits = ftj(status(ACCEPTED), model={"base": "models:/support@champion"})
    async with AsyncExitStack() as stack:
        for _ in range(pace.threads.per_namespace):
            await stack.enter_async_context(pace.threads.turn("slow", "another server"))
        first = asyncio.create_task(reader.read(replace(waits, namespace="slow", uid="uid-1")))
        await asyncio.sleep(0)
        answer = await asyncio.wait_for(reader.read(waits), 5)
        assert answer == {"base": AliasVersion(exists=True, version="7")}
    assert await first == answer


async def test_jobs_with_other_credentials_do_not(databricks: Workspace) -> None:
    world = World(databricks)
    await world.reader.read(job())
    answer = await world.reader.read(replace(job(), namespace="other"))
    message = (
        "Secret databricks of spec.tracking.secretRef does not exist in namespace other: create the Secret"
    )
    assert answer == {"base": AliasVersion(problem=Problem(ConditionReason.CREDENTIALS_MISSING, message))}


async def test_an_api_server_that_is_away_is_asked_again_by_the_next_pass(databricks: Workspace) -> None:
    world = World(databricks)
    world.kube.refuse["get", "Secret"] = KubeError(0, "away")
    with pytest.raises(KubeError):
        await world.reader.read(job())
    world.kube.refuse.clear()
    assert await world.reader.read(job()) == {"base": AliasVersion(exists=True, version="2")}


async def test_a_version_is_not_asked_for(databricks: Workspace) -> None:
    world = World(databricks)
    assert await world.reader.read(job(f"models:/{MODEL}/2")) == {}
    assert world.asked() == []


async def test_credentials_that_are_missing_are_a_problem(databricks: Workspace) -> None:
    answer = await World(databricks).reader.read(job(secretRef={"name": "other"}))
    message = "Secret other of spec.tracking.secretRef does not exist in namespace team: create the Secret"
    assert answer == {"base": AliasVersion(problem=Problem(ConditionReason.CREDENTIALS_MISSING, message))}


async def test_a_workspace_that_refuses_is_a_problem(databricks: Workspace) -> None:
    databricks.denied = {f"GET {OF_MODELS}{MODEL}"}
    answer = await World(databricks).reader.read(job())
    assert answer["base"].problem
    assert answer["base"].problem.reason == ConditionReason.DATABRICKS_FORBIDDEN


async def test_without_a_server_nobody_is_asked(databricks: Workspace) -> None:
    waits = ftj(status(ACCEPTED), model={"base": "models:/support@champion"})
    assert await World(databricks).reader.read(waits) == {}


@pytest.mark.parametrize("registry", [status(), status(REFUSED)], ids=["not judged", "refused"])
async def test_nobody_is_asked_about_a_job_that_is_not_accepted(
    databricks: Workspace, registry: FineTuneJobStatus
) -> None:
    world = World(databricks)
    assert await world.reader.read(replace(job(), status=registry)) == {}
    assert (world.asked(), world.kube.asked) == ([], [])


@dataclass
class Watched(Outages):
    """Outages that know which threads look at them."""

    threads: set[int] = field(default_factory=set)

    def of(self, server: Hashable) -> Problem | None:
        self.threads.add(threading.get_ident())
        return super().of(server)

    def note(self, server: Hashable, problem: Problem) -> None:
        self.threads.add(threading.get_ident())
        super().note(server, problem)


async def test_a_registry_that_is_away_is_left_alone_and_says_nothing_of_the_server_of_others() -> None:
    settings = Settings(tracking_uri="http://mlflow.platform:5000")
    pace = wait_for_answers(lambda: 0.0)
    poller = RunPoller(StandIn(), settings, pace)
    poller.outages = watched = Watched(lambda: 0.0, 10)
    reader = AliasVersionReader(poller, settings, pace)
    usual = ftj(status(ACCEPTED), model={"base": "models:/support@champion"})
    odd = ftj(
        status(ACCEPTED),
        model={"base": "models:/m@champion"},
        tracking={"registryUri": "http://127.0.0.1:1"},
    )
    answer = await reader.read(odd)
    assert answer["base"].problem
    assert answer["base"].problem.reason == ConditionReason.MLFLOW_UNREACHABLE
    of_odd, of_usual = [await poller.tracked(each) for each in (odd, usual)]
    assert of_odd
    assert of_usual
    away, fine = [
        find_place(job, registry, registry.server.registry_uri)
        for job, registry in ((odd, of_odd), (usual, of_usual))
    ]
    assert poller.outages.of(away) == answer["base"].problem
    assert poller.outages.of(fine) is None
    # Another model of the same registry: nobody asks in vain again.
    again = await reader.read(
        ftj(
            status(ACCEPTED),
            model={"base": "models:/n@champion"},
            tracking={"registryUri": "http://127.0.0.1:1/"},
        )
    )
    assert again["base"].problem == answer["base"].problem
    assert watched.threads == {threading.get_ident()}
