"""The MLflow run: created once for a job, found by the job's uid, and read for progress."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from finetune_crds import contract, quantity
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import MlflowStatus, ModelStatus, Progress
from finetune_crds.status_parts import PlanStatus
from finetune_operator import names, text
from finetune_operator.finetunejob.children import classify_children
from finetune_operator.finetunejob.decide import checkout, links
from finetune_operator.finetunejob.decide.phase import phase
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.model import EnsureRun, Mlflow
from finetune_operator.finetunejob.preparation import backends
from finetune_operator.finetunejob.references import is_unpinned
from finetune_operator.mlflow.model import Run
from finetune_operator.policy.result import Continue, Outcome

# The width of the column that shows the step of the preparation.
_MAX_STEP_CHARS = 24


@dataclass(frozen=True)
class Usable:
    """A run that the job logs to: the one in its status, or the one that replaces it."""

    run: Run


@dataclass(frozen=True)
class Absent:
    """The job has no run yet."""


@dataclass(frozen=True)
class Deleted:
    """The run in the status was deleted, and nothing logs to it."""


@dataclass(frozen=True)
class NotFound:
    """MLflow does not find the run in the status, and nothing logs to it."""

    run_id: str


@dataclass(frozen=True)
class LostInUse:
    """The run in the status was deleted or is not found, and the training logs to it."""

    run_id: str
    deleted_run: Run | None


RunState = Usable | Absent | Deleted | NotFound | LostInUse


def tracking_uri(draft: Draft) -> str:
    """The MLflow server of the job; empty for none."""
    return draft.settings.servers(draft.spec.tracking)[0]


def track(draft: Draft) -> Outcome:
    """Create the run if it does not exist, and copy its metrics into the status.

    Never ends the pass: while MLflow is unreachable, whatever needs no run continues, and so does training.
    """
    if not tracking_uri(draft):
        draft.set(
            ConditionType.TRACKED,
            False,
            ConditionReason.MLFLOW_NOT_CONFIGURED,
            "no MLflow server is configured: progress and the model appear only in the pods' logs",
        )
        return Continue
    draft.requeue_after(draft.settings.poll_seconds)
    mlflow = draft.observed.mlflow
    if mlflow is None:
        return Continue
    if mlflow.problem:
        draft.set(ConditionType.TRACKED, False, mlflow.problem.reason, mlflow.problem.message)
        return Continue
    match _classify_run(draft, mlflow):
        case Usable(run):
            _report_ready(draft, run)
            _copy_run(draft, run, mlflow.server)
        case LostInUse(run_id, deleted_run):
            _ask_to_restore(draft, run_id, deleted_run)
            if deleted_run:
                _copy_run(draft, deleted_run, mlflow.server)
        case NotFound(run_id):
            # NB: MLflow on replicas of a database finds a new run only after a while.
            if _report_not_found(draft, run_id) >= draft.settings.registration_patience_seconds:
                _create_run(draft)
        case Absent() | Deleted():
            _create_run(draft)
    return Continue


def _classify_run(draft: Draft, mlflow: Mlflow) -> RunState:
    """The state of the job's run in MLflow, which can be reached."""
    run_id, run, writable_run = draft.status.run_id, mlflow.run, mlflow.writable_run
    if writable_run and (run_id in (None, writable_run.run_id) or not _is_in_use(draft)):
        return Usable(writable_run)
    if run_id is None:
        return Absent()
    deleted_run = run if run and run.run_id == run_id else None
    if _is_in_use(draft):
        return LostInUse(run_id, deleted_run)
    return Deleted() if deleted_run else NotFound(run_id)


def _report_ready(draft: Draft, run: Run) -> None:
    run_id, before = draft.status.run_id, draft.condition(ConditionType.TRACKED)
    if run.run_id == run_id and before and before.reason == ConditionReason.RUN_REPLACED:
        return
    reason, message = ConditionReason.RUN_READY, f"MLflow run {run.run_id}"
    if run_id not in (None, run.run_id):
        reason, message = ConditionReason.RUN_REPLACED, f"MLflow run {run.run_id} replaces run {run_id}"
    draft.set(ConditionType.TRACKED, True, reason, message)


