"""The MLflow run: created once for a job, and found by the job's uid."""

from __future__ import annotations

from dataclasses import dataclass

from finetune_crds import contract
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import MlflowStatus
from finetune_operator import names
from finetune_operator.finetunejob.children import classify_children
from finetune_operator.finetunejob.decide import checkout, links, progress
from finetune_operator.finetunejob.decision import EnsureRun
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.model import Mlflow
from finetune_operator.finetunejob.references import is_unpinned
from finetune_operator.mlflow.model import Run
from finetune_operator.policy.result import Continue, Outcome


@dataclass(frozen=True)
class Usable:
    """A run that the job logs to: the run in the job's status, or the run that this status is about to name."""

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
    """The run in the status was deleted or is not found, and the training logs to it.

    Attributes:
        deleted_run: the run, if it was deleted; None if it is not found.
    """

    run_id: str
    deleted_run: Run | None


RunState = Usable | Absent | Deleted | NotFound | LostInUse


def tracking_uri(draft: Draft) -> str:
    """The address of the job's MLflow server; empty without one."""
    server, _registry = draft.settings.servers(draft.spec.tracking)
    return server


def track(draft: Draft) -> Outcome:
    """Create the run if it does not exist, and copy its metrics into the status.

    Never ends the pass: while MLflow is unreachable, training and all steps that need no run continue.
    """
    if not tracking_uri(draft):
        draft.set(
            ConditionType.TRACKED,
            False,
            ConditionReason.MLFLOW_NOT_CONFIGURED,
            "no MLflow server is configured: progress and the model appear only in the pods' logs",
        )
        return Continue
    draft.poll()
    mlflow = draft.observed.mlflow
    if mlflow is None:
        # NB: the creation finds a run that an interrupted pass has created, so MLflow is not read before the first one.
        if not draft.ftj.has_requested_run:
            _create_run(draft)
        # Otherwise, MLflow was not read since the status was written: keep the condition.
        return Continue
    if mlflow.problem:
        draft.set(ConditionType.TRACKED, False, mlflow.problem.reason, mlflow.problem.message)
        return Continue
    _follow_run(draft, mlflow)
    return Continue


def _follow_run(draft: Draft, mlflow: Mlflow) -> None:
    """Report the state of the run, and create a run if the job has none that it can log to."""
    match _classify_run(draft, mlflow):
        case Usable(run):
            _report_ready(draft, run)
            _copy_run(draft, run, mlflow.server)
        case LostInUse(run_id, deleted_run):
            _ask_to_restore(draft, run_id, deleted_run)
            if deleted_run:
                _copy_run(draft, deleted_run, mlflow.server)
        case NotFound(run_id):
            # NB: if MLflow reads from database replicas, it finds a new run only after a delay, so the run is not replaced at once.
            if _report_not_found(draft, run_id) >= draft.settings.registration_patience_seconds:
                _create_run(draft)
        case Absent() | Deleted():
            _create_run(draft)


def _classify_run(draft: Draft, mlflow: Mlflow) -> RunState:
    """Classify the job's run, after MLflow was read without a problem."""
    run_id, run, writable_run = draft.status.run_id, mlflow.run, mlflow.writable_run
    # While pods log to the run in the status, no other run replaces it.
    is_replaceable = run_id is None or not _is_in_use(draft)
    if writable_run and (writable_run.run_id == run_id or is_replaceable):
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
        # The message that names both runs stays.
        return
    reason, message = ConditionReason.RUN_READY, f"MLflow run {run.run_id}"
    if run_id not in (None, run.run_id):
        reason, message = ConditionReason.RUN_REPLACED, f"MLflow run {run.run_id} replaces run {run_id}"
    draft.set(ConditionType.TRACKED, True, reason, message)


def _ask_to_restore(draft: Draft, run_id: str, deleted_run: Run | None) -> None:
    problem = "was deleted" if deleted_run else "cannot be found"
    message = f"MLflow run {run_id} {problem}: restore the run, since the metrics and the model of this attempt belong to it"
    draft.set(ConditionType.TRACKED, False, ConditionReason.RUN_NOT_FOUND, message)


def _report_not_found(draft: Draft, run_id: str) -> float:
    """Report that MLflow does not find the run, and return for how many seconds this has been reported."""
    message = f"MLflow run {run_id} cannot be found: the operator checks again before it creates another run"
    return draft.set_since(ConditionType.TRACKED, ConditionReason.RUN_NOT_FOUND, message)


def _is_in_use(draft: Draft) -> bool:
    """Whether pods of the training may log to the run, or have completed the training and may have registered a version from the run."""
    name = names.train_name(draft.ftj.name, draft.status.attempt or 1)
    children = classify_children(draft.observed.jobs, draft.observed.pods, names.TRAIN, name, draft.now)
    may_log = children.current_job is not None or bool(children.stale_pods)
    return draft.holds(ConditionType.TRAINED) or may_log


def may_train(draft: Draft) -> bool:
    """Whether tracking allows the training: a new attempt needs a run that exists; an attempt that logs to a lost run continues."""
    if not tracking_uri(draft):
        return True
    tracked = draft.condition(ConditionType.TRACKED)
    lost = tracked is not None and tracked.reason == ConditionReason.RUN_NOT_FOUND
    return draft.status.run_id is not None and (not lost or _is_in_use(draft))


def report_wait(draft: Draft) -> None:
    """Report that the training waits for MLflow, because `may_train` is False."""
    tracked = draft.condition(ConditionType.TRACKED)
    reason, why = ConditionReason.STARTING, "the MLflow run is being created"
    if tracked and tracked.status == "False":
        reason, why = ConditionReason(tracked.reason), tracked.message
    draft.set(ConditionType.TRAINED, False, reason, f"training waits for MLflow: {why}")


def _create_run(draft: Draft) -> None:
    """Request a new run, in place of any run in the status, once the commit and the versions that the run names are known."""
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
    # The run of a sweep has no metrics: the runs of its trials have them.
    if draft.spec.sweep is None:
        progress.copy_metrics(draft, run)
