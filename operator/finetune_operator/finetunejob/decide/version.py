"""The version that the trainer registers: nothing is evaluated or gets an alias before it exists."""

from __future__ import annotations

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import ModelStatus
from finetune_crds.tracking import Register
from finetune_operator.finetunejob.decide import attempt as attempts
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.policy.result import Continue, Outcome, Stop
from finetune_operator.registry.base import RegisteredVersion


def await_version(draft: Draft) -> Outcome:
    """Copy the version of this run to the status. Until MLflow finds it, each pass ends here, except to evaluate a recorded version."""
    registration = draft.spec.register_
    if registration is None or draft.holds(ConditionType.REGISTERED):
        return Continue
    mlflow = draft.observed.mlflow
    registered = mlflow.version if mlflow else None
    if registered:
        _record_version(draft, registered)
        return Continue
    needs_evaluation = draft.spec.evaluation is not None and not draft.holds(ConditionType.EVALUATED)
    if _was_registered(draft) and needs_evaluation:
        # The evaluation pod runs even if the operator cannot reach MLflow, and `evaluate` reports in its own condition what it waits for.
        return Continue
    if mlflow is None:
        if draft.condition(ConditionType.REGISTERED) is None:
            message = "registration waits for the first response of MLflow"
            draft.set(ConditionType.REGISTERED, False, ConditionReason.REGISTERING, message)
        draft.requeue_after(draft.settings.poll_seconds)
        return Stop
    if mlflow.problem:
        message = f"registration waits for MLflow: {mlflow.problem.message}"
        draft.set(ConditionType.REGISTERED, False, mlflow.problem.reason, message)
        draft.requeue_after(draft.settings.poll_seconds)
        return Stop
    return _wait(draft, registration)


def _was_registered(draft: Draft) -> bool:
    """Whether an earlier pass recorded a version."""
    return draft.status.model is not None and draft.status.model.version is not None


def _wait(draft: Draft, registration: Register) -> Outcome:
    """Wait for the version until it is overdue; then let another attempt register it, or fail the job."""
    if _was_registered(draft):
        wait_for_lost_version(draft, ConditionType.REGISTERED, ConditionReason.REGISTERING)
        return Stop
    waiting = f"waiting for a version of {registration.model}"
    waited = draft.set_since(ConditionType.REGISTERED, ConditionReason.REGISTERING, waiting)
    if waited < draft.settings.registration_patience_seconds:
        draft.requeue_after(draft.settings.poll_seconds)
        return Stop
    if _can_register_again(draft):
        attempt = draft.status.attempt or 1
        draft.unset(ConditionType.REGISTERED)
        why = f"attempt {attempt} ended without a READY version of {registration.model}; the next attempt registers the model again"
        attempts.restart(draft, attempt + 1, counted=True, why=why)
        return Stop
    run = draft.status.run_id
    message = (
        f"training ended without a version of {registration.model} from run {run}: create a FineTuneJob with another name whose script "
        "registers a version of the run in MLFLOW_RUN_ID, or that has no spec.register"
    )
    _fail(draft, message)
    return Stop


def _can_register_again(draft: Draft) -> bool:
    """Whether to register the model with another attempt: from a checkpoint, the built-in loop repeats only the steps after it.

    A custom command might repeat the whole training.
    """
    saved = draft.status.checkpoint is not None and draft.status.checkpoint.step is not None
    remaining_restarts = draft.spec.run_policy.max_restarts - (draft.status.restarts or 0)
    return saved and remaining_restarts > 0 and not draft.spec.trainer.command


def wait_for_lost_version(draft: Draft, kind: ConditionType, reason: ConditionReason) -> None:
    """Wait for a recorded version that MLflow no longer finds, and fail the job if it does not reappear in time.

    Args:
        kind: the condition that reports the wait and the time at which it began.
        reason: the reason of that condition.
    """
    model, run = draft.status.model or ModelStatus(), draft.status.run_id
    message = f"version {model.version} of {model.name} cannot be found from run {run}"
    if draft.set_since(kind, reason, f"{message}: retrying") < draft.settings.registration_patience_seconds:
        draft.requeue_after(draft.settings.poll_seconds)
        return
    _fail(
        draft, f"{message}: the version or the run was deleted; create a FineTuneJob with another name", kind
    )


def _fail(draft: Draft, message: str, kind: ConditionType = ConditionType.REGISTERED) -> None:
    draft.set(kind, False, ConditionReason.REGISTRATION_FAILED, message)
    draft.fail(ConditionReason.REGISTRATION_FAILED, message)


def _record_version(draft: Draft, registered: RegisteredVersion) -> None:
    """Record the registered version. The evaluation of another version is forgotten."""
    before = draft.status.model or ModelStatus()
    if before.version not in (None, registered.version):
        # The metrics of the version that was recorded before do not apply to the new version.
        draft.update(evaluation=None)
        draft.unset(ConditionType.EVALUATED)
    draft.update(
        model=before.model_copy(
            update={
                "name": registered.name,
                "version": registered.version,
                "uri": f"models:/{registered.name}/{registered.version}",
                "summary": f"{registered.name}/{registered.version}",
                "aliases": sorted(registered.aliases) or None,
            }
        )
    )