def _ask_to_restore(draft: Draft, run_id: str, deleted_run: Run | None) -> None:
    problem = "was deleted" if deleted_run else "cannot be found"
    message = f"MLflow run {run_id} {problem}: restore it, since the metrics and the model of this attempt belong to it"
    draft.set(ConditionType.TRACKED, False, ConditionReason.RUN_NOT_FOUND, message)


def _report_not_found(draft: Draft, run_id: str) -> float:
    """Report that MLflow does not find the run, and return the seconds for which it has not."""
    message = f"MLflow run {run_id} cannot be found: the operator checks again before it creates another run"
    return draft.set_since(ConditionType.TRACKED, ConditionReason.RUN_NOT_FOUND, message)


def _is_in_use(draft: Draft) -> bool:
    """Whether pods of the training log to the run, or have registered a version from it."""
    name = names.train_name(draft.ftj.name, draft.status.attempt or 1)
    attempt = classify_children(draft.observed.jobs, draft.observed.pods, names.TRAIN, name)
    return draft.holds(ConditionType.TRAINED) or attempt.current_job is not None or bool(attempt.stale_pods)


def may_train(draft: Draft) -> bool:
    """Whether training may start as far as tracking is concerned: the pods need the id of a run that exists."""
    if not tracking_uri(draft):
        return True
    tracked = draft.condition(ConditionType.TRACKED)
    lost = tracked is not None and tracked.reason == ConditionReason.RUN_NOT_FOUND
    return draft.status.run_id is not None and (not lost or _is_in_use(draft))


def _create_run(draft: Draft) -> None:
    """Have a run created, and forget the one in the status. The run names the commit and the versions that the job has pinned."""
    if checkout.is_unresolved(draft) or is_unpinned(draft.ftj):
        return
    draft.update(mlflow=None)
    draft.actions.append(_ensure_run(draft))


def _ensure_run(draft: Draft) -> EnsureRun:
    ftj, tracking = draft.ftj, draft.spec.tracking
    return EnsureRun(
        experiment=names.experiment(
            ftj.namespace, tracking, on_databricks=draft.settings.on_databricks(tracking)
        ),
        run_name=tracking.run_name or ftj.name,
        tags={
            **tracking.tags,
            **checkout.tags(draft),
            contract.TAG_JOB_UID: ftj.uid,
            contract.TAG_JOB: ftj.key,
        },
    )


def _copy_run(draft: Draft, run: Run, server: str) -> None:
    page = links.run_page(draft.settings, draft.spec.tracking, run.experiment_id, run.run_id, server)
    draft.update(mlflow=MlflowStatus(experiment_id=run.experiment_id, run_id=run.run_id, url=page))
    _copy_plan(draft, run)
    _copy_progress(draft, run)
    _copy_evaluation(draft, run)
    record_goodput(draft, run.metrics.get(contract.METRIC_GOODPUT))


def record_goodput(draft: Draft, share: float | None) -> None:
    """Record the share of the training time that was productive, if it is known."""
    goodput = round_finite(share, 4)
    if goodput is not None:
        draft.update(goodput=min(max(goodput, 0.0), 1.0))


def _copy_plan(draft: Draft, run: Run) -> None:
    plan = contract.MemoryPlan.parse(run.tags.get(contract.TAG_PLAN, ""))
    if plan is not None:
        after = PlanStatus(
            activation_checkpointing=plan.activation_checkpointing,
            memory=quantity.of_bytes(plan.memory_bytes),
            limit=quantity.of_bytes(plan.limit_bytes) if plan.limit_bytes is not None else None,
            host_memory=quantity.of_bytes(plan.staged_bytes) if plan.staged_bytes else None,
            parameters=plan.parameters,
            trained_parameters=plan.trained_parameters,
            four_bit_parameters=plan.four_bit_parameters,
        )
        draft.update(plan=after)


