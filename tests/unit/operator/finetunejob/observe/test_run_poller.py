"""Requests to MLflow about a job: which ones, how often, and with which credentials."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import MlflowStatus, Pinned
from finetune_crds.tracking import Tracking
from finetune_operator.defaults import Defaults
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.finetunejob.model import FineTuneJob, Mlflow
from finetune_operator.finetunejob.observe import run_poller
from finetune_operator.finetunejob.observe.observer import read_finetunejob
from finetune_operator.finetunejob.observe.run_poller import RunPoller, find_place, find_turn
from finetune_operator.kube import KubeError
from finetune_operator.mlflow.client import Credentials
from finetune_operator.mlflow.model import Run
from finetune_operator.mlflow.runs import Server
from finetune_operator.registry.mlflow import MlflowRegistry
from finetune_operator.registry.tracked import Tracked
from finetune_operator.settings import Settings
from fixtures.fake_databricks import Workspace
from fixtures.fake_kube import StandIn
from fixtures.operator_in_memory.decisions import (
    FAILED,
    NO_MLFLOW,
    PREPARED,
    SETTINGS,
    SUCCEEDED,
    TRAINED,
    condition,
    ftj,
    running,
    status,
    tracked,
)
from fixtures.operator_in_memory.reads import wait_for_answers

Json = dict[str, Any]


@dataclass
class World:
    """A poller, and a clock that the test moves."""

    kube: StandIn = field(default_factory=StandIn)
    settings: Settings = SETTINGS
    clock: float = 0.0

    def __post_init__(self) -> None:
        self.poller = RunPoller(self.kube, self.settings, wait_for_answers(lambda: self.clock))


def secret(**values: str) -> Json:
    data = {name: base64.b64encode(value.encode()).decode() for name, value in values.items()}
    return {"kind": "Secret", "metadata": {"name": "mlflow"}, "data": data}


NOT_CREATED = condition(ConditionType.TRACKED, "False", ConditionReason.MLFLOW_UNREACHABLE)


def without_run(*, pinned: Pinned | None = None, **spec: Any) -> FineTuneJob:
    """A job whose run could not be created, so that it may have one."""
    return ftj(status(NOT_CREATED, pinned=pinned), **spec)


def with_secret(optional: bool = False) -> FineTuneJob:
    return without_run(tracking={"secretRef": {"name": "mlflow", "optional": optional}})


async def test_a_jobs_server_has_its_own_credentials() -> None:
    world = World(StandIn(secret(MLFLOW_TRACKING_TOKEN="t")))
    uri = "http://mlflow:5000"
    assert await world.poller.tracked(with_secret()) == Tracked(Server(uri, uri, Credentials(token="t")))
    assert await world.poller.tracked(ftj()) == Tracked(Server(uri, uri))
    assert await World(settings=NO_MLFLOW).poller.tracked(ftj()) is None


async def test_an_mlflow_server_is_opened_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "to_thread", None)
    assert await World().poller.tracked(ftj()) == Tracked(Server("http://mlflow:5000", "http://mlflow:5000"))


async def test_credentials_that_cannot_be_read_are_reported() -> None:
    mlflow = await World().poller.poll(with_secret())
    message = "Secret mlflow of spec.tracking.secretRef does not exist in namespace team: create the Secret"
    assert mlflow == Mlflow(problem=Problem(ConditionReason.CREDENTIALS_MISSING, message))


async def test_a_secret_may_be_optional() -> None:
    tracked = await World().poller.tracked(with_secret(optional=True))
    assert tracked == Tracked(Server("http://mlflow:5000", "http://mlflow:5000"))


async def test_an_unreachable_api_server_is_not_reported_as_a_problem_of_mlflow() -> None:
    world = World()
    world.kube.refuse["get", "Secret"] = KubeError(0, "away")
    with pytest.raises(KubeError):
        await world.poller.poll(with_secret())


@dataclass
class Asked:
    """Takes the place of the calls to MLflow, which test_tracking drives.

    Attributes:
        problems: of an address, and of a token.
        questions: the address, the id of the run, and whether the version was asked for too.
        registries: the addresses that a version was asked of.
    """

    problems: dict[str, Problem] = field(default_factory=dict)
    run: Run | None = field(default_factory=lambda: tracked().run)
    questions: list[tuple[str, str | None, bool]] = field(default_factory=list)
    registries: list[str] = field(default_factory=list)

    def find_run(self, server: Server, _uid: str, _experiment: str, run_id: str | None = None) -> Run | None:
        self.questions.append((server.uri, run_id, False))
        self._check(server.uri, server.credentials)
        return self.run

    def find_version(self, registry: MlflowRegistry, *_: object) -> None:
        self.questions[-1] = (*self.questions[-1][:2], True)
        self.registries.append(registry.registry_uri)
        self._check(registry.registry_uri, registry.credentials)

    def _check(self, uri: str, login: Credentials) -> None:
        problem = self.problems.get(uri) or self.problems.get(login.token)
        if problem:
            raise ExternalError(problem)


@pytest.fixture
def mlflow_queries(monkeypatch: pytest.MonkeyPatch) -> Asked:
    found = Asked()

    def find_run(server: Server, *given: Any) -> Run | None:
        return found.find_run(server, *given)

    def find_runs(server: Server, experiments: Mapping[str, str]) -> dict[str, Run | None]:
        return {run_id: found.find_run(server, "", "", run_id) for run_id in experiments}

    def find_version(registry: MlflowRegistry, *given: Any) -> None:
        found.find_version(registry, *given)

    monkeypatch.setattr(Server, "find_run", find_run)
    monkeypatch.setattr(Server, "find_runs", find_runs)
    monkeypatch.setattr(MlflowRegistry, "find_version", find_version)
    return found


RUN = MlflowStatus(experiment_id="e1", run_id="r1")
CLOSED = condition(ConditionType.TRACKED, "True", ConditionReason.RUN_FINISHED)
WAITS = without_run(model={"base": "models:/m@champion"})
QUESTIONS: dict[str, tuple[FineTuneJob, tuple[str | None, bool] | None]] = {
    "the run, by the job's uid": (without_run(), (None, False)),
    "nothing before the run was requested": (ftj(), None),
    "the run, by its id": (ftj(running(mlflow=RUN)), ("r1", False)),
    "the version, once trained": (
        ftj(status(PREPARED, TRAINED, mlflow=RUN), register={"model": "m"}),
        ("r1", True),
    ),
    "no version of a job that registers none": (ftj(status(PREPARED, TRAINED, mlflow=RUN)), ("r1", False)),
    "whether it is closed": (ftj(status(SUCCEEDED, mlflow=RUN)), ("r1", False)),
    "nothing once it is": (ftj(status(SUCCEEDED, CLOSED, mlflow=RUN)), None),
    "nothing before its model is known, since it has no run": (WAITS, None),
    "nothing either while such a job is suspended": (
        without_run(model={"base": "models:/m@champion"}, suspend=True),
        None,
    ),
    "the run of a job whose model is known": (
        without_run(pinned=Pinned(base="models:/m/3"), model={"base": "models:/m/3"}),
        (None, False),
    ),
    "nothing of a job that failed without a run": (ftj(status(FAILED)), None),
}


@pytest.mark.parametrize(("ftj", "expected"), QUESTIONS.values(), ids=QUESTIONS)
async def test_mlflow_is_asked_what_is_not_known(
    mlflow_queries: Asked, ftj: FineTuneJob, expected: tuple[str | None, bool] | None
) -> None:
    await World().poller.poll(ftj)
    assert mlflow_queries.questions == ([("http://mlflow:5000", *expected)] if expected else [])


async def test_mlflow_is_not_asked_about_a_suspended_job_without_pods(mlflow_queries: Asked) -> None:
    world, suspended = World(), ftj(running(mlflow=RUN), suspend=True)
    assert await world.poller.poll(suspended, has_pods=False) is None
    assert mlflow_queries.questions == []
    assert await world.poller.poll(suspended, has_pods=True) == tracked()
    assert await world.poller.poll(ftj(running(mlflow=RUN)), has_pods=False) == tracked()


async def test_a_run_that_the_search_does_not_find_is_asked_for_alone(
    mlflow_queries: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be deleted, which a person can undo, or be replaced by a run of the job."""
    monkeypatch.setattr(Server, "find_runs", lambda _server, _experiments: {})
    assert await World().poller.poll(ftj(running(mlflow=RUN))) == tracked()
    assert mlflow_queries.questions == [("http://mlflow:5000", "r1", False)]


