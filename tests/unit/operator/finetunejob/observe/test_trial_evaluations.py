"""What MLflow is asked of the trials of a sweep with ASHA, and what an outage does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from finetune_crds.sweep import SweepStatus, Trial
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.observe.run_poller import RunPoller
from finetune_operator.finetunejob.observe.trial_evaluations import TrialEvaluationReader
from finetune_operator.settings import Settings
from fixtures.fake_kube import StandIn
from fixtures.operator_in_memory.decisions import ACCEPTED, FAILED, ftj, status
from fixtures.operator_in_memory.reads import wait_for_answers
from support.http_server import Answer, Request, serving

Json = dict[str, Any]
SWEEP: Json = {
    "algorithm": "ASHA",
    "trials": 2,
    "rungs": [10],
    "parameters": [{"field": "training.seed", "values": [1, 2]}],
}
MISSING = b'{"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no run"}'
HISTORY = b"""{"metrics": [
  {"key": "eval_loss", "value": 0.3, "timestamp": 30, "step": 10},
  {"key": "eval_loss", "value": "NaN", "timestamp": 40, "step": 20},
  {"key": "eval_loss", "value": 0.5, "timestamp": 10, "step": 10},
  {"key": "eval_loss", "value": 0.9, "timestamp": 0}
]}"""


@contextmanager
def mlflow(*answers: Answer) -> Iterator[tuple[str, list[str]]]:
    """The address of a server that gives these answers, the last one for ever, and what it was asked."""
    asked: list[str] = []

    def respond(request: Request) -> Answer:
        asked.append(request.target.partition("/mlflow/")[2])
        return answers[min(len(asked), len(answers)) - 1]

    with serving(respond) as uri:
        yield uri, asked


def job(uri: str, *trials: int) -> FineTuneJob:
    recorded = SweepStatus(trials=[Trial(n=number, parameters={}, phase="Training") for number in trials])
    return ftj(status(ACCEPTED, sweep=recorded), sweep=SWEEP, tracking={"uri": uri})


def children(*numbers: int, step: int = 10) -> dict[str, Json]:
    return {
        f"tune-{number}": {"status": {"progress": {"step": step}, "mlflow": {"runId": f"r{number}"}}}
        for number in numbers
    }


def reader(clock: list[float]) -> TrialEvaluationReader:
    settings, pace = Settings(), wait_for_answers(lambda: clock[0])
    return TrialEvaluationReader(RunPoller(StandIn(), settings, pace), settings, pace)


async def test_the_losses_of_a_trial_at_its_rung() -> None:
    with mlflow(Answer(200, HISTORY)) as (uri, asked):
        losses = await reader([0.0]).read(job(uri, 1, 2), children(1))
    assert repr(losses) == "{1: {0: 0.9, 10: 0.3, 20: nan}}"
    assert asked == ["metrics/get-history?run_id=r1&metric_key=eval_loss&max_results=1000"]


async def test_nothing_is_asked_before_a_rung() -> None:
    with mlflow(Answer(500, b"")) as (uri, asked):
        assert await reader([0.0]).read(job(uri, 1), children(1, step=9)) == {}
        assert asked == []


async def test_a_run_that_is_gone_has_no_losses() -> None:
    with mlflow(Answer(404, MISSING)) as (uri, _asked):
        assert await reader([0.0]).read(job(uri, 1), children(1)) == {1: {}}


async def test_after_an_outage_it_is_asked_again() -> None:
    clock = [0.0]
    with mlflow(Answer(400, b"no"), Answer(200, HISTORY)) as (uri, asked):
        losses = reader(clock)
        assert await losses.read(job(uri, 1), children(1)) == {}
        clock[0] = 3600.0
        assert [*await losses.read(job(uri, 1), children(1))] == [1]
        assert len(asked) == 2


async def test_a_run_that_is_refused_does_not_keep_the_others_from_being_read() -> None:
    with mlflow(Answer(400, b"no"), Answer(200, HISTORY)) as (uri, _asked):
        assert [*await reader([0.0]).read(job(uri, 1, 2), children(1, 2))] == [2]


async def test_a_finished_sweep_reads_nothing() -> None:
    with mlflow(Answer(200, HISTORY)) as (uri, asked):
        recorded = SweepStatus(trials=[Trial(n=1, parameters={}, phase="Training")])
        finished = ftj(status(ACCEPTED, FAILED, sweep=recorded), sweep=SWEEP, tracking={"uri": uri})
        assert await reader([0.0]).read(finished, children(1)) == {}
        assert asked == []
