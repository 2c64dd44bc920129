"""What MLflow is asked of a job, how often, and with which credentials."""

from __future__ import annotations

import base64
import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import MlflowStatus, Pinned
from finetune_operator.defaults import Defaults
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.finetunejob import polling as module
from finetune_operator.finetunejob.model import FineTuneJob, Mlflow
from finetune_operator.finetunejob.observe import read_finetunejob
from finetune_operator.finetunejob.polling import RunPoller
from finetune_operator.kube import KubeError
from finetune_operator.mlflow.host import Credentials
from finetune_operator.mlflow.model import Run
from finetune_operator.mlflow.runs import Server
from finetune_operator.registry.tracked import Tracked
from finetune_operator.settings import Settings
from standins.kube import StandIn
from worlds.memory.decisions import (
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

Json = dict[str, Any]


@dataclass
class World:
    """A poller, and a clock that moves when told."""

    kube: StandIn = field(default_factory=StandIn)
    settings: Settings = SETTINGS
    clock: float = 0.0

    def __post_init__(self) -> None:
        self.poller = RunPoller(self.kube, self.settings, clock=lambda: self.clock)


def secret(**values: str) -> Json:
    data = {name: base64.b64encode(value.encode()).decode() for name, value in values.items()}
    return {"kind": "Secret", "metadata": {"name": "mlflow"}, "data": data}


def with_secret(optional: bool = False) -> FineTuneJob:
    return ftj(tracking={"secretRef": {"name": "mlflow", "optional": optional}})


async def test_a_jobs_server_has_its_own_credentials() -> None:
    world = World(StandIn(secret(MLFLOW_TRACKING_TOKEN="t")))
    uri = "http://mlflow:5000"
    assert await world.poller.tracked(with_secret()) == Tracked(Server(uri, uri, Credentials(token="t")))
    assert await world.poller.tracked(ftj()) == Tracked(Server(uri, uri))
    assert await World(settings=NO_MLFLOW).poller.tracked(ftj()) is None


async def test_credentials_that_cannot_be_had_are_a_condition() -> None:
    seen = await World().poller.poll(with_secret())
    message = "Secret mlflow of spec.tracking.secretRef does not exist in namespace team: create it"
    assert seen == Mlflow(problem=Problem(ConditionReason.CREDENTIALS_MISSING, message))


async def test_a_secret_may_be_optional() -> None:
    tracked = await World().poller.tracked(with_secret(optional=True))
    assert tracked == Tracked(Server("http://mlflow:5000", "http://mlflow:5000"))


async def test_an_api_server_that_is_away_is_no_word_of_mlflow() -> None:
    world = World()
    world.kube.refuse["get", "Secret"] = KubeError(0, "away")
    with pytest.raises(KubeError):
        await world.poller.poll(with_secret())


@dataclass
class Asked:
    """Takes the place of the calls to MLflow, which test_tracking drives."""

    answer: Mlflow
    questions: list[tuple[str, str | None, bool]] = field(default_factory=list)

    def __call__(self, tracked: Tracked, ftj: FineTuneJob, want_version: bool) -> Mlflow:
        known = ftj.status.mlflow.run_id if ftj.status.mlflow else None
        self.questions.append((tracked.server.uri, known, want_version))
        return self.answer


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    found = Asked(tracked())
    monkeypatch.setattr(module, "_read", found)
    return found


RUN = MlflowStatus(experiment_id="e1", run_id="r1")
CLOSED = condition(ConditionType.TRACKED, "True", ConditionReason.RUN_FINISHED)
WAITS = ftj(model={"base": "models:/m@champion"})
QUESTIONS: dict[str, tuple[FineTuneJob, tuple[str | None, bool] | None]] = {
    "the run, by the job's uid": (ftj(), (None, False)),
    "the run, by its id": (ftj(running(mlflow=RUN)), ("r1", False)),
    "the version, once trained": (
        ftj(status(PREPARED, TRAINED, mlflow=RUN), register={"model": "m"}),
        ("r1", True),
    ),
    "no version where none is wanted": (ftj(status(PREPARED, TRAINED, mlflow=RUN)), ("r1", False)),
    "whether it is closed": (ftj(status(SUCCEEDED, mlflow=RUN)), ("r1", False)),
    "nothing once it is": (ftj(status(SUCCEEDED, CLOSED, mlflow=RUN)), None),
    "nothing before its model is known, since it has no run": (WAITS, None),
    "nothing either while such a job is suspended": (
        ftj(model={"base": "models:/m@champion"}, suspend=True),
        None,
    ),
    "the run of a job whose model is known": (
        ftj(status(pinned=Pinned(base="models:/m/3")), model={"base": "models:/m/3"}),
        (None, False),
    ),
    "nothing of a job that failed without a run": (ftj(status(FAILED)), None),
}


@pytest.mark.parametrize(("ftj", "expected"), QUESTIONS.values(), ids=QUESTIONS)
async def test_mlflow_is_asked_what_is_not_known(
    asked: Asked, ftj: FineTuneJob, expected: tuple[str | None, bool] | None
) -> None:
    await World().poller.poll(ftj)
    assert asked.questions == ([("http://mlflow:5000", *expected)] if expected else [])


async def test_the_same_question_is_asked_once_in_a_while(asked: Asked) -> None:
    world = World()
    for seconds in (0.0, 1.0, 3.9, 4.0, 5.0):
        world.clock = seconds
        assert await world.poller.poll(ftj()) == tracked()
    assert len(asked.questions) == 2
    await world.poller.poll(ftj(running(mlflow=RUN)))
    assert len(asked.questions) == 3
    world.poller.forget(ftj())
    await world.poller.poll(ftj(running(mlflow=RUN)))
    assert len(asked.questions) == 4


async def test_nothing_is_kept_of_a_job_that_is_over(asked: Asked) -> None:
    world = World()
    await world.poller.poll(ftj(running(mlflow=RUN)))
    await world.poller.poll(ftj(status(SUCCEEDED, CLOSED, mlflow=RUN)))
    assert world.poller._results == {}


async def test_a_server_that_is_away_is_not_waited_for_by_every_job(asked: Asked) -> None:
    world = World()
    asked.answer = Mlflow(problem=Problem(ConditionReason.MLFLOW_UNREACHABLE, "away"))
    other = read_finetunejob(
        {
            "metadata": {"name": "other", "namespace": "team", "uid": "u2", "resourceVersion": "1"},
            "spec": {"model": {"base": "/m"}, "data": {"columns": {"type": "Text", "text": "t"}}},
        },
        Defaults(),
    )
    assert await world.poller.poll(ftj()) == asked.answer
    assert await world.poller.poll(other) == asked.answer
    assert len(asked.questions) == 1
    world.clock, asked.answer = 5.0, Mlflow(run=Run("r2", "e1", "RUNNING"))
    assert await world.poller.poll(other) == asked.answer


ELSEWHERE: dict[str, Json] = {
    "another registry": {"registryUri": "http://10.255.255.1:1"},
    "another login": {"secretRef": {"name": "mlflow"}},
}


@pytest.mark.parametrize("tracking", ELSEWHERE.values(), ids=ELSEWHERE)
async def test_a_failure_of_one_says_nothing_of_those_who_ask_another_registry_or_with_another_login(
    asked: Asked, tracking: Json
) -> None:
    world = World(StandIn(secret(MLFLOW_TRACKING_TOKEN="t")))
    problem = Problem(ConditionReason.MLFLOW_UNREACHABLE, "MLflow at http://10.255.255.1:1 cannot be reached")
    asked.answer = Mlflow(problem=problem)
    odd = ftj(tracking=tracking)
    assert await world.poller.poll(odd) == asked.answer
    assert await world.poller.poll(dataclasses.replace(odd, uid="u2")) == asked.answer
    assert len(asked.questions) == 1
    asked.answer = tracked()
    assert await world.poller.poll(dataclasses.replace(ftj(), uid="u3")) == tracked()


def test_a_tracking_error_carries_its_problem() -> None:
    problem = Problem(ConditionReason.MLFLOW_ERROR, "no")
    assert (ExternalError(problem).problem, str(ExternalError(problem))) == (problem, "no")