async def test_a_question_is_repeated_after_the_poll_interval(mlflow_queries: Asked) -> None:
    world = World()
    for seconds in (0.0, 1.0, 3.9, 4.0, 5.0):
        world.clock = seconds
        assert await world.poller.poll(without_run()) == tracked()
    assert len(mlflow_queries.questions) == 2
    await world.poller.poll(ftj(running(mlflow=RUN)))
    assert len(mlflow_queries.questions) == 3
    world.poller.forget(ftj())
    await world.poller.poll(ftj(running(mlflow=RUN)))
    assert len(mlflow_queries.questions) == 4


async def test_a_finished_job_is_forgotten(mlflow_queries: Asked) -> None:
    world = World()
    await world.poller.poll(ftj(running(mlflow=RUN)))
    await world.poller.poll(ftj(status(SUCCEEDED, CLOSED, mlflow=RUN)))
    assert (world.poller._reads._outcomes, world.poller._reads._reads) == ({}, {})


URI = "http://mlflow:5000"
AWAY = Problem(ConditionReason.MLFLOW_UNREACHABLE, "away")


async def test_a_server_that_is_away_is_not_waited_for_by_every_job(mlflow_queries: Asked) -> None:
    world = World()
    mlflow_queries.problems[URI] = AWAY
    other_job = read_finetunejob(
        {
            "metadata": {"name": "other", "namespace": "team", "uid": "u2", "resourceVersion": "1"},
            "spec": {"model": {"base": "/m"}, "data": {"columns": {"type": "Text", "text": "t"}}},
            "status": status(NOT_CREATED).to_json(),
        },
        Defaults(),
    )
    assert await world.poller.poll(without_run()) == Mlflow(problem=AWAY)
    assert await world.poller.poll(other_job) == Mlflow(problem=AWAY)
    assert len(mlflow_queries.questions) == 1
    world.clock, mlflow_queries.problems, mlflow_queries.run = 5.0, {}, Run("r2", "e1", "RUNNING")
    assert await world.poller.poll(other_job) == Mlflow(run=mlflow_queries.run)


