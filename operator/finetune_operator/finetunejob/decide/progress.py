"""Copies the memory plan, progress, evaluation and goodput of a job from the metrics and tags of its MLflow run to the status."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from finetune_crds import contract, quantity
from finetune_crds.status import ModelStatus, Progress
from finetune_crds.status_parts import PlanStatus
from finetune_operator import text
from finetune_operator.finetunejob.decide.phase import phase
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.preparation import backends
from finetune_operator.mlflow.model import Run

# The width of the column that shows the step of the preparation.
_MAX_PREPARATION_STEP_CHARS = 24
LOSS_DIGITS = 4
"""Decimal places of losses, of the perplexity, and of the goodput (a share) in the status."""


def copy_metrics(draft: Draft, run: Run) -> None:
    """Copy the memory plan, progress, evaluation and goodput of a run into the status."""
    _copy_plan(draft, run)
    _copy_progress(draft, run)
    _copy_evaluation(draft, run)
    record_goodput(
        draft,
        run.metrics.get(contract.METRIC_GOODPUT),
        run.metrics.get(contract.METRIC_PRODUCTIVE_SECONDS),
    )


def record_goodput(draft: Draft, share: float | None, productive_seconds: float | None) -> None:
    """Record the productive part of the training time, as a share and in seconds; what is unknown stays as it is."""
    goodput = round_finite(share, LOSS_DIGITS)
    if goodput is not None:
        draft.update(goodput=min(max(goodput, 0.0), 1.0))
    seconds = to_count(productive_seconds)
    if seconds is not None:
        draft.update(productive_seconds=seconds)


def _copy_plan(draft: Draft, run: Run) -> None:
    plan = contract.MemoryPlan.parse(run.tags.get(contract.TAG_PLAN, ""))
    if plan is not None:
        after = PlanStatus(
            activation_checkpointing=plan.activation_checkpointing,
            memory=quantity.format_bytes(plan.memory_bytes),
            limit=quantity.format_bytes(plan.limit_bytes) if plan.limit_bytes is not None else None,
            host_memory=quantity.format_bytes(plan.staged_bytes) if plan.staged_bytes else None,
            parameters=plan.parameters,
            trained_parameters=plan.trained_parameters,
            four_bit_parameters=plan.four_bit_parameters,
        )
        draft.update(plan=after)


def _copy_progress(draft: Draft, run: Run) -> None:
    """Record the step, the losses and the speed of the training. Without a step or a loss in the run, keep the recorded progress."""
    metrics = run.metrics
    loss_names = [name for name in (*contract.LOSSES, *contract.EVAL_LOSSES) if name in metrics]
    if contract.METRIC_STEP not in metrics and not loss_names:
        return
    # The loggers of other trainers may report no step, but MLflow has the steps of their losses.
    step = to_count(metrics.get(contract.METRIC_STEP, _newest_step(run, loss_names))) or 0
    max_steps = to_count(metrics.get(contract.METRIC_MAX_STEPS, run.planned_steps or _read_parameter(draft)))
    before = draft.status.progress
    percent = min(100 * step // max_steps, 100) if max_steps else None
    seconds_remaining = to_count(metrics.get(contract.METRIC_SECONDS_REMAINING))
    eval_loss = _first_metric(metrics, (contract.METRIC_FINAL_EVAL_LOSS, *contract.EVAL_LOSSES))
    after = Progress(
        step=step,
        max_steps=max_steps,
        percent=percent,
        summary=f"{percent}%" if percent is not None else None,
        loss=round_finite(_first_metric(metrics, contract.LOSSES), LOSS_DIGITS),
        eval_loss=round_finite(eval_loss, LOSS_DIGITS),
        tokens_per_second=round_finite(metrics.get(contract.METRIC_TOKENS_PER_SECOND), 1),
        seconds_remaining=seconds_remaining,
        eta=text.format_duration(seconds_remaining) if seconds_remaining is not None else None,
        update_time=before.update_time if before else None,
    )
    # NB: the ETA is not compared: if only the ETA differs, `clear_eta` has removed it, and the trainer has reported nothing new.
    has_news = before is None or after != before.model_copy(update={"eta": after.eta})
    if has_news:
        after = after.model_copy(update={"update_time": draft.now})
    draft.update(progress=after)


def _read_parameter(draft: Draft) -> float | None:
    """The number of steps among the parameters of a custom command, which scripts that log no such metric read too; None without it."""
    value = draft.spec.trainer.parameters.get(contract.PARAM_MAX_STEPS)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        return None
    return float(value)


def _first_metric(metrics: Mapping[str, float], metric_names: Sequence[str]) -> float | None:
    """The first of some metrics that the run has."""
    return next((metrics[name] for name in metric_names if name in metrics), None)


def _newest_step(run: Run, metric_names: Sequence[str]) -> float:
    """The latest step for which MLflow has one of these metrics."""
    return max((run.steps.get(name, 0) for name in metric_names), default=0)


def complete_progress(draft: Draft, step: int) -> None:
    """Record in the progress that training has completed its last step, `step`. Without progress, or after a later step, do nothing."""
    progress = draft.status.progress
    if progress and step >= progress.step:
        finished = {
            "step": step,
            "max_steps": step,
            "percent": 100,
            "summary": "100%",
            "seconds_remaining": 0,
        }
        draft.update(progress=progress.model_copy(update=finished))


def clear_eta(draft: Draft) -> None:
    """Remove the remaining time of a training that does not run: it stopped, failed or is complete."""
    progress = draft.status.progress
    if progress and progress.eta and phase(draft.status.conditions) != "Training":
        draft.update(progress=progress.model_copy(update={"eta": None}))


def show_preparation(draft: Draft) -> None:
    """While the preparation runs, show its step in the summary of the progress. Remove the step afterwards."""
    before, mlflow = draft.status.progress, draft.observed.mlflow
    if phase(draft.status.conditions) != "Preparing":
        # Progress with numbers of steps is that of the training: keep it.
        shows_training = before is not None and bool(before.step or before.max_steps)
        if before and before.summary and not shows_training:
            draft.update(progress=None)
        return
    run = mlflow.run if mlflow else None
    step_in_run = run.tags.get(contract.TAG_PREPARATION, "") if run else ""
    summary = (backends.find_progress(draft.observed) or step_in_run)[:_MAX_PREPARATION_STEP_CHARS]
    if summary and (before is None or before.summary != summary):
        draft.update(progress=Progress(summary=summary, update_time=draft.now))


def _copy_evaluation(draft: Draft, run: Run) -> None:
    metrics = {
        "base_eval_loss": round_finite(run.metrics.get(contract.METRIC_BASE_EVAL_LOSS), LOSS_DIGITS),
        "eval_loss": round_finite(run.metrics.get(contract.METRIC_FINAL_EVAL_LOSS), LOSS_DIGITS),
        "perplexity": round_finite(run.metrics.get(contract.METRIC_FINAL_EVAL_PERPLEXITY), LOSS_DIGITS),
    }
    finite = {name: value for name, value in metrics.items() if value is not None}
    if finite:
        draft.update(model=(draft.status.model or ModelStatus()).model_copy(update=finite))


# NB: a diverged run has NaN and infinite metrics, which JSON, and so the status, cannot hold.
def round_finite(value: float | None, digits: int) -> float | None:
    """Round a number for the status; None if it is not finite."""
    return round(value, digits) if value is not None and math.isfinite(value) else None


def to_count(value: float | None) -> int | None:
    """Convert a number to a count of at least 0; None if it is not finite."""
    return max(int(value), 0) if value is not None and math.isfinite(value) else None
