"""What a report says of the steps since the last one, and how time is accounted for."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

from finetune_crds import contract
from finetune_trainer.train.checkpoint.progress import Progress
from finetune_trainer.train.evaluator import Evaluation
from finetune_trainer.train.model.memory import speed
from finetune_trainer.train.objectives.dpo import Dpo
from finetune_trainer.train.reporter import Reporter
from support import networks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from finetune_trainer.train.model.network.trained_network import Network
    from finetune_trainer.train.runtime.distributed import World


@dataclass
class Clock:
    """Seconds that pass when a test says so."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Logged:
    """Stands for the tracker or the sinks, and keeps what it gets."""

    entries: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def start(self, step: int) -> None:
        self.starts.append(step)

    def metrics(self, step: int, values: dict[str, Any]) -> None:
        self.entries.append((step, dict(values)))


@dataclass
class Setup:
    """A reporter, and what it stands on."""

    reporter: Reporter
    clock: Clock
    logged: Logged
    sunk: Logged


@pytest.fixture
def world() -> Iterator[World]:
    with networks.alone() as lone_world:
        yield lone_world


@pytest.fixture
def network(base_model: Path, world: World) -> Network:
    recipe = networks.recipe(base_model, objective={"type": "DPO"})
    return networks.build(recipe, base_model, world)


@pytest.fixture
def setup(world: World, network: Network) -> Setup:
    """A reporter every 2 of 5 steps, of a second attempt: the first lasted 60 s, of which 30 s were productive."""
    clock, logged, sunk = Clock(), Logged(), Logged()
    tracker: Any = logged
    sinks: Any = sunk
    progress = Progress(step=0, productive_seconds=30.0, elapsed_seconds=60.0)
    reporter = Reporter(
        world=world,
        network=network,
        tracker=tracker,
        sinks=sinks,
        max_steps=5,
        log_steps=2,
        progress=progress,
        started=clock.now - 10.0,
        clock=clock,
    )
    return Setup(reporter, clock, logged, sunk)


def take_step(
    setup: Setup, *, loss: float, metrics: tuple[float, float], seconds: float, finite: bool = True
) -> None:
    """One step of two batches."""
    for _ in range(2):
        setup.reporter.add_batch(torch.tensor(loss / 2), torch.tensor(metrics) / 2)
    setup.clock.now += seconds
    setup.reporter.add_step(
        torch.tensor(finite),
        torch.tensor(not finite),
        count=4.0,
        tokens=100.0,
        attended=1000.0,
        seconds=seconds,
    )


def test_reports_come_every_log_steps_and_after_the_last_step(setup: Setup) -> None:
    assert [step for step in range(1, 6) if setup.reporter.is_due(step)] == [2, 4, 5]


def test_sinks_get_the_start_of_the_attempt_and_what_mlflow_gets(setup: Setup) -> None:
    setup.reporter.start(Progress(step=3))
    take_step(setup, loss=8.0, metrics=(2.0, 4.0), seconds=3.0)
    setup.reporter.log(
        setup.reporter.close_window(4, learning_rate=1e-3, grad_norm=lambda: 0.5), data_wait_seconds=0.25
    )
    setup.reporter.log_evaluation(4, Evaluation(2.0, {}), None)
    assert setup.sunk.starts == [3]
    assert [step for step, _ in setup.sunk.entries] == [3, 4, 4]
    assert setup.sunk.entries == setup.logged.entries