def of_team(number: int, **tracking: Any) -> FineTuneJob:
    """A job of a namespace of its own, with a Secret of its own."""
    job = without_run(tracking={"secretRef": {"name": "mlflow"}} | tracking)
    return dataclasses.replace(job, uid=f"u{number}", namespace=f"team-{number}")


def two_teams() -> World:
    world = World()
    for number in (1, 2):
        secret_body = secret(MLFLOW_TRACKING_TOKEN=f"token-{number}")
        secret_body["metadata"]["namespace"] = f"team-{number}"
        world.kube.keep(secret_body)
    return world


async def test_a_server_that_is_away_is_asked_once_whatever_the_secret(mlflow_queries: Asked) -> None:
    world = two_teams()
    mlflow_queries.problems[URI] = AWAY
    for job in (of_team(1), of_team(2), of_team(2, uri=f"{URI}/"), without_run()):
        assert await world.poller.poll(job) == Mlflow(problem=AWAY)
        world.poller.forget(job)
    assert mlflow_queries.questions == [(URI, None, False)]


async def test_a_refused_login_concerns_one_secret(mlflow_queries: Asked) -> None:
    world = two_teams()
    refused = Problem(ConditionReason.MLFLOW_FORBIDDEN, "no")
    mlflow_queries.problems["token-1"] = refused
    assert await world.poller.poll(of_team(1)) == Mlflow(problem=refused)
    assert await world.poller.poll(of_team(2)) == tracked()
    assert len(mlflow_queries.questions) == 2


