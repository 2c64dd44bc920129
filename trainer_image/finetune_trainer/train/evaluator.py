"""Evaluation on the validation split: when it is due, the mean loss and metrics, and their effect on the run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from finetune_crds import contract

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from finetune_crds.training import Training
    from finetune_trainer.train.checkpoint.checkpointer import Checkpointer
    from finetune_trainer.train.checkpoint.progress import Progress
    from finetune_trainer.train.data.feed import Collator, Examples
    from finetune_trainer.train.model.network.trained_network import Network
    from finetune_trainer.train.runtime.distributed import World

# exp() of a greater number overflows.
_MAX_EXPONENT = 700.0


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    loss: the mean loss.
    metrics: the means of the metrics of the objective, by their names in training.
    """

    loss: float
    metrics: Mapping[str, float]


class Evaluator:
    """Evaluates a network on the validation split of a run.

    Args:
        world: the ranks, all of which evaluate together.
        network: the sharded network.
        collator: makes this rank's batches.
        validation: the split; None: the run evaluates nothing.
        training: evalEverySteps, earlyStopping, select, monitor and the batch size.
    """

    def __init__(
        self,
        world: World,
        network: Network,
        collator: Collator,
        validation: Examples | None,
        training: Training,
    ) -> None:
        self.enabled = validation is not None
        self._world = world
        self._network = network
        self._collator = collator
        self._validation = validation
        self._training = training

    def evaluate(self, before_batch: Callable[[], None] = lambda: None) -> Evaluation:
        """Return the mean loss and metrics over the split, on all ranks together; each example is evaluated exactly once.

        Args:
            before_batch: called before each batch; raises an error to abandon the evaluation.
        """
        assert self._validation is not None  # noqa: S101 - callers check `enabled`
        objective = self._network.objective
        sum_count = 1 + objective.count_sums()
        totals, count = torch.zeros(sum_count, dtype=torch.float64, device=self._world.device), 0
        batch_size = self._training.per_device_eval_batch_size or self._training.per_device_batch_size
        with self._network.no_grad_forward():
            for batch in self._collator.batches(self._validation, batch_size):
                before_batch()
                loss, sums = self._network(batch.to(self._world.device))
                totals[0] += loss
                totals[1:] += sums
                count += objective.count(batch)
        loss_sum, *metric_sums, losses = self._world.sum_over_ranks(*totals.tolist(), count)
        return Evaluation(loss_sum / max(losses, 1.0), objective.means(metric_sums, losses))

    def judge(self, evaluation: Evaluation) -> float:
        """Return the loss by which earlyStopping and select judge an evaluation.

        It is the mean loss or, if training.monitor is Accuracy, the zero-one loss: the share of pairs that are ranked the wrong way round.
        """
        if self._training.monitor == "Accuracy":
            return 1.0 - evaluation.metrics[contract.METRIC_REWARD_ACCURACY]
        return evaluation.loss

    def perplexity(self, loss: float) -> float | None:
        """Return exp(loss); None where the objective's loss is not a cross-entropy in nats."""
        return math.exp(min(loss, _MAX_EXPONENT)) if self._network.objective.cross_entropy else None

    def is_due(self, progress: Progress, max_steps: int) -> bool:
        """Whether to evaluate after the step of `progress`: every evalEverySteps; not after the last step, where `Loop` always evaluates."""
        step, every = progress.step, self._training.eval_every_steps
        if not self.enabled or every is None or step % every or step == max_steps:
            return False
        # A resumed step may have been evaluated by an earlier attempt.
        return step > progress.evaluated_step

    def record(self, progress: Progress, loss: float) -> Progress:
        """Return the progress with the result of an evaluation after its step; `loss` is that of `judge`."""
        best, early_stopping = progress.best_eval_loss, self._training.early_stopping
        min_gain = early_stopping.min_delta if early_stopping else 0.0
        has_gained = best is None or loss < best - min_gain
        return replace(
            progress,
            best_eval_loss=loss if best is None else min(loss, best),
            evals_without_gain=0 if has_gained else progress.evals_without_gain + 1,
            evaluated_step=progress.step,
        )

    def should_keep(self, before: Progress, loss: float) -> bool:
        """Whether select: Best requires a checkpoint of these weights, given the progress before the evaluation and the loss of `judge`."""
        best = before.best_eval_loss
        return self._training.select == "Best" and (best is None or loss < best)

    def should_stop(self, progress: Progress) -> bool:
        """Whether earlyStopping ends the run: the loss did not fall by `minDelta` for `patience` evaluations."""
        early_stopping = self._training.early_stopping
        return early_stopping is not None and progress.evals_without_gain >= early_stopping.patience

    def load_best_weights(
        self,
        checkpointer: Checkpointer,
        evaluation: Evaluation,
        before_batch: Callable[[], None] = lambda: None,
    ) -> tuple[Evaluation, int | None]:
        """Load the weights with the lowest evaluation loss (`judge`) if select is Best, and return their evaluation and their step.

        Args:
            checkpointer: stores the best checkpoint.
            evaluation: of the last weights.
            before_batch: as in `evaluate`.

        Returns:
            The evaluation of the weights, and their step; `evaluation` and None if the last weights stay.
        """
        if self._training.select != "Best":
            return evaluation, None
        # NB: not progress.best_eval_loss: the storage may have failed when the weights of that loss were saved.
        loss = self.judge(evaluation)
        step, best_loss = checkpointer.best_step, checkpointer.best_step_loss
        if step is None or best_loss is None or best_loss >= loss:
            self._world.say(f"keeping the last weights, with loss {loss:.4f}: no saved checkpoint is better")
            return evaluation, None
        checkpointer.load_weights(step, self._network.model)
        loaded_evaluation = self.evaluate(before_batch)
        self._world.say(f"loaded the best weights, of step {step}: loss {self.judge(loaded_evaluation):.4f}")
        return loaded_evaluation, step
