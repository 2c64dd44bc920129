"""The training loop: step, report, evaluate, checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from finetune_trainer.train.model import seeds, shard
from finetune_trainer.train.runtime.preemption import build_preempted_error
from finetune_trainer.train.runtime.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from finetune_trainer.train.checkpoint.checkpointer import Checkpointer
    from finetune_trainer.train.checkpoint.progress import Progress
    from finetune_trainer.train.data.feed import Feed
    from finetune_trainer.train.data.pack import Batch
    from finetune_trainer.train.evaluator import Evaluation, Evaluator
    from finetune_trainer.train.model.network.trained_network import Network
    from finetune_trainer.train.model.optimizer.optimizer import Optimizer, StepResult
    from finetune_trainer.train.reporter import Reporter
    from finetune_trainer.train.runtime.distributed import World
    from finetune_trainer.train.runtime.preemption import Preemption


@dataclass(kw_only=True)
class Loop:
    """Trains a sharded network from the step of `progress` to the last step of the plan."""

    world: World
    network: Network
    optimizer: Optimizer
    feed: Feed
    evaluator: Evaluator
    reporter: Reporter
    checkpointer: Checkpointer | None
    preemption: Preemption
    progress: Progress
    seed: int
    max_skipped_steps: int
    weights_step: int | None = field(init=False, default=None)
    """Step of the weights that the run delivers; None: the last weights."""
    _watch: Watch = field(init=False)
    _saved_step: int = field(init=False, default=0)
    """Step of the last save that this attempt has begun."""

    def __post_init__(self) -> None:
        # The last good checkpoint is published before an error ends the run.
        drain = self.checkpointer.drain if self.checkpointer is not None else lambda: None
        self._watch = Watch(self.max_skipped_steps, drain)

    def run(self) -> float | None:
        """Train to the end, and return the final evaluation loss; None without a validation split.

        Raises:
            PreemptedError: SIGTERM arrived; a checkpoint is written where the recipe configures one.
            SupersededError: newer pods of the job claimed the checkpoint folder.
            TrainingError: the loss is not finite or diverges, or the gradients of too many steps are not finite.
        """
        self.reporter.start(self.progress)
        self._stop_if_requested()
        if self.progress.step == 0 and self.evaluator.enabled:
            self._evaluate_base()
        # The previous attempt may have stopped between a step and its evaluation.
        self._evaluate_if_due()
        while not self._has_ended():
            stop = self._train_step()
            self._report_if_due()
            if stop and not self._must_deliver():
                self._preempt()
            self._evaluate_if_due()
            self._checkpoint_if_due()
        if self.reporter.has_unreported_steps:
            # The run stopped early, at a step that is not reported otherwise.
            self._report()
        return self._finish()

    def _has_ended(self) -> bool:
        """Whether no step is left, because of the plan or of an early stop."""
        return self.progress.step >= self.feed.max_steps or self.evaluator.should_stop(self.progress)

    def _must_deliver(self) -> bool:
        """Whether SIGTERM does not stop the run: all its steps are done and no checkpoint has them, so a stop would lose all its work."""
        return self.checkpointer is None and self._has_ended()

    def _train_step(self) -> bool:
        """Take one optimizer step; returns whether the run must stop: any rank received SIGTERM, or its last save failed."""
        started = self.reporter.clock()
        step, objective = self.progress.step, self.network.objective
        batches = self.feed.of_step(step)
        has_save_failed = self.checkpointer is not None and self.checkpointer.has_failed
        count, tokens, attended, stop_requests = self.world.sum_over_ranks(
            sum(objective.count(batch) for batch in batches),
            sum(batch.tokens for batch in batches),
            sum(batch.attended for batch in batches),
            self.preemption.requested or has_save_failed,
        )
        # Dropout is a function of seed, step and rank, so that a resumed run restores no generator state.
        torch.manual_seed(seeds.derive(self.seed, step, self.world.rank))
        is_finite, has_diverged = take_step(
            self.network, self.optimizer, batches, step=step, count=count, add_batch=self.reporter.add_batch
        )
        seconds = self.reporter.clock() - started
        self.reporter.add_step(
            is_finite, has_diverged, count=count, tokens=tokens, attended=attended, seconds=seconds
        )
        self.progress = replace(self.progress, step=step + 1)
        return stop_requests > 0

    def _report_if_due(self) -> None:
        if self.reporter.is_due(self.progress.step):
            self._report()

    def _report(self) -> None:
        """Report the steps since the last report, and check their losses."""
        step = self.progress.step
        report = self.reporter.close_window(
            step,
            learning_rate=self.optimizer.learning_rate,
            grad_norm=self.optimizer.read_grad_norm,
            loss_scale=self.optimizer.read_loss_scale,
        )
        # A loss that is not finite is not logged; the other checks come after the log, which shows their cause.
        if report.loss is not None:
            self._watch.check_finite(step, report.loss)
        self.reporter.log(report, data_wait_seconds=self.feed.waited_seconds)
        self._watch.check_skipped(step, report.skipped)
        if report.loss is not None:
            self._watch.check_runaway(step, report.loss)

    def _evaluate_base(self) -> None:
        evaluation = self.evaluator.evaluate(self._stop_if_requested)
        self.progress = replace(
            self.progress, base_eval_loss=evaluation.loss, best_eval_loss=self.evaluator.judge(evaluation)
        )
        self.reporter.log_base_evaluation(evaluation)

    def _evaluate_if_due(self) -> None:
        if not self.evaluator.is_due(self.progress, self.feed.max_steps):
            return
        loss, before = self.evaluator.judge(self._evaluate()), self.progress
        self.progress = self.evaluator.record(before, loss)
        if self.evaluator.should_keep(before, loss):
            self._checkpoint(best=True)
        if self.evaluator.should_stop(self.progress):
            self.reporter.log_early_stop(self.progress.step, self.progress.evals_without_gain)

    def _evaluate(self) -> Evaluation:
        evaluation = self.evaluator.evaluate(self._stop_if_requested)
        perplexity = self.evaluator.perplexity(evaluation.loss)
        self.reporter.log_evaluation(self.progress.step, evaluation, perplexity)
        return evaluation

    def _checkpoint_if_due(self) -> None:
        # NB: saving a step again would wait for the save that its evaluation just began.
        step, checkpointer = self.progress.step, self.checkpointer
        if checkpointer is not None and step % checkpointer.every_steps == 0 and self._saved_step != step:
            self._checkpoint()

    def _checkpoint(self, *, wait: bool = False, best: bool = False) -> None:
        """Check the losses since the last report, and save a checkpoint; `wait` and `best` as in `Checkpointer.save`."""
        if self.checkpointer is None:
            return
        step = self.progress.step
        with self.reporter.count_checkpoint_time():
            self._watch.check_finite(step, self.reporter.sum_loss_since_report())
            self._watch.check_skipped(step, self.reporter.skipped())
            progress, scale = self.reporter.add_times(self.progress), self.optimizer.loss_scale
            if scale is not None:
                loss_scale, good_steps = scale.state()
                progress = replace(progress, loss_scale=loss_scale, good_steps=good_steps)
            self.checkpointer.save(progress, self.network.model, self.optimizer.parts, wait=wait, best=best)
        self._saved_step = step

    def _stop_if_requested(self) -> None:
        """Stop here when any rank received SIGTERM; all ranks call this at the same places."""
        (requested,) = self.world.sum_over_ranks(self.preemption.requested)
        if requested and not self._must_deliver():
            self._preempt()

    def _preempt(self) -> None:
        """Save, and end the attempt; if a save in flight has failed, this raises its error."""
        step, checkpointer = self.progress.step, self.checkpointer
        if checkpointer is None:
            raise build_preempted_error(step, published=None, failure="no checkpoint is configured")
        if step > 0:
            self._checkpoint(wait=True)
        raise build_preempted_error(step, published=checkpointer.published, failure=checkpointer.failure)

    def _finish(self) -> float | None:
        """Save a checkpoint, so that no later attempt trains again if the delivery fails, and evaluate the final weights."""
        self._checkpoint(wait=True)
        self._stop_if_requested()
        if not self.evaluator.enabled:
            return None
        evaluation = self._evaluate()
        if self.checkpointer is not None:
            evaluation, self.weights_step = self.evaluator.load_best_weights(
                self.checkpointer, evaluation, self._stop_if_requested
            )
        loss = evaluation.loss
        self.reporter.log_final_evaluation(self.progress.step, loss, self.evaluator.perplexity(loss))
        self._stop_if_requested()
        return loss


def take_step(
    network: Network,
    optimizer: Optimizer,
    batches: Sequence[Batch],
    *,
    step: int,
    count: float,
    add_batch: Callable[[torch.Tensor, torch.Tensor], None],
) -> StepResult:
    """Run the passes of a step and apply the gradients; never waits for the GPU.

    Args:
        network: the sharded network.
        optimizer: of its trained parameters.
        batches: of this rank, on its device.
        step: its number, from 0.
        count: the number of losses in the step, over all ranks.
        add_batch: called with the summed loss and the metrics of each batch.
    """
    network.train()
    for batch in batches:
        # Gradients accumulate in the shards, so only the last pass reduces them over the replicas.
        shard.set_replica_reduction(network, is_enabled=batch is batches[-1])
        loss, metrics = network(batch)
        optimizer.scale_loss(loss / max(count, 1.0)).backward()
        add_batch(loss, metrics)
    return optimizer.step(step)
