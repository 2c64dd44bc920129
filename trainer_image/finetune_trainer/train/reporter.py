"""Reports: a line of log, and metrics for MLflow and the other sinks, every logEverySteps; and the time that the run spent."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from finetune_crds import contract
from finetune_trainer.train.model.memory import speed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from finetune_trainer.pod.mlflow_run import Tracker
    from finetune_trainer.sinks.feed import Sinks
    from finetune_trainer.train.checkpoint.progress import Progress
    from finetune_trainer.train.evaluator import Evaluation
    from finetune_trainer.train.model.network.trained_network import Network
    from finetune_trainer.train.runtime.distributed import World


@dataclass
class Window:
    """Sums over the steps since the last report.

    sums: this rank's share of the loss, followed by its share of the objective's sums, on the device; without steps whose gradients were
        not finite.
    count: losses of all ranks in the same steps, on the device.
    tokens, attended, seconds: of all steps, see `Reporter.add_step`.
    """

    sums: torch.Tensor
    count: torch.Tensor
    tokens: float = 0.0
    attended: float = 0.0
    seconds: float = 0.0
    steps: int = 0


@dataclass(frozen=True)
class Report:
    """The means of a window, the same on all ranks."""

    step: int
    loss: float | None
    """None if the gradients of no step were finite."""
    metrics: Mapping[str, float]
    """Metrics of the objective, by MLflow name; empty if the gradients of no step were finite."""
    skipped: int
    """Steps of the run whose gradients were not finite, except those that the scale of the loss may explain."""
    learning_rate: float
    grad_norm: float
    loss_scale: float | None
    """None if the loss is not scaled."""
    tokens_per_second: float
    seconds_remaining: float
    mfu: float | None
    """Model FLOP/s utilization, a share; None if the peak of the chip is unknown."""
    memory: float
    """Peak of the rank that uses most, in bytes."""


class Reporter:
    """Collects what happens in the steps without waiting for the GPU, and reports it.

    Args:
        world: the ranks, all of which report together.
        network: the sharded network.
        tracker: logs to MLflow.
        sinks: log to other trackers.
        max_steps: steps of the whole run.
        log_steps: steps between two reports.
        progress: where the attempt starts.
        started: when the attempt started, by `clock`.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        world: World,
        network: Network,
        tracker: Tracker,
        sinks: Sinks,
        max_steps: int,
        log_steps: int,
        progress: Progress,
        started: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._world = world
        self._tracker = tracker
        self._sinks = sinks
        self._max_steps = max_steps
        # The step at which the run ends; an early stop changes it.
        self._last_step = max_steps
        self._log_steps = log_steps
        self._objective = network.objective
        self._flops = speed.Flops(network)
        self._peak_flops = speed.peak_flops(world.device)
        # The time of earlier attempts counts too: the start is moved back by it.
        self._started = started - progress.elapsed_seconds
        self._productive_seconds = progress.productive_seconds
        self._checkpoint_seconds = 0.0
        self._skipped_before = progress.skipped_steps
        self._skipped = torch.zeros((), device=world.device)
        self._step_sums = self._make_sums()
        self._window = self._new_window()

    def start(self, progress: Progress) -> None:
        """Log the step at which this attempt starts."""
        step = progress.step
        self._sinks.start(step)
        self._log_metrics(step, {contract.METRIC_STEP: step, contract.METRIC_MAX_STEPS: self._max_steps})

    def add_batch(self, loss: torch.Tensor, metrics: torch.Tensor) -> None:
        """Add the summed loss and metrics of one batch of a step; the tensors stay on their device."""
        self._step_sums[0] += loss.detach()
        self._step_sums[1:] += metrics

    def add_step(
        self,
        is_finite: torch.Tensor,
        has_diverged: torch.Tensor,
        *,
        count: float,
        tokens: float,
        attended: float,
        seconds: float,
    ) -> None:
        """Add one optimizer step.

        Args:
            is_finite: from `StepResult`; the loss and the metrics of a step that is not finite are left out.
            has_diverged: from `StepResult`: whether the step counts as skipped.
            count: losses in the step, of all ranks.
            tokens: tokens that are not padding, of all ranks.
            attended: the sum of the squares of the documents' lengths, of all ranks.
            seconds: how long the step took.
        """
        window = self._window
        window.sums += torch.where(is_finite, self._step_sums, 0.0)
        window.count += is_finite * count
        self._skipped += has_diverged
        self._step_sums = self._make_sums()
        window.tokens += tokens
        window.attended += attended
        window.seconds += seconds
        window.steps += 1

    def sum_loss_since_report(self) -> float:
        """Return the summed loss of all ranks since the last report; waits for the GPU."""
        (loss,) = self._world.sum_over_ranks(self._window.sums[0].item())
        return loss

    def skipped(self) -> int:
        """Return the number of steps of the run that were skipped; waits for the GPU."""
        return self._skipped_before + int(self._skipped.item())

    def is_due(self, step: int) -> bool:
        """Whether to report after this step: every logEverySteps, and after the last step."""
        return step % self._log_steps == 0 or step == self._max_steps

    @property
    def has_unreported_steps(self) -> bool:
        """Whether steps were taken since the last report."""
        return self._window.steps > 0

    def close_window(
        self,
        step: int,
        *,
        learning_rate: float,
        grad_norm: Callable[[], float],
        loss_scale: Callable[[], float | None] = lambda: None,
    ) -> Report:
        """Close the window and return its means, and start a new window; waits for the GPU.

        Args:
            step: the last step of the window.
            learning_rate: of that step.
            grad_norm: reads the norm of that step's gradients.
            loss_scale: reads the scale of the loss, if it has one.
        """
        window, self._window = self._window, self._new_window()
        # NB: reading the loss waits for the GPU; that time belongs to the steps.
        read_started = self.clock()
        count = window.count.item()
        loss, *sums = self._world.sum_over_ranks(*window.sums.tolist())
        norm = grad_norm()
        window.seconds += self.clock() - read_started
        self._productive_seconds += window.seconds
        return Report(
            step=step,
            loss=loss / count if count else None,
            metrics=self._objective.means(sums, count) if count else {},
            skipped=self.skipped(),
            learning_rate=learning_rate,
            grad_norm=norm,
            loss_scale=loss_scale(),
            tokens_per_second=window.tokens / max(window.seconds, 1e-9),
            seconds_remaining=(self._last_step - step) * window.seconds / window.steps,
            mfu=self._compute_mfu(window),
            memory=self._world.max_over_ranks(speed.read_peak_memory(self._world.device)),
        )

    def log(self, report: Report, *, data_wait_seconds: float) -> None:
        """Print a report, and log it.

        Args:
            report: from `close_window`.
            data_wait_seconds: how long the steps of this attempt waited for batches.
        """
        step, last = report.step, self._max_steps
        loss = "loss -" if report.loss is None else f"loss {report.loss:.4f}"
        skipped = f"  skipped {report.skipped}" if report.skipped else ""
        scale = "" if report.loss_scale is None else f"  scale {report.loss_scale:g}"
        self._world.say(
            f"step {step}/{last}  {100 * step // last}%  {loss}  lr {report.learning_rate:.2e}  "
            f"grad {report.grad_norm:.2f}  {report.tokens_per_second:,.0f} tok/s  "
            f"mem {report.memory / 2**30:.1f} GiB  eta {_format_duration(report.seconds_remaining)}{scale}{skipped}"
        )
        self._log_metrics(
            step,
            {
                contract.METRIC_STEP: step,
                contract.METRIC_MAX_STEPS: last,
                contract.METRIC_LOSS: report.loss,
                contract.METRIC_LEARNING_RATE: report.learning_rate,
                contract.METRIC_GRAD_NORM: report.grad_norm,
                contract.METRIC_SKIPPED_STEPS: report.skipped,
                contract.METRIC_LOSS_SCALE: report.loss_scale,
                contract.METRIC_TOKENS_PER_SECOND: report.tokens_per_second,
                contract.METRIC_MFU: report.mfu,
                contract.METRIC_MEMORY: report.memory,
                contract.METRIC_DATA_WAIT: data_wait_seconds,
                contract.METRIC_CHECKPOINT_SECONDS: self._checkpoint_seconds,
                contract.METRIC_SECONDS_REMAINING: report.seconds_remaining,
                contract.METRIC_GOODPUT: self.goodput,
                contract.METRIC_PRODUCTIVE_SECONDS: self.productive_seconds,
                **report.metrics,
            },
        )

    def log_base_evaluation(self, evaluation: Evaluation) -> None:
        """Print and log the evaluation of the base model, before the first step."""
        loss = evaluation.loss
        self._log_metrics(
            0,
            {
                contract.METRIC_BASE_EVAL_LOSS: loss,
                contract.METRIC_EVAL_LOSS: loss,
                **_name_metrics(evaluation),
            },
        )
        self._world.say(f"evaluation before training: loss {loss:.4f}{_format_accuracy(evaluation)}")

    def log_evaluation(self, step: int, evaluation: Evaluation, perplexity: float | None) -> None:
        """Print and log an evaluation."""
        suffix = _format_accuracy(evaluation) if perplexity is None else f"  perplexity {perplexity:.2f}"
        self._world.say(f"evaluation at step {step}: loss {evaluation.loss:.4f}{suffix}")
        self._log_metrics(
            step,
            {
                contract.METRIC_EVAL_LOSS: evaluation.loss,
                contract.METRIC_EVAL_PERPLEXITY: perplexity,
                **_name_metrics(evaluation),
            },
        )

    def log_early_stop(self, step: int, evaluations: int) -> None:
        """Print that the run stops early after this step, and log that no time remains.

        Args:
            step: the last step of the run.
            evaluations: the number of evaluations whose loss did not fall.
        """
        self._last_step = step
        self._world.say(f"stopping early: the evaluation loss did not fall for {evaluations} evaluations")
        self._log_metrics(step, {contract.METRIC_SECONDS_REMAINING: 0.0})

    def log_final_evaluation(self, step: int, loss: float, perplexity: float | None) -> None:
        """Log the evaluation of the weights that are exported."""
        self._log_metrics(
            step,
            {
                contract.METRIC_FINAL_EVAL_LOSS: loss,
                contract.METRIC_FINAL_EVAL_PERPLEXITY: perplexity,
                contract.METRIC_GOODPUT: self.goodput,
                contract.METRIC_PRODUCTIVE_SECONDS: self.productive_seconds,
            },
        )

    @contextmanager
    def count_checkpoint_time(self) -> Iterator[None]:
        """Count the time inside as time for which training waited for a checkpoint."""
        started = self.clock()
        try:
            yield
        finally:
            self._checkpoint_seconds += self.clock() - started

    def add_times(self, progress: Progress) -> Progress:
        """Return the progress with the time that all attempts spent up to now."""
        return replace(
            progress,
            productive_seconds=self.productive_seconds,
            elapsed_seconds=self.clock() - self._started,
            skipped_steps=self.skipped(),
        )

    @property
    def productive_seconds(self) -> float:
        """Seconds of all attempts that were spent in steps whose result is kept."""
        return self._productive_seconds + self._window.seconds

    @property
    def goodput(self) -> float:
        """Share of the time of all attempts that was spent in steps whose result is kept."""
        return min(1.0, self.productive_seconds / max(self.clock() - self._started, 1e-9))

    def _log_metrics(self, step: int, values: Mapping[str, float | None]) -> None:
        self._tracker.metrics(step, values)
        self._sinks.metrics(step, values)

    def _new_window(self) -> Window:
        return Window(sums=self._make_sums(), count=torch.zeros((), device=self._world.device))

    def _make_sums(self) -> torch.Tensor:
        return torch.zeros(1 + self._objective.count_sums(), device=self._world.device)

    def _compute_mfu(self, window: Window) -> float | None:
        if self._peak_flops is None:
            return None
        flops_per_second = self._flops.count(window.tokens, window.attended) / max(window.seconds, 1e-9)
        return flops_per_second / (self._peak_flops * self._world.size)


def _name_metrics(evaluation: Evaluation) -> dict[str, float]:
    """Return the metrics of an evaluation by their names in MLflow."""
    return {f"{contract.EVAL_PREFIX}{name}": value for name, value in evaluation.metrics.items()}


def _format_accuracy(evaluation: Evaluation) -> str:
    accuracy = evaluation.metrics.get(contract.METRIC_REWARD_ACCURACY)
    return "" if accuracy is None else f"  accuracy {accuracy:.3f}"


def _format_duration(seconds: float) -> str:
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{seconds_left:02d}s" if minutes else f"{seconds_left}s"
