"""The backends of preparations, and functions that call the backend of a job, or all backends."""

from __future__ import annotations

from collections.abc import Mapping

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.status import FineTuneJobStatus
from finetune_operator import names
from finetune_operator.errors import Problem
from finetune_operator.finetunejob.decision import Decision
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.model import FineTuneJob, Observed
from finetune_operator.finetunejob.preparation.backend import Backend, CustomKind
from finetune_operator.finetunejob.preparation.databricks import DatabricksBackend
from finetune_operator.finetunejob.preparation.prep_job import JobBackend
from finetune_operator.finetunejob.preparation.spark_application import SparkApplicationBackend

BACKENDS: tuple[Backend, ...] = (JobBackend(), SparkApplicationBackend(), DatabricksBackend())


def find_backend(spec: FineTuneJobSpec | None) -> Backend | None:
    """The backend of a spec; None if nothing is prepared, or if the spec cannot be read.

    Raises:
        ValueError: no backend has the mode.
    """
    if spec is None or spec.prepare is None:
        return None
    mode = spec.prepare.spark.mode
    for backend in BACKENDS:
        if mode in backend.modes:
            return backend
    raise ValueError(f"no backend runs data.prepare.spark.mode {mode}")


def has_to_prepare(ftj: FineTuneJob, jobs: Mapping[str, Json]) -> bool:
    """Whether the job, if it prepares data, still has to start the preparation: only such a job needs a Lease.

    Args:
        jobs: its child Jobs, by name.
    """
    if ftj.spec is None or ftj.spec.suspend or ftj.is_finished or ftj.holds(ConditionType.PREPARED):
        return False
    return not any(backend.has_begun(ftj, jobs) for backend in BACKENDS)


def stop(draft: Draft) -> str | None:
    """Stop what runs outside of Jobs, and return what to wait for; None if nothing is left."""
    waits = [waiting for backend in _list_candidates(draft) if (waiting := backend.stop(draft))]
    return waits[0] if waits else None


def clean_up(draft: Draft) -> None:
    """Delete what still runs after the preparation completed."""
    for backend in _list_candidates(draft):
        backend.clean_up(draft)


def _list_candidates(draft: Draft) -> tuple[Backend, ...]:
    """Return the backend of the job. Without one, or if the spec cannot be read, return all: their callers do not need the spec."""
    backend = find_backend(draft.ftj.spec)
    return (backend,) if backend else BACKENDS


def find_custom_kind(kind: str) -> CustomKind | None:
    """The custom kind of this name, if a backend has one."""
    custom_kinds = [backend.custom_kind for backend in BACKENDS if backend.custom_kind]
    return next((item for item in custom_kinds if item.name == kind), None)


def list_leftover_kinds(ftj: FineTuneJob) -> tuple[str, ...]:
    """Return the kinds of children that a finished job may have left, in addition to the kinds that every job has.

    Pods are among them, because the FineTuneJob itself controls the driver of a custom object.
    """
    backend = find_backend(ftj.spec)
    return (backend.custom_kind.name, "Pod") if backend and backend.custom_kind else ()


def find_kind_to_read(ftj: FineTuneJob) -> CustomKind | None:
    """The custom kind whose objects this pass must read; None without one."""
    backend = find_backend(ftj.spec)
    return backend.custom_kind if backend and backend.reads_custom_kind(ftj) else None


def set_finalizer(draft: Draft) -> None:
    """Add the operator's finalizer while a run outside the cluster may exist, and remove it otherwise."""
    is_needed = any(backend.needs_finalizer(draft.status) for backend in BACKENDS)
    if is_needed != (names.RUN_FINALIZER in draft.ftj.finalizers):
        draft.finalizer = is_needed


def release(draft: Draft) -> None:
    """Cancel the run of a job that is being deleted, and remove the finalizer when the run has ended.

    If the spec cannot be read, only report what a user can do instead.
    """
    if draft.ftj.spec is None:
        message = (
            f"this version of the operator cannot read the spec ({draft.ftj.invalid}), so the operator cannot cancel the Databricks run: "
            f"cancel the run in the workspace and remove the finalizer {names.RUN_FINALIZER}, or install a version of the operator that "
            "can read the spec"
        )
        draft.set(ConditionType.PREPARED, False, ConditionReason.SPEC_UNREADABLE, message)
        return
    backend = find_backend(draft.ftj.spec)
    if backend is None:
        draft.finalizer = False
    else:
        backend.release(draft)


def may_release(ftj: FineTuneJob, problem: Problem) -> bool:
    """Whether a job may be deleted although its run cannot be read."""
    return any(backend.may_release(ftj, problem) for backend in BACKENDS)


def record_run(decision: Decision, run_id: str | None) -> Decision:
    """The decision, updated after a run was submitted or canceled; `run_id` is None if there was no run to cancel."""
    for backend in BACKENDS:
        decision = backend.record_run(decision, run_id)
    return decision


def record_refusal(status: FineTuneJobStatus) -> FineTuneJobStatus:
    """The status, updated after the submission of a run was refused for good."""
    for backend in BACKENDS:
        status = backend.record_refusal(status)
    return status


def find_page(status: FineTuneJobStatus) -> str | None:
    """The page of the preparation, for a browser."""
    return next((page for backend in BACKENDS if (page := backend.find_page(status))), None)


def find_progress(observed: Observed) -> str:
    """Return the step that the preparation reports by itself; empty if it reports to MLflow."""
    return next((step for backend in BACKENDS if (step := backend.find_progress(observed))), "")
