"""The version that the trainer registers: nothing is evaluated or gets an alias before it exists."""

from __future__ import annotations

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.finetunejob import Register
from finetune_crds.status import ModelStatus
from finetune_operator.finetunejob.decide.draft import Draft
from finetune_operator.policy.outcome import Continue, Outcome, Stop
from finetune_operator.registry.base import RegisteredVersion


def version(draft: Draft) -> Outcome:
    """Copy the version of this run to the status; the pass ends until it exists."""
    wanted = draft.spec.register_
    if wanted is None or draft.holds(ConditionType.REGISTERED):
        return Continue
    seen = draft.observed.mlflow
    found = seen.version if seen else None
    if found:
        _copy(draft, found)
        return Continue
    if _is_at_work(draft):
        return Continue
    if seen is None or seen.problem:
        reason, why = ConditionReason.REGISTERING, "MLflow has not been asked yet"
        if seen and seen.problem:
            reason, why = seen.problem.reason, seen.problem.message
        draft.set(ConditionType.REGISTERED, False, reason, f"registration waits for MLflow: {why}")
        draft.requeue_after(draft.settings.poll_seconds)
        return Stop
    return _wait(draft, wanted)


def _is_at_work(draft: Draft) -> bool:
    """Whether the evaluation pod still has to bring its numbers, for which the operator needs no MLflow."""
    known = draft.status.model
    pending = draft.spec.evaluation is not None and draft.status.evaluation is None
    return pending and known is not None and known.version is not None


def _wait(draft: Draft, wanted: Register) -> Outcome:
    trained = draft.condition(ConditionType.TRAINED)
    waited = (draft.now - trained.last_transition_time).total_seconds() if trained else 0.0
    if waited < draft.settings.registration_patience_seconds:
        draft.set(
            ConditionType.REGISTERED,
            False,
            ConditionReason.REGISTERING,
            f"waiting for a version of {wanted.model}",
        )
        draft.requeue_after(draft.settings.poll_seconds)
        return Stop
    if draft.spec.evaluation and draft.status.model and draft.status.model.version:
        fail_without(draft)
        return Stop
    run = draft.status.run_id
    message = (
        f"training ended without a version of {wanted.model} from run {run}: have the script register one from "
        "MLFLOW_RUN_ID, or remove spec.register"
    )
    _fail(draft, message)
    return Stop


def fail_without(draft: Draft) -> None:
    """Fail a job whose version existed and does not any more."""
    known = draft.status.model or ModelStatus()
    _fail(
        draft,
        f"version {known.version} of {known.name} no longer exists: create a FineTuneJob with another name",
    )


def _fail(draft: Draft, message: str) -> None:
    draft.set(ConditionType.REGISTERED, False, ConditionReason.REGISTRATION_FAILED, message)
    draft.fail(ConditionReason.REGISTRATION_FAILED, message)


def _copy(draft: Draft, found: RegisteredVersion) -> None:
    before = draft.status.model or ModelStatus()
    if before.version not in (None, found.version):
        # Numbers of another version say nothing about this one.
        draft.update(evaluation=None)
        draft.unset(ConditionType.EVALUATED)
    draft.update(
        model=before.model_copy(
            update={
                "name": found.name,
                "version": found.version,
                "uri": f"models:/{found.name}/{found.version}",
                "summary": f"{found.name}/{found.version}",
                "aliases": sorted(found.aliases) or None,
            }
        )
    )
