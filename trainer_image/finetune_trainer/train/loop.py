"""The loop: step, evaluate, checkpoint, report."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from finetune_crds import contract
from finetune_trainer.outcome import PreemptedError, TrainingError
from finetune_trainer.train import pack
from finetune_trainer.train.checkpoint import Progress
from finetune_trainer.train.preemption import NOT_STARTED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from finetune_crds.training import Training
    from finetune_trainer.train.checkpoint import Checkpointer
    from finetune_trainer.train.data import Split
    from finetune_trainer.train.distributed import World
    from finetune_trainer.train.objectives import Objective
    from finetune_trainer.train.preemption import Preemption
    from finetune_trainer.train.schedule import Schedule
    from finetune_trainer.train.track import Tracker


@dataclass(frozen=True)
class Examples:
    """A split, and the sequences that its examples stand in."""

    split: Split
    sequences: Sequence[Sequence[int]]


@dataclass
class Window:
    """What happened since the last report, this rank's part of it."""

    loss: torch.Tensor
    targets: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    steps: int = 0


class Loop:
    """Trains a sharded model to the last step of a plan."""

    def __init__(
        self,
        *,
        world: World,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        schedule: Schedule,
        plan: pack.Plan,
        train: Split,
        validation: Examples | None,
        training: Training,
        pad_id: int,
        tracker: Tracker,
        checkpointer: Checkpointer | None,
        progress: Progress,
        preemption: Preemption,
        started: float,
    ) -> None:
        self.world = world
        self.model = model
        self.optimizer = optimizer
        self.objective = objective
        self.schedule = schedule
        self.plan = plan
        self.train = train
        self.validation = validation
        self.training = training
        self.pad_id = pad_id
        self.tracker = tracker
        self.checkpointer = checkpointer
        self.progress = progress
        self.preemption = preemption
        # As if this attempt had begun so much earlier: time spent in those before counts too.
        self._started = started - progress.elapsed_seconds
        self._productive_seconds = progress.productive_seconds
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._rate = 0.0
        self._norm = torch.zeros(())
        self._window = self._new_window()

    def run(self) -> float | None:
        """Train to the end, and return the final evaluation loss.

        Raises:
            PreemptedError: SIGTERM came; a checkpoint was written where the recipe has a place for them.
            TrainingError: the loss is not finite any more.
        """
        self.tracker.metrics(
            self.progress.step,
            {contract.METRIC_STEP: self.progress.step, contract.METRIC_MAX_STEPS: self.plan.max_steps},
        )
        self._stop_if_asked()
        if self.progress.step == 0 and self.validation is not None:
            base = self.evaluate()
            self.progress = replace(self.progress, base_eval_loss=base, best_eval_loss=base)
            self.tracker.metrics(0, {contract.METRIC_BASE_EVAL_LOSS: base, contract.METRIC_EVAL_LOSS: base})
            self.world.say(f"evaluation before training: loss {base:.4f}")
        while self.progress.step < self.plan.max_steps and not self._stopped_improving():
            stop = self._step()
            self._report()
            if stop:
                self._preempted()
            self._evaluate_if_due()
            self._checkpoint_if_due()
        return self._finish()

    def _step(self) -> bool:
        """Take one optimizer step; True when any rank was asked to stop."""
        began = time.monotonic()
        step = self.progress.step
        batches = self._batches(step)
        targets, tokens, stop = self.world.total(
            sum(batch.targets_count for batch in batches),
            sum(batch.tokens for batch in batches),
            self.preemption.requested,
        )
        # Dropout is a function of seed, step and rank, so resuming needs no generator state.
        torch.manual_seed(_mixed(self.training.seed, step, self.world.rank))
        self.model.train()
        for batch in batches:
            loss = self.objective(self.model, batch.to(self.world.device))
            (loss / max(targets, 1.0)).backward()
            self._window.loss += loss.detach()
        self._update(self.schedule.at(step))
        self._window.targets += targets
        self._window.tokens += tokens
        self._window.steps += 1
        self._window.seconds += time.monotonic() - began
        self.progress = replace(self.progress, step=step + 1)
        return stop > 0

    def _batches(self, step: int) -> list[pack.Batch]:
        """This rank's part of a step, as many batches as every other rank has."""
        rounds = pack.shares(
            self.plan.of_step(step),
            rank=self.world.rank,
            ranks=self.world.size,
            batch_size=self.training.batch_size,
        )
        return [pack.collate(self.train, rows, pad_id=self.pad_id) for rows in rounds]

    def _update(self, rate: float) -> None:
        """Clip the gradients and let the optimizer use them."""
        self._rate = rate
        self._norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.training.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def evaluate(self) -> float:
        """The mean loss over every target of the validation split, each counted once.

        Raises:
            PreemptedError: as in `run`; it does not wait for the end of the split.
        """
        assert self.validation is not None  # noqa: S101 - asked only where there is one
        self.model.eval()
        total, count = torch.zeros((), dtype=torch.float64, device=self.world.device), 0
        with torch.no_grad():
            for rows in pack.shares(
                self.validation.sequences,
                rank=self.world.rank,
                ranks=self.world.size,
                batch_size=self.training.eval_batch_size or self.training.batch_size,
            ):
                self._stop_if_asked()
                batch = pack.collate(self.validation.split, rows, pad_id=self.pad_id)
                total += self.objective(self.model, batch.to(self.world.device))
                count += batch.targets_count
        loss, targets = self.world.total(total.item(), count)
        return loss / max(targets, 1.0)

    @property
    def goodput(self) -> float:
        """Share of the time of all attempts that went into steps which count."""
        return min(1.0, self._now.productive_seconds / max(self._now.elapsed_seconds, 1e-9))

    @property
    def _now(self) -> Progress:
        """The progress with the time spent up to now."""
        return replace(
            self.progress,
            productive_seconds=self._productive_seconds + self._window.seconds,
            elapsed_seconds=time.monotonic() - self._started,
        )

    def _new_window(self) -> Window:
        return Window(loss=torch.zeros((), device=self.world.device))

    def _report(self) -> None:
        """One line and the metrics, every logSteps and after the last step."""
        step, last = self.progress.step, self.plan.max_steps
        if step % self.training.log_steps and step != last:
            return
        window, self._window = self._window, self._new_window()
        # NB: reading the loss waits for the GPU; the time it takes belongs to the steps.
        began = time.monotonic()
        (summed,) = self.world.total(window.loss.item())
        norm = _as_float(self._norm)
        window.seconds += time.monotonic() - began
        self._productive_seconds += window.seconds
        loss = summed / max(window.targets, 1.0)
        self._check_finite(loss + norm)
        speed = window.tokens / max(window.seconds, 1e-9)
        remaining = (last - step) * window.seconds / window.steps
        self.world.say(
            f"step {step}/{last}  {100 * step // last}%  loss {loss:.4f}  lr {self._rate:.2e}  grad {norm:.2f}  "
            f"{speed:,.0f} tok/s  eta {_duration(remaining)}"
        )
        self.tracker.metrics(
            step,
            {
                contract.METRIC_STEP: step,
                contract.METRIC_MAX_STEPS: last,
                contract.METRIC_LOSS: loss,
                contract.METRIC_LEARNING_RATE: self._rate,
                contract.METRIC_GRAD_NORM: norm,
                contract.METRIC_TOKENS_PER_SECOND: speed,
                contract.METRIC_SECONDS_REMAINING: remaining,
                contract.METRIC_GOODPUT: self.goodput,
            },
        )

    def _evaluate_if_due(self) -> None:
        """Evaluate every evalSteps; the end has an evaluation of its own."""
        step = self.progress.step
        every = self.training.eval_steps
        if self.validation is None or every is None or step % every or step == self.plan.max_steps:
            return
        loss = self.evaluate()
        self._report_evaluation(loss)
        best, stopping = self.progress.best_eval_loss, self.training.early_stopping
        if best is None or loss < best - (stopping.min_delta if stopping else 0.0):
            self.progress = replace(self.progress, best_eval_loss=loss, evals_without_gain=0)
        else:
            self.progress = replace(self.progress, evals_without_gain=self.progress.evals_without_gain + 1)
        if self._stopped_improving():
            waited = self.progress.evals_without_gain
            self.world.say(f"stopping early: evaluation loss has not fallen for {waited} evaluations")

    def _stopped_improving(self) -> bool:
        stopping = self.training.early_stopping
        return stopping is not None and self.progress.evals_without_gain >= stopping.patience

    def _report_evaluation(self, loss: float) -> None:
        step = self.progress.step
        self.world.say(f"evaluation at step {step}: loss {loss:.4f}  perplexity {perplexity(loss):.2f}")
        self.tracker.metrics(
            step, {contract.METRIC_EVAL_LOSS: loss, contract.METRIC_EVAL_PERPLEXITY: perplexity(loss)}
        )

    def _checkpoint_if_due(self) -> None:
        if self.checkpointer is not None and self.progress.step % self.checkpointer.every_steps == 0:
            self._checkpoint(self.checkpointer)

    def _checkpoint(self, checkpointer: Checkpointer, *, wait: bool = False) -> None:
        (summed,) = self.world.total(self._window.loss.item())
        self._check_finite(summed + _as_float(self._norm))
        checkpointer.save(self._now, self.model, self.optimizer, wait=wait)

    def _stop_if_asked(self) -> None:
        """Stop where the loop stands when any rank was asked to; all ranks ask at the same places."""
        (asked,) = self.world.total(self.preemption.requested)
        # Trained to the end and nowhere kept: to go on and deliver is all that can still save it.
        lost = self.checkpointer is None and self.progress.step == self.plan.max_steps
        if asked and not lost:
            self._preempted()

    def _preempted(self) -> None:
        step, checkpointer = self.progress.step, self.checkpointer
        if checkpointer is not None and step > 0:
            self._checkpoint(checkpointer, wait=True)
        kept = checkpointer.published if checkpointer is not None else None
        if step == 0:
            sentence = NOT_STARTED
        elif checkpointer is None:
            sentence = f"stopped by SIGTERM after step {step}; no checkpoint is configured"
        elif kept == step:
            sentence = f"stopped by SIGTERM after the checkpoint of step {step}"
        else:
            sentence = f"stopped by SIGTERM after step {step}; {checkpointer.failure}"
        raise PreemptedError(sentence, kept)

    def _check_finite(self, figure: float) -> None:
        """Stop at the first sign of a broken model, and before it becomes the newest checkpoint."""
        if not math.isfinite(figure):
            # The figure is the same on all ranks, so all of them see the last good checkpoint through.
            if self.checkpointer is not None:
                self.checkpointer.drain()
            raise TrainingError(
                "NonFiniteLoss",
                f"loss or gradients are not finite at step {self.progress.step}: lower training.learningRate, or "
                "look for broken examples",
            )

    def _finish(self) -> float | None:
        """Evaluate and keep the end, so that an attempt that fails to register need not train again."""
        if self.checkpointer is not None:
            self._checkpoint(self.checkpointer, wait=True)
        self._stop_if_asked()
        if self.validation is None:
            return None
        loss = self.evaluate()
        self._report_evaluation(loss)
        self.tracker.metrics(
            self.progress.step,
            {
                contract.METRIC_FINAL_EVAL_LOSS: loss,
                contract.METRIC_FINAL_EVAL_PERPLEXITY: perplexity(loss),
                contract.METRIC_GOODPUT: self.goodput,
            },
        )
        self._stop_if_asked()
        return loss


def _mixed(*numbers: int) -> int:
    """One seed out of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def _as_float(value: torch.Tensor) -> float:
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    return float(whole.item())


def perplexity(loss: float) -> float:
    """exp(loss), for a mean loss in nats."""
    return math.exp(min(loss, 700.0))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