@pytest.mark.parametrize("token", ["to\nken", "t" * 2**20], ids=["a line break", "too long"])
async def test_a_token_that_cannot_be_sent_concerns_one_secret(token: str) -> None:
    settings = dataclasses.replace(SETTINGS, tracking_uri="http://127.0.0.1:1")
    world = World(StandIn(secret(MLFLOW_TRACKING_TOKEN=token)), settings)
    mlflow = await world.poller.poll(with_secret())
    assert mlflow
    assert mlflow.problem
    assert mlflow.problem.reason == ConditionReason.CREDENTIALS_UNREADABLE
    other_job = await world.poller.poll(dataclasses.replace(without_run(), uid="u2"))
    assert other_job
    assert other_job.problem
    assert other_job.problem.reason == ConditionReason.MLFLOW_UNREACHABLE


async def test_an_unreachable_registry_is_asked_once_and_the_server_still_is_asked(
    mlflow_queries: Asked,
) -> None:
    world, registry = World(), "http://10.255.255.1:1"
    mlflow_queries.problems[registry] = away = dataclasses.replace(AWAY, message=f"MLflow at {registry}")
    trained = status(PREPARED, TRAINED, mlflow=RUN)
    odd = ftj(trained, register={"model": "m"}, tracking={"registryUri": registry})
    assert await world.poller.poll(odd) == Mlflow(problem=away)
    assert await world.poller.poll(dataclasses.replace(odd, uid="u2")) == Mlflow(problem=away)
    usual = ftj(trained, register={"model": "m"})
    assert await world.poller.poll(dataclasses.replace(usual, uid="u3")) == tracked()
    assert mlflow_queries.registries == [registry, URI]


async def test_a_login_that_fails_is_not_repeated_by_every_job(monkeypatch: pytest.MonkeyPatch) -> None:
    world, refused = two_teams(), Problem(ConditionReason.DATABRICKS_FORBIDDEN, "no")
    attempts: list[str] = []

    def fail(_settings: Settings, _tracking: Tracking, login: Mapping[str, str] | None) -> Tracked | None:
        attempts.append((login or {})["MLFLOW_TRACKING_TOKEN"])
        raise ExternalError(refused)

    monkeypatch.setattr(run_poller, "open_tracked", fail)
    first, second = (of_team(number, uri="databricks") for number in (1, 2))
    jobs = [dataclasses.replace(first, uid=f"job-{number}") for number in range(64)]
    for job in [*jobs, second]:
        assert await world.poller.poll(job) == Mlflow(problem=refused)
    assert attempts == ["token-1", "token-2"]
    # A Secret that is corrected is used at once.
    corrected = secret(MLFLOW_TRACKING_TOKEN="token-3")
    corrected["metadata"]["namespace"] = "team-1"
    world.kube.keep(corrected)
    world.poller.forget(jobs[0])
    assert await world.poller.poll(jobs[0]) == Mlflow(problem=refused)
    assert attempts == ["token-1", "token-2", "token-3"]


async def test_two_logins_of_one_workspace_have_two_places(databricks: Workspace) -> None:
    # A login may go to a server that only one Secret names.
    world, uris = World(), {"uri": "databricks"}
    for number in (1, 2):
        secret_body = secret(**databricks.secret)
        secret_body["metadata"]["namespace"] = f"team-{number}"
        world.kube.keep(secret_body)
    places = []
    for number in (1, 2):
        job = of_team(number, **uris)
        mlflow = await world.poller.tracked(job)
        assert mlflow
        places.append(
            [find_place(job, mlflow, uri) for uri in (mlflow.server.uri, mlflow.server.registry_uri)]
        )
    (first, registry), (other_job, _) = places
    assert first == registry
    assert first != other_job


