"""The loop: step, evaluate, checkpoint, report."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from finetune_crds import contract
from finetune_trainer.outcome import PreemptedError
from finetune_trainer.train.checkpoint.checkpointer import Progress
from finetune_trainer.train.model import shard, speed
from finetune_trainer.train.model.network import trained
from finetune_trainer.train.objectives.sft import Sft
from finetune_trainer.train.runtime.preemption import NOT_STARTED
from finetune_trainer.train.runtime.watch import Watch

if TYPE_CHECKING:
    from finetune_crds.training import Training
    from finetune_trainer.train.checkpoint.checkpointer import Checkpointer
    from finetune_trainer.train.data.feed import Collator, Examples, Feed
    from finetune_trainer.train.data.pack import Plan
    from finetune_trainer.train.model.network import Network
    from finetune_trainer.train.model.schedule import Schedule
    from finetune_trainer.train.runtime.distributed import World
    from finetune_trainer.train.runtime.preemption import Preemption
    from finetune_trainer.train.runtime.track import Tracker


@dataclass
class Window:
    """What happened since the last report; sums of tensors are this rank's part of it."""

    loss: torch.Tensor
    figures: torch.Tensor
    count: float = 0.0
    tokens: float = 0.0
    attended: float = 0.0
    seconds: float = 0.0
    steps: int = 0