def _copy_progress(draft: Draft, run: Run) -> None:
    metrics = run.metrics
    losses = [name for name in (*contract.LOSSES, *contract.EVAL_LOSSES) if name in metrics]
    if contract.METRIC_STEP not in metrics and not losses:
        return
    step = to_count(metrics.get(contract.METRIC_STEP, _step_of(run, losses))) or 0
    max_steps = to_count(metrics.get(contract.METRIC_MAX_STEPS, run.planned_steps))
    before = draft.status.progress
    percent = min(100 * step // max_steps, 100) if max_steps else None
    seconds_remaining = to_count(metrics.get(contract.METRIC_SECONDS_REMAINING))
    eval_loss = _first_metric(metrics, (contract.METRIC_FINAL_EVAL_LOSS, *contract.EVAL_LOSSES))
    after = Progress(
        step=step,
        max_steps=max_steps,
        percent=percent,
        summary=f"{percent}%" if percent is not None else None,
        loss=round_finite(_first_metric(metrics, contract.LOSSES), 4),
        eval_loss=round_finite(eval_loss, 4),
        tokens_per_second=round_finite(metrics.get(contract.METRIC_TOKENS_PER_SECOND), 1),
        seconds_remaining=seconds_remaining,
        eta=text.format_duration(seconds_remaining) if seconds_remaining is not None else None,
        update_time=before.update_time if before else None,
    )
    # NB: the ETA is removed while no training runs; that is no report.
    if before is None or after != before.model_copy(update={"eta": after.eta}):
        after = after.model_copy(update={"update_time": draft.now})
    draft.update(progress=after)


def _first_metric(metrics: Mapping[str, float], metric_names: Sequence[str]) -> float | None:
    """The first of some metrics that the run has."""
    return next((metrics[name] for name in metric_names if name in metrics), None)


def _step_of(run: Run, losses: Sequence[str]) -> float:
    """The step of the newest loss, as MLflow counts it."""
    return max((run.steps.get(name, 0) for name in losses), default=0)


def clear_eta(draft: Draft) -> None:
    """Remove the remaining time of a training that does not run: it stopped, failed or is complete."""
    progress = draft.status.progress
    if progress and progress.eta and phase(draft.status.conditions) != "Training":
        draft.update(progress=progress.model_copy(update={"eta": None}))


def show_preparation(draft: Draft) -> None:
    """Show the step of the preparation while it runs, and remove it afterwards."""
    before, mlflow = draft.status.progress, draft.observed.mlflow
    run = mlflow.run if mlflow else None
    step = (
        backends.find_progress(draft.observed) or (run.tags.get(contract.TAG_PREPARATION, "") if run else "")
    )[:_MAX_STEP_CHARS]
    if phase(draft.status.conditions) != "Preparing":
        if before and before.summary and not (before.step or before.max_steps):
            draft.update(progress=None)
    elif step and (before is None or before.summary != step):
        draft.update(progress=Progress(summary=step, update_time=draft.now))


def _copy_evaluation(draft: Draft, run: Run) -> None:
    metrics = {
        "base_eval_loss": round_finite(run.metrics.get(contract.METRIC_BASE_EVAL_LOSS), 4),
        "eval_loss": round_finite(run.metrics.get(contract.METRIC_FINAL_EVAL_LOSS), 4),
        "perplexity": round_finite(run.metrics.get(contract.METRIC_FINAL_EVAL_PERPLEXITY), 4),
    }
    finite = {name: value for name, value in metrics.items() if value is not None}
    if finite:
        draft.update(model=(draft.status.model or ModelStatus()).model_copy(update=finite))


# NB: a diverged run has NaN and infinite metrics, which JSON, and so the status, cannot hold.
def round_finite(value: float | None, digits: int) -> float | None:
    """The number for the status; None when it is not finite."""
    return round(value, digits) if value is not None and math.isfinite(value) else None


def to_count(value: float | None) -> int | None:
    """The count for the status; None when it is not finite."""
    return max(int(value), 0) if value is not None and math.isfinite(value) else None