def test_a_tracking_error_carries_its_problem() -> None:
    problem = Problem(ConditionReason.MLFLOW_ERROR, "no")
    assert (ExternalError(problem).problem, str(ExternalError(problem))) == (problem, "no")


async def test_a_login_waits_for_the_turn_of_its_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    logins: list[str] = []

    async def log_in(_self: RunPoller, job: FineTuneJob) -> None:
        logins.append(job.uid)

    monkeypatch.setattr(RunPoller, "tracked", log_in)
    job = ftj(running(mlflow=RUN))
    turns = world.poller.pace.threads
    async with AsyncExitStack() as stack:
        for _ in range(turns.per_namespace):
            await stack.enter_async_context(turns.turn(job.namespace, "another server"))
        reading = asyncio.create_task(world.poller.poll(job))
        for _ in range(20):
            await asyncio.sleep(0)
        assert logins == []
    await asyncio.wait_for(reading, 5)
    assert logins == [job.uid]


# Whether a version was requested, the answer, and whether it is complete.
COMPLETE: dict[str, tuple[bool, Mlflow | None, bool]] = {
    "the run is there": (False, tracked(), True),
    "a version is waited for": (True, tracked(), False),
    "the run is gone": (False, Mlflow(), False),
    "MLflow is away": (False, Mlflow(problem=Problem(ConditionReason.MLFLOW_UNREACHABLE, "away")), False),
    "there is no server": (False, None, False),
}


@pytest.mark.parametrize(("includes_version", "mlflow", "expected"), COMPLETE.values(), ids=COMPLETE)
def test_an_answer_in_which_something_is_missing_is_not_complete(
    includes_version: bool, mlflow: Mlflow | None, expected: bool
) -> None:
    query = run_poller._Query("r1", includes_version=includes_version)
    assert run_poller._is_complete(query, mlflow) is expected


async def test_a_search_for_all_namespaces_does_not_wait_for_one_of_them(
    mlflow_queries: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first job of the batch has logged in, and then all turns of its namespace wait for another server."""
    world, leave = World(), asyncio.Event()
    turns = world.poller.pace.threads
    waiting: list[asyncio.Task[None]] = []

    async def wait_for_slow_server() -> None:
        async with turns.turn("slow", "another server"):
            await leave.wait()

    async def log_in(_self: RunPoller, job: FineTuneJob) -> Tracked:
        if job.namespace == "slow":
            waiting.extend(asyncio.create_task(wait_for_slow_server()) for _ in range(turns.per_namespace))
            await asyncio.sleep(0)
        return Tracked(Server(URI, URI))

    monkeypatch.setattr(RunPoller, "tracked", log_in)
    job = ftj(running(mlflow=RUN))
    first = asyncio.create_task(world.poller.poll(dataclasses.replace(job, namespace="slow", uid="u9")))
    for _ in range(10):
        await asyncio.sleep(0)
    assert await asyncio.wait_for(world.poller.poll(job), 5) == tracked()
    leave.set()
    assert await first == tracked()
    await asyncio.gather(*waiting)


TURNS: dict[str, tuple[Json, str]] = {
    "the installation's server": ({}, ""),
    "the same, by its address": ({"uri": URI}, ""),
    "a login of its own": ({"secretRef": {"name": "mlflow"}}, "team"),
    "a server of its own": ({"uri": "http://slow:5000"}, "team"),
    "a registry of its own": ({"registryUri": "http://slow:5000"}, "team"),
}


@pytest.mark.parametrize(("tracking", "expected"), TURNS.values(), ids=TURNS)
def test_only_reads_of_the_installations_server_wait_for_no_turn(tracking: Json, expected: str) -> None:
    assert find_turn(SETTINGS, ftj(tracking=tracking)) == expected