class Loop:
    """Trains a sharded network to the last step of a plan."""

    def __init__(
        self,
        *,
        world: World,
        network: Network,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        plan: Plan,
        feed: Feed,
        collator: Collator,
        validation: Examples | None,
        training: Training,
        tracker: Tracker,
        checkpointer: Checkpointer | None,
        progress: Progress,
        preemption: Preemption,
        started: float,
    ) -> None:
        self.world = world
        self.network = network
        self.optimizer = optimizer
        self.schedule = schedule
        self.plan = plan
        self.feed = feed
        self.collator = collator
        self.validation = validation
        self.training = training
        self.tracker = tracker
        self.checkpointer = checkpointer
        self.progress = progress
        self.preemption = preemption
        # As if this attempt had begun so much earlier: time spent in those before counts too.
        self._started = started - progress.elapsed_seconds
        self._productive_seconds = progress.productive_seconds
        self._checkpoint_seconds = 0.0
        self._flops = speed.Flops(network)
        self._peak_flops = speed.peak_flops(world.device)
        self._parameters = trained(network)
        self._rate = 0.0
        self._norm = torch.zeros(())
        self._watch = Watch(checkpointer.drain if checkpointer is not None else lambda: None)
        self._kept_step = 0
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
        # The attempt before may have been stopped between a step and its evaluation.
        self._evaluate_if_due()
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
        step, objective = self.progress.step, self.network.objective
        batches = self.feed.of_step(step)
        count, tokens, attended, stop = self.world.total(
            sum(objective.count(batch) for batch in batches),
            sum(batch.tokens for batch in batches),
            sum(batch.attended for batch in batches),
            self.preemption.requested,
        )
        # Dropout is a function of seed, step and rank, so resuming needs no generator state.
        torch.manual_seed(_mixed(self.training.seed, step, self.world.rank))
        self.network.train()
        for batch in batches:
            shard.only_last_reduces(self.network, last=batch is batches[-1])
            loss, figures = self.network(batch)
            (loss / max(count, 1.0)).backward()
            self._window.loss += loss.detach()
            self._window.figures += figures
        self._update(self.schedule.at(step))
        self._window.count += count
        self._window.tokens += tokens
        self._window.attended += attended
        self._window.steps += 1
        self._window.seconds += time.monotonic() - began
        self.progress = replace(self.progress, step=step + 1)
        return stop > 0

    def _update(self, rate: float) -> None:
        """Clip the gradients and let the optimizer use them."""
        self._rate = rate
        self._norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.training.max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def evaluate(self) -> float:
        """The mean loss over the validation split, each part of it counted once.

        Raises:
            PreemptedError: as in `run`; it does not wait for the end of the split.
        """
        assert self.validation is not None  # noqa: S101 - asked only where there is one
        total, count = torch.zeros((), dtype=torch.float64, device=self.world.device), 0
        with self.network.asking():
            for batch in self.collator.batches(
                self.validation, self.training.eval_batch_size or self.training.batch_size
            ):
                self._stop_if_asked()
                loss, _ = self.network(batch.to(self.world.device))
                total += loss
                count += self.network.objective.count(batch)
        summed, losses = self.world.total(total.item(), count)
        return summed / max(losses, 1.0)

    def perplexity(self, loss: float) -> float | None:
        """exp(loss), for a mean cross-entropy in nats; None: the loss of the objective is none."""
        return math.exp(min(loss, 700.0)) if isinstance(self.network.objective, Sft) else None

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
        zeros = torch.zeros(1 + len(self.network.objective.figures), device=self.world.device)
        return Window(loss=zeros[0], figures=zeros[1:])

    def _report(self) -> None:
        """One line and the metrics, every logSteps and after the last step."""
        step, last = self.progress.step, self.plan.max_steps
        if step % self.training.log_steps and step != last:
            return
        window, self._window = self._window, self._new_window()
        # NB: reading the loss waits for the GPU; the time it takes belongs to the steps.
        began = time.monotonic()
        loss, *figures = [
            summed / max(window.count, 1.0)
            for summed in self.world.total(window.loss.item(), *window.figures.tolist())
        ]
        norm = _as_float(self._norm)
        window.seconds += time.monotonic() - began
        self._productive_seconds += window.seconds
        self._watch.check_finite(step, loss + norm)
        tokens_per_second = window.tokens / max(window.seconds, 1e-9)
        remaining = (last - step) * window.seconds / window.steps
        memory = self.world.greatest(speed.peak_memory(self.world.device))
        self.world.say(
            f"step {step}/{last}  {100 * step // last}%  loss {loss:.4f}  lr {self._rate:.2e}  grad {norm:.2f}  "
            f"{tokens_per_second:,.0f} tok/s  mem {memory / 2**30:.1f} GiB  eta {_duration(remaining)}"
        )
        self.tracker.metrics(
            step,
            {
                contract.METRIC_STEP: step,
                contract.METRIC_MAX_STEPS: last,
                contract.METRIC_LOSS: loss,
                contract.METRIC_LEARNING_RATE: self._rate,
                contract.METRIC_GRAD_NORM: norm,
                contract.METRIC_TOKENS_PER_SECOND: tokens_per_second,
                contract.METRIC_MFU: self._mfu(window),
                contract.METRIC_MEMORY: memory,
                contract.METRIC_DATA_WAIT: self.feed.waited,
                contract.METRIC_CHECKPOINT_SECONDS: self._checkpoint_seconds,
                contract.METRIC_SECONDS_REMAINING: remaining,
                contract.METRIC_GOODPUT: self.goodput,
                **dict(zip(self.network.objective.figures, figures, strict=True)),
            },
        )
        self._watch.check_runaway(step, loss)

    def _mfu(self, window: Window) -> float | None:
        """The share of the chips' FLOP/s that went into the model; None: it is not known what they can do."""
        if self._peak_flops is None:
            return None
        done = self._flops.of(window.tokens, window.attended) / max(window.seconds, 1e-9)
        return done / (self._peak_flops * self.world.size)

    def _evaluate_if_due(self) -> None:
        """Evaluate every evalSteps; the end has an evaluation of its own."""
        step = self.progress.step
        every = self.training.eval_steps
        if self.validation is None or every is None or step % every or step == self.plan.max_steps:
            return
        if step <= self.progress.evaluated_step:
            return
        loss = self.evaluate()
        self._report_evaluation(loss)
        best, stopping = self.progress.best_eval_loss, self.training.early_stopping
        gained = best is None or loss < best - (stopping.min_delta if stopping else 0.0)
        without_gain = 0 if gained else self.progress.evals_without_gain + 1
        better = best is None or loss < best
        self.progress = replace(
            self.progress,
            best_eval_loss=loss if better else best,
            evals_without_gain=without_gain,
            evaluated_step=step,
        )
        if better and self.training.load_best and self.checkpointer is not None:
            self._checkpoint(self.checkpointer, best=True)
        if self._stopped_improving():
            waited = self.progress.evals_without_gain
            self.world.say(f"stopping early: evaluation loss has not fallen for {waited} evaluations")

    def _stopped_improving(self) -> bool:
        stopping = self.training.early_stopping
        return stopping is not None and self.progress.evals_without_gain >= stopping.patience

    def _report_evaluation(self, loss: float) -> None:
        step = self.progress.step
        perplexity = self.perplexity(loss)
        self.world.say(
            f"evaluation at step {step}: loss {loss:.4f}"
            + (f"  perplexity {perplexity:.2f}" if perplexity is not None else "")
        )
        self.tracker.metrics(
            step, {contract.METRIC_EVAL_LOSS: loss, contract.METRIC_EVAL_PERPLEXITY: perplexity}
        )

    def _checkpoint_if_due(self) -> None:
        # NB: one that was just begun as the best would be waited for.
        step, checkpointer = self.progress.step, self.checkpointer
        if checkpointer is not None and step % checkpointer.every_steps == 0 and self._kept_step != step:
            self._checkpoint(checkpointer)

    def _checkpoint(self, checkpointer: Checkpointer, *, wait: bool = False, best: bool = False) -> None:
        began = time.monotonic()
        (summed,) = self.world.total(self._window.loss.item())
        self._watch.check_finite(self.progress.step, summed + _as_float(self._norm))
        checkpointer.save(self._now, self.network.model, self.optimizer, wait=wait, best=best)
        self._kept_step = self.progress.step
        self._checkpoint_seconds += time.monotonic() - began

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

    def _finish(self) -> float | None:
        """Evaluate and keep the end, so that an attempt that fails to register need not train again."""
        if self.checkpointer is not None:
            self._checkpoint(self.checkpointer, wait=True)
        self._stop_if_asked()
        if self.validation is None:
            return None
        loss = self.evaluate()
        self._report_evaluation(loss)
        if self.training.load_best and self.checkpointer is not None:
            loss = self._load_best(self.checkpointer, loss)
        self.tracker.metrics(
            self.progress.step,
            {
                contract.METRIC_FINAL_EVAL_LOSS: loss,
                contract.METRIC_FINAL_EVAL_PERPLEXITY: self.perplexity(loss),
                contract.METRIC_GOODPUT: self.goodput,
            },
        )
        self._stop_if_asked()
        return loss

    def _load_best(self, checkpointer: Checkpointer, loss: float) -> float:
        """Put the weights with the least evaluation loss in place; their loss."""
        # NB: not progress.best_eval_loss: the storage may have failed when those weights were to be kept.
        step, best = checkpointer.best_step, checkpointer.best_step_loss
        if step is None or best is None or best >= loss:
            self.world.say(f"the last weights stay, with loss {loss:.4f}: none that were kept are better")
            return loss
        checkpointer.load_weights(step, self.network.model)
        loaded = self.evaluate()
        self.world.say(f"the weights of step {step} are the best, and are used: loss {loaded:.4f}")
        return loaded


def _mixed(*numbers: int) -> int:
    """One seed out of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def _as_float(value: torch.Tensor) -> float:
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    return float(whole.item())


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
