"""When an evaluation is due, what it averages, and what its result means for the run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from finetune_crds import contract
from finetune_crds.training import Training
from finetune_trainer.train.checkpoint.progress import Progress
from finetune_trainer.train.data import pack
from finetune_trainer.train.data.feed import Collator, Examples
from finetune_trainer.train.evaluator import Evaluation, Evaluator
from finetune_trainer.train.objectives import reward
from finetune_trainer.train.objectives.dpo import Dpo
from finetune_trainer.train.objectives.sft import Sft
from support import networks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from finetune_trainer.train.runtime.distributed import World


class Model:
    """Stands for a network with an objective: nothing runs."""

    def __init__(self, objective: Any = None) -> None:
        self.objective = objective or Sft()


@pytest.fixture
def world() -> Iterator[World]:
    with networks.alone() as lone_world:
        yield lone_world


def evaluator(training: dict[str, Any], model: Any = None, *, enabled: bool = True) -> Evaluator:
    """An evaluator whose split is not read."""
    validation: Any = object() if enabled else None
    network: Any = model or Model()
    unused: Any = None
    return Evaluator(unused, network, unused, validation, Training.model_validate(training))


@pytest.mark.parametrize(
    ("training", "progress", "due"),
    [
        ({"evalEverySteps": 4}, Progress(step=4), True),
        ({"evalEverySteps": 4}, Progress(step=5), False),
        ({"evalEverySteps": 4}, Progress(step=12), False),
        ({"evalEverySteps": 4}, Progress(step=0), False),
        ({"evalEverySteps": 4}, Progress(step=8, evaluated_step=8), False),
        ({"evalEverySteps": 4}, Progress(step=8, evaluated_step=4), True),
        ({}, Progress(step=4), False),
    ],
)
def test_an_evaluation_is_due_once_every_eval_steps_but_at_the_end(
    training: dict[str, int], progress: Progress, *, due: bool
) -> None:
    assert evaluator(training).is_due(progress, max_steps=12) is due
    assert not evaluator(training, enabled=False).is_due(progress, max_steps=12)


EARLY = {"evalEverySteps": 1, "earlyStopping": {"patience": 2, "minDelta": 0.1}}


def test_a_run_stops_early_when_the_loss_does_not_fall_by_the_least_change() -> None:
    judge = evaluator(EARLY)
    progress, stops = Progress(best_eval_loss=2.0), []
    for step, loss in enumerate([1.5, 1.45, 1.3, 1.25, 1.26], start=1):
        progress = judge.record(Progress(**{**vars(progress), "step": step}), loss)
        stops.append((progress.best_eval_loss, progress.evals_without_gain, judge.should_stop(progress)))
        assert progress.evaluated_step == step
    assert stops == [(1.5, 0, False), (1.45, 1, False), (1.3, 0, False), (1.25, 1, False), (1.25, 2, True)]


def test_weights_are_kept_where_load_best_asks_and_the_loss_is_the_least() -> None:
    best = {"select": "Best", "evalEverySteps": 1}
    assert evaluator(best).should_keep(Progress(best_eval_loss=2.0), 1.9)
    assert evaluator(best).should_keep(Progress(), 9.0)
    assert not evaluator(best).should_keep(Progress(best_eval_loss=2.0), 2.0)
    assert not evaluator({"evalEverySteps": 1}).should_keep(Progress(best_eval_loss=2.0), 1.9)


def test_the_monitored_number_decides() -> None:
    """By accuracy, an evaluation with a higher loss can be the better one."""
    early = Evaluation(0.5, {contract.METRIC_REWARD_ACCURACY: 0.75})
    late = Evaluation(0.9, {contract.METRIC_REWARD_ACCURACY: 0.875})
    by_loss, by_accuracy = evaluator({}), evaluator({"monitor": "Accuracy"})
    assert [by_loss.judge(each) for each in (early, late)] == [0.5, 0.9]
    assert [by_accuracy.judge(each) for each in (early, late)] == [0.25, 0.125]


def test_metrics_are_the_means_over_all_examples(base_model: Path, world: World) -> None:
    recipe = networks.recipe(base_model, objective={"type": "RewardModel"})
    network = networks.build(recipe, base_model, world)
    split = networks.random_split(documents=2, examples=5)
    training = Training.model_validate({"perDeviceEvalBatchSize": 2})
    rows = [[0, 1], [2], [3, 4]]
    evaluation = Evaluator(
        world, network, Collator(world, 1, None), Examples(split, rows), training
    ).evaluate()
    chosen, rejected = reward.score(network, pack.collate(split, rows, pad_id=1)).view(-1, 2).unbind(1)
    assert evaluation.metrics == pytest.approx(
        {
            contract.METRIC_REWARD_MARGIN: (chosen - rejected).mean().item(),
            contract.METRIC_REWARD_ACCURACY: (chosen > rejected).float().mean().item(),
            contract.METRIC_REWARD_MEAN: (chosen + rejected).mean().item() / 2,
        },
        rel=1e-4,
    )


def test_only_a_cross_entropy_has_a_perplexity() -> None:
    assert evaluator({}, Model(Sft())).perplexity(2.0) == pytest.approx(math.exp(2.0))
    assert evaluator({}, Model(Sft())).perplexity(1e9) == math.exp(700.0)
    assert evaluator({}, Model(Dpo(0.1))).perplexity(0.6) is None


def test_the_loss_is_the_mean_over_all_targets(base_model: Path, world: World) -> None:
    """Batches of different sizes, each target once, and the network trains on afterwards."""
    recipe = networks.recipe(base_model)
    network = networks.build(recipe, base_model, world)
    split = networks.random_split(examples=5)
    rows = [[0, 1], [2], [3, 4]]
    collator = Collator(world, 0, None)
    training = Training.model_validate({"perDeviceEvalBatchSize": 2})
    mean_loss = Evaluator(world, network, collator, Examples(split, rows), training).evaluate().loss
    full_batch = pack.collate(split, rows, pad_id=0)
    with network.no_grad_forward():
        total, _ = network(full_batch)
    assert mean_loss == pytest.approx(total.item() / full_batch.targets_count, rel=1e-5)
    loss, _ = network(full_batch)
    loss.backward()
    assert all(weight.grad is not None for weight in network.parameters())


def test_an_evaluation_is_abandoned_between_batches(base_model: Path, world: World) -> None:
    network = networks.build(networks.recipe(base_model), base_model, world)
    examples = Examples(networks.random_split(examples=3), [[0], [1], [2]])
    calls: list[int] = []

    def stop() -> None:
        calls.append(len(calls))
        if len(calls) == 2:
            raise InterruptedError

    judge = Evaluator(world, network, Collator(world, 0, None), examples, Training(per_device_batch_size=1))
    with pytest.raises(InterruptedError):
        judge.evaluate(stop)
    assert calls == [0, 1]
    assert torch.is_grad_enabled()


class Best:
    """Stands for a checkpointer that saved a best checkpoint."""

    def __init__(self, step: int | None, loss: float | None) -> None:
        self.best_step, self.best_step_loss, self.loaded = step, loss, list[int]()

    def load_weights(self, step: int, _model: object) -> None:
        self.loaded.append(step)


def test_the_best_saved_weights_are_loaded_at_the_end(
    base_model: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    network = networks.build(networks.recipe(base_model), base_model, world)
    examples = Examples(networks.random_split(examples=2), [[0], [1]])
    training = Training.model_validate({"select": "Best", "evalEverySteps": 1})
    judge = Evaluator(world, network, Collator(world, 0, None), examples, training)
    kept_line = "keeping the last weights, with loss 50.0000: no saved checkpoint is better"
    loss = judge.evaluate().loss
    cases: list[tuple[Any, list[int], float, str]] = [
        (Best(4, 1.0), [4], loss, f"loaded the best weights, of step 4: loss {loss:.4f}"),
        (Best(4, 1e3), [], 50.0, kept_line),
        (Best(None, None), [], 50.0, kept_line),
    ]
    capsys.readouterr()  # what the network says when it is built
    for best, loaded, expected, line in cases:
        evaluation, step = judge.load_best_weights(best, Evaluation(50.0, {}))
        assert evaluation.loss == pytest.approx(expected)
        assert step == (loaded[0] if loaded else None)
        assert (best.loaded, capsys.readouterr().out.strip()) == (loaded, line)


def test_the_last_weights_stay_without_load_best(base_model: Path, world: World) -> None:
    best: Any = Best(4, 1.0)
    last = Evaluation(50.0, {})
    assert evaluator({}).load_best_weights(best, last) == (last, None)
    assert best.loaded == []
