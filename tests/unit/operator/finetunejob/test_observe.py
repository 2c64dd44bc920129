"""What exists of a job: the store first, the API server and MLflow where it does not suffice."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import FineTuneJobStatus, MlflowStatus
from finetune_operator.controller.store import Store
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.finetunejob import observe as module
from finetune_operator.finetunejob.children import owner
from finetune_operator.finetunejob.model import FineTuneJob, Mlflow
from finetune_operator.finetunejob.observe import FineTuneJobObserver, read_finetunejob
from finetune_operator.kube import KubeError
from finetune_operator.mlflow.host import Credentials
from finetune_operator.mlflow.model import Run
from finetune_operator.mlflow.runs import Server
from finetune_operator.settings import Settings
from standins.kube import StandIn
from unit.operator.finetunejob.decide.make import (
    FAILED,
    NO_MLFLOW,
    PREPARED,
    SETTINGS,
    SUCCEEDED,
    TRAINED,
    child,
    condition,
    ended,
    job,
    later,
    pod,
    running,
    status,
    tracked,
)

Json = dict[str, Any]
JOB = "tune-train-1"


@dataclass
class World:
    """An observer, what it stands on, and a clock that moves when told."""

    kube: StandIn = field(default_factory=StandIn)
    store: Store = field(default_factory=lambda: Store(owner))
    settings: Settings = NO_MLFLOW
    clock: float = 0.0

    def __post_init__(self) -> None:
        self.observer = FineTuneJobObserver(self.kube, self.store, self.settings, clock=lambda: self.clock)

    def know(self, kind: str, body: Json, version: int = 1) -> None:
        meta: Json = {
            "namespace": "team",
            "resourceVersion": str(version),
            "creationTimestamp": "2026-08-01T12:00:00Z",
        }
        meta = meta | body["metadata"]
        self.store.put(kind, {"spec": {"parallelism": 2}, **body, "kind": kind, "metadata": meta})

    def exists(self, kind: str, body: Json) -> None:
        self.kube.keep({**body, "kind": kind})


READ: dict[str, tuple[Json, tuple[str | None, str | None]]] = {
    "a spec": ({"spec": {"model": {"base": "/m"}, "data": {"columns": {"text": "t"}}}}, ("/m", None)),
    "a part missing": (
        {"spec": {"model": {"base": "/m"}}},
        (None, "spec.data: Field required"),
    ),
    "no spec": ({}, (None, "spec.model: Field required")),
}


@pytest.mark.parametrize(("body", "expected"), READ.values(), ids=READ)
def test_read_job(body: Json, expected: tuple[str | None, str | None]) -> None:
    meta = {"name": "tune", "namespace": "team", "uid": "u", "resourceVersion": "7", "generation": 3}
    found = read_finetunejob({"metadata": meta, **body})
    assert (found.spec and found.spec.model.base, found.invalid) == expected
    assert (found.key, found.uid, found.version, found.generation) == ("team/tune", "u", "7", 3)


async def test_children_come_from_the_store_without_a_call() -> None:
    world = World()
    world.know("Job", child(JOB))
    world.know("Pod", pod(JOB, 0))
    world.know("Pod", pod(JOB, 1))
    seen = await world.observer.observe(job(running()), later(60))
    assert set(seen.jobs) == {JOB}
    assert [item["metadata"]["name"] for item in seen.pods] == [
        "tune-train-1-0-abcde",
        "tune-train-1-1-abcde",
    ]
    assert (seen.mlflow, seen.rejections, world.kube.asked) == (None, {}, [])


async def test_the_end_of_a_child_is_judged_by_its_pods_as_they_are() -> None:
    world = World()
    world.know("Job", child(JOB, "Failed"))
    world.know("Pod", pod(JOB, 0))
    world.exists("Pod", ended(JOB, 0, 64))
    seen = await world.observer.observe(job(running()), later(60))
    assert [item["status"]["phase"] for item in seen.pods] == ["Failed"]
    assert world.kube.asked == [("list", "Pod", f"batch.kubernetes.io/controller-uid=uid-of-{JOB}")]


READ_ALREADY: dict[str, tuple[FineTuneJobStatus, str]] = {
    "of an attempt that was trained": (status(PREPARED, TRAINED, attempt=1), JOB),
    "of an earlier attempt": (running(attempt=2), JOB),
    "of a preparation": (running(), "tune-prep"),
    "of a job that has failed": (status(FAILED, attempt=1), JOB),
    "of a job that has succeeded": (status(SUCCEEDED, attempt=1), JOB),
}


@pytest.mark.parametrize(("before", "name"), READ_ALREADY.values(), ids=READ_ALREADY)
async def test_an_end_that_was_judged_is_not_asked_for_again(before: FineTuneJobStatus, name: str) -> None:
    world = World()
    world.know("Job", child(name, "Complete"))
    await world.observer.observe(job(before), later(60))
    assert world.kube.asked == []


def refusal(text: str, at: int) -> Json:
    stamp = later(at).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"metadata": {"name": f"e{at}"}, "message": text, "lastTimestamp": stamp}


REJECTED: dict[str, tuple[Json, int, int, dict[str, str]]] = {
    "no pod": (child(JOB), 0, 5, {JOB: f"pods of Job {JOB} cannot be created: exceeded quota"}),
    "some pods": (child(JOB), 1, 5, {JOB: f"pods of Job {JOB} cannot be created: exceeded quota"}),
    "all pods": (child(JOB), 2, 5, {}),
    "no pod yet": (child(JOB), 0, 4, {}),
    "a queued job": (child(JOB) | {"spec": {"parallelism": 2, "suspend": True}}, 0, 60, {}),
}


@pytest.mark.parametrize(("body", "count", "seconds", "expected"), REJECTED.values(), ids=REJECTED)
async def test_events_tell_why_pods_are_missing(
    body: Json, count: int, seconds: int, expected: dict[str, str]
) -> None:
    world = World()
    world.know("Job", body)
    for index in range(count):
        world.know("Pod", pod(JOB, index))
    for event in (refusal("exceeded quota", 3), refusal("an older word", 1)):
        world.exists("Event", event)
    seen = await world.observer.observe(job(running()), later(seconds))
    assert seen.rejections == expected
    selector = f"involvedObject.uid=uid-of-{JOB},reason=FailedCreate"
    assert world.kube.asked == ([("list", "Event", selector)] if expected else [])


async def test_events_that_cannot_be_read_do_not_end_the_pass() -> None:
    world = World()
    world.know("Job", child(JOB))
    world.kube.refuse["list", "Event"] = KubeError(403, "events is forbidden")
    assert (await world.observer.observe(job(running()), later(60))).rejections == {}


def secret(**values: str) -> Json:
    data = {name: base64.b64encode(value.encode()).decode() for name, value in values.items()}
    return {"kind": "Secret", "metadata": {"name": "mlflow"}, "data": data}


def with_secret(optional: bool = False) -> FineTuneJob:
    return job(tracking={"secretRef": {"name": "mlflow", "optional": optional}})


async def test_a_jobs_server_has_its_own_credentials() -> None:
    world = World(StandIn(secret(MLFLOW_TRACKING_TOKEN="t")), settings=SETTINGS)
    uri = "http://mlflow:5000"
    assert await world.observer.server(with_secret()) == Server(uri, uri, Credentials(token="t"))
    assert await world.observer.server(job()) == Server(uri, uri)
    assert await World().observer.server(job()) is None


async def test_credentials_that_cannot_be_had_are_a_condition() -> None:
    seen = await World(settings=SETTINGS).observer.observe(with_secret(), later(0))
    message = "Secret mlflow of spec.tracking.secretRef does not exist in namespace team: create it"
    assert seen.mlflow == Mlflow(problem=Problem(ConditionReason.CREDENTIALS_MISSING, message))


async def test_a_secret_may_be_optional() -> None:
    server = await World(settings=SETTINGS).observer.server(with_secret(optional=True))
    assert server == Server("http://mlflow:5000", "http://mlflow:5000")


async def test_an_api_server_that_is_away_is_no_word_of_mlflow() -> None:
    world = World(settings=SETTINGS)
    world.kube.refuse["get", "Secret"] = KubeError(0, "away")
    with pytest.raises(KubeError):
        await world.observer.observe(with_secret(), later(0))


@dataclass
class Asked:
    """Takes the place of the calls to MLflow, which test_tracking drives."""

    answer: Mlflow
    questions: list[tuple[str, str | None, bool]] = field(default_factory=list)

    def __call__(self, server: Server, found: FineTuneJob, want_version: bool) -> Mlflow:
        known = found.status.mlflow.run_id if found.status.mlflow else None
        self.questions.append((server.uri, known, want_version))
        return self.answer


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    found = Asked(tracked())
    monkeypatch.setattr(module, "_ask", found)
    return found


RUN = MlflowStatus(experiment_id="e1", run_id="r1")
CLOSED = condition(ConditionType.TRACKED, "True", ConditionReason.RUN_FINISHED)
QUESTIONS: dict[str, tuple[FineTuneJob, tuple[str | None, bool] | None]] = {
    "the run, by the job's uid": (job(), (None, False)),
    "the run, by its id": (job(running(mlflow=RUN)), ("r1", False)),
    "the version, once trained": (
        job(status(PREPARED, TRAINED, mlflow=RUN), register={"model": "m"}),
        ("r1", True),
    ),
    "no version where none is wanted": (job(status(PREPARED, TRAINED, mlflow=RUN)), ("r1", False)),
    "whether it is closed": (job(status(SUCCEEDED, mlflow=RUN)), ("r1", False)),
    "nothing once it is": (job(status(SUCCEEDED, CLOSED, mlflow=RUN)), None),
    "nothing of a job that failed without a run": (job(status(FAILED)), None),
}


@pytest.mark.parametrize(("found", "expected"), QUESTIONS.values(), ids=QUESTIONS)
async def test_mlflow_is_asked_what_is_not_known(
    asked: Asked, found: FineTuneJob, expected: tuple[str | None, bool] | None
) -> None:
    await World(settings=SETTINGS).observer.observe(found, later(0))
    assert asked.questions == ([("http://mlflow:5000", *expected)] if expected else [])


async def test_the_same_question_is_asked_once_in_a_while(asked: Asked) -> None:
    world = World(settings=SETTINGS)
    for seconds in (0.0, 1.0, 3.9, 4.0, 5.0):
        world.clock = seconds
        assert (await world.observer.observe(job(), later(0))).mlflow == tracked()
    assert len(asked.questions) == 2
    await world.observer.observe(job(running(mlflow=RUN)), later(0))
    assert len(asked.questions) == 3
    world.observer.forget(job())
    await world.observer.observe(job(running(mlflow=RUN)), later(0))
    assert len(asked.questions) == 4


async def test_nothing_is_kept_of_a_job_that_is_over(asked: Asked) -> None:
    world = World(settings=SETTINGS)
    await world.observer.observe(job(running(mlflow=RUN)), later(0))
    await world.observer.observe(job(status(SUCCEEDED, CLOSED, mlflow=RUN)), later(0))
    assert world.observer._asked == {}


async def test_a_server_that_is_away_is_not_waited_for_by_every_job(asked: Asked) -> None:
    world = World(settings=SETTINGS)
    asked.answer = Mlflow(problem=Problem(ConditionReason.MLFLOW_UNREACHABLE, "away"))
    other = read_finetunejob(
        {
            "metadata": {"name": "other", "namespace": "team", "uid": "u2", "resourceVersion": "1"},
            "spec": {"model": {"base": "/m"}, "data": {"columns": {"text": "t"}}},
        }
    )
    assert (await world.observer.observe(job(), later(0))).mlflow == asked.answer
    assert (await world.observer.observe(other, later(0))).mlflow == asked.answer
    assert len(asked.questions) == 1
    world.clock, asked.answer = 5.0, Mlflow(run=Run("r2", "e1", "RUNNING"))
    assert (await world.observer.observe(other, later(0))).mlflow == asked.answer
    assert world.observer._down == {}


def test_a_tracking_error_carries_its_problem() -> None:
    problem = Problem(ConditionReason.MLFLOW_ERROR, "no")
    assert (ExternalError(problem).problem, str(ExternalError(problem))) == (problem, "no")


def promotion(name: str = "prod", *, deleting: bool = False, **spec: Any) -> Json:
    meta = {"deletionTimestamp": "2026-08-01T12:00:00Z"} if deleting else {}
    return {
        "metadata": {"name": name, **meta},
        "spec": {"model": "tuned", "alias": "champion"} | spec,
        "status": says(Accepted="True", RegistryReady="True"),
    }


def says(promoted: str | None = None, **conditions: str) -> Json:
    return {
        "promoted": promoted,
        "conditions": [{"type": kind, "status": status} for kind, status in conditions.items()],
    }


OWNED: dict[str, tuple[list[Json], Json]] = {
    "none": ([], {}),
    "one": ([promotion()], {"champion": "team/prod"}),
    "the first of two": ([promotion("b"), promotion("a")], {"champion": "team/a"}),
    "of another model": ([promotion(model="other")], {}),
    "of another registry": ([promotion(tracking={"registryUri": "http://other"})], {}),
    "of the same registry, written otherwise": (
        [promotion(tracking={"uri": "http://MLflow:5000/"})],
        {"champion": "team/prod"},
    ),
    "on its way out": ([promotion(deleting=True)], {}),
    "that nobody looked at yet": ([promotion() | {"status": {}}], {}),
    "that is refused": ([promotion() | {"status": says("1", Accepted="False", RegistryReady="True")}], {}),
    "that never got at the registry": (
        [promotion() | {"status": says(Accepted="True", RegistryReady="False")}],
        {},
    ),
    "that cannot get at the registry now": (
        [promotion() | {"status": says("1", Accepted="True", RegistryReady="False")}],
        {"champion": "team/prod"},
    ),
    "without a spec": ([{"metadata": {"name": "prod"}}], {}),
}


@pytest.mark.parametrize(("promotions", "expected"), OWNED.values(), ids=OWNED)
async def test_aliases_that_promotions_keep(promotions: list[Json], expected: Json) -> None:
    world = World(settings=SETTINGS)
    for body in promotions:
        world.know("ModelPromotion", body)
    assert world.observer._owned(job(register={"model": "tuned"})) == expected


def test_a_job_that_registers_nothing_shares_no_alias() -> None:
    world = World(settings=SETTINGS)
    world.know("ModelPromotion", promotion())
    assert world.observer._owned(job()) == {}