def test_no_time_remains_after_an_early_stop(setup: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    """The save, the evaluation and the delivery follow, while the job still shows the time that was reported last."""
    take_step(setup, loss=8.0, metrics=(2.0, 4.0), seconds=3.0)
    setup.reporter.log_early_stop(1, 3)
    assert setup.logged.entries == [(1, {contract.METRIC_SECONDS_REMAINING: 0.0})]
    assert capsys.readouterr().out == ("stopping early: the evaluation loss did not fall for 3 evaluations\n")
    # The last steps are reported after the run has stopped.
    report = setup.reporter.close_window(1, learning_rate=1e-3, grad_norm=lambda: 0.5)
    assert report.seconds_remaining == 0.0


def test_a_report_is_the_mean_of_its_window(setup: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    take_step(setup, loss=8.0, metrics=(2.0, 4.0), seconds=3.0)
    take_step(setup, loss=4.0, metrics=(4.0, 2.0), seconds=1.0)
    report = setup.reporter.close_window(2, learning_rate=1e-3, grad_norm=lambda: 0.5)
    assert (report.step, report.loss, report.learning_rate, report.grad_norm) == (2, 1.5, 1e-3, 0.5)
    assert report.metrics == dict(zip(Dpo.metrics, (0.75, 0.75), strict=True))
    assert (report.tokens_per_second, report.seconds_remaining, report.mfu) == (50.0, 6.0, None)
    setup.reporter.log(report, data_wait_seconds=0.25)
    assert "step 2/5  40%  loss 1.5000  lr 1.00e-03  grad 0.50  50 tok/s  mem " in capsys.readouterr().out
    ((step, metrics),) = setup.logged.entries
    assert step == 2
    assert metrics | {contract.METRIC_MEMORY: None} == {
        contract.METRIC_STEP: 2,
        contract.METRIC_MAX_STEPS: 5,
        contract.METRIC_LOSS: 1.5,
        contract.METRIC_LEARNING_RATE: 1e-3,
        contract.METRIC_GRAD_NORM: 0.5,
        contract.METRIC_SKIPPED_STEPS: 0,
        contract.METRIC_LOSS_SCALE: None,
        contract.METRIC_TOKENS_PER_SECOND: 50.0,
        contract.METRIC_MFU: None,
        contract.METRIC_MEMORY: None,
        contract.METRIC_DATA_WAIT: 0.25,
        contract.METRIC_CHECKPOINT_SECONDS: 0.0,
        contract.METRIC_SECONDS_REMAINING: 6.0,
        contract.METRIC_GOODPUT: pytest.approx(34.0 / 74.0),
        contract.METRIC_PRODUCTIVE_SECONDS: pytest.approx(34.0),
        contract.METRIC_REWARD_MARGIN: 0.75,
        contract.METRIC_REWARD_ACCURACY: 0.75,
    }
    # The next window begins empty.
    assert setup.reporter.sum_loss_since_report() == 0.0
    take_step(setup, loss=4.0, metrics=(0.0, 0.0), seconds=1.0)
    assert setup.reporter.sum_loss_since_report() == 4.0
    assert setup.reporter.close_window(3, learning_rate=0.0, grad_norm=lambda: 0.0).loss == 1.0


def test_steps_that_were_skipped_count_and_are_in_no_mean(
    setup: Setup, capsys: pytest.CaptureFixture[str]
) -> None:
    nan = float("nan")
    take_step(setup, loss=8.0, metrics=(2.0, 4.0), seconds=3.0)
    take_step(setup, loss=nan, metrics=(nan, 4.0), seconds=1.0, finite=False)
    assert setup.reporter.sum_loss_since_report() == 8.0
    report = setup.reporter.close_window(2, learning_rate=1e-3, grad_norm=lambda: 0.5)
    assert (report.loss, report.metrics, report.skipped) == (
        2.0,
        dict(zip(Dpo.metrics, (0.5, 1.0), strict=True)),
        1,
    )
    take_step(setup, loss=nan, metrics=(nan, nan), seconds=1.0, finite=False)
    report = setup.reporter.close_window(3, learning_rate=1e-3, grad_norm=lambda: 0.5)
    assert (report.loss, report.metrics, report.skipped) == (None, {}, 2)
    setup.reporter.log(report, data_wait_seconds=0.0)
    assert re.search(r"60%  loss -  lr .* skipped 2\n", capsys.readouterr().out)
    assert setup.logged.entries[-1][1][contract.METRIC_LOSS] is None
    assert setup.reporter.add_times(Progress()).skipped_steps == 2


def test_the_time_of_reading_the_loss_belongs_to_the_steps(setup: Setup) -> None:
    """A GPU works on after the step has returned; reading the gradient norm waits for it."""
    take_step(setup, loss=8.0, metrics=(0.0, 0.0), seconds=1.0)

    def slow() -> float:
        setup.clock.now += 3.0
        return 0.5

    assert setup.reporter.close_window(2, learning_rate=0.0, grad_norm=slow).tokens_per_second == 25.0


def test_the_time_of_all_attempts_counts(setup: Setup) -> None:
    assert setup.reporter.goodput == pytest.approx(30.0 / 70.0)
    take_step(setup, loss=1.0, metrics=(0.0, 0.0), seconds=20.0)
    with setup.reporter.count_checkpoint_time():
        setup.clock.now += 5.0
    timed = setup.reporter.add_times(Progress(step=1))
    assert (timed.step, timed.productive_seconds, timed.elapsed_seconds) == (1, 50.0, 95.0)
    report = setup.reporter.close_window(1, learning_rate=0.0, grad_norm=lambda: 0.0)
    assert setup.reporter.add_times(Progress()).productive_seconds == 50.0
    setup.reporter.log(report, data_wait_seconds=0.0)
    assert setup.logged.entries[-1][1][contract.METRIC_CHECKPOINT_SECONDS] == 5.0


def test_mfu_is_a_share_of_what_all_chips_can_do(
    world: World, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "peak_flops", lambda _device: 1e9)
    tracker: Any = Logged()
    clock = Clock()
    reporter = Reporter(
        world=world,
        network=network,
        tracker=tracker,
        sinks=tracker,
        max_steps=1,
        log_steps=1,
        progress=Progress(),
        started=0.0,
        clock=clock,
    )
    reporter.add_step(
        torch.tensor(True), torch.tensor(False), count=1.0, tokens=100.0, attended=1000.0, seconds=2.0
    )
    report = reporter.close_window(1, learning_rate=0.0, grad_norm=lambda: 0.0)
    assert report.mfu == pytest.approx(speed.Flops(network).count(100.0, 1000.0) / 2.0 / 1e9)


def test_evaluations_are_logged(setup: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    setup.reporter.start(Progress(step=3))
    setup.reporter.log_base_evaluation(Evaluation(2.0, {}))
    setup.reporter.log_evaluation(3, Evaluation(1.0, {}), 2.718)
    setup.reporter.log_evaluation(4, Evaluation(0.5, {contract.METRIC_REWARD_ACCURACY: 0.75}), None)
    setup.reporter.log_final_evaluation(5, 0.4, None)
    assert capsys.readouterr().out.splitlines() == [
        "evaluation before training: loss 2.0000",
        "evaluation at step 3: loss 1.0000  perplexity 2.72",
        "evaluation at step 4: loss 0.5000  accuracy 0.750",
    ]
    assert setup.logged.entries == [
        (3, {contract.METRIC_STEP: 3, contract.METRIC_MAX_STEPS: 5}),
        (0, {contract.METRIC_BASE_EVAL_LOSS: 2.0, contract.METRIC_EVAL_LOSS: 2.0}),
        (3, {contract.METRIC_EVAL_LOSS: 1.0, contract.METRIC_EVAL_PERPLEXITY: 2.718}),
        (
            4,
            {
                contract.METRIC_EVAL_LOSS: 0.5,
                contract.METRIC_EVAL_PERPLEXITY: None,
                "eval_reward_accuracy": 0.75,
            },
        ),
        (
            5,
            {
                contract.METRIC_FINAL_EVAL_LOSS: 0.4,
                contract.METRIC_FINAL_EVAL_PERPLEXITY: None,
                contract.METRIC_GOODPUT: pytest.approx(30.0 / 70.0),
                contract.METRIC_PRODUCTIVE_SECONDS: pytest.approx(30.0),
            },
        ),
    ]
