"""The candidate: the version that the source names now."""

from __future__ import annotations

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.modelpromotion import ModelPromotionSpec
from finetune_operator.modelpromotion.decide.approval import forget_waits
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.modelpromotion.decide.registry_copy import describe_source, follow_copy, forget_copy
from finetune_operator.modelpromotion.model import SourceJob
from finetune_operator.modelpromotion.versions import named_version
from finetune_operator.policy.result import Continue, Outcome, Stop


def resolve_candidate(draft: Draft) -> Outcome:
    """Set the candidate, or report what the source waits for; until it names a version, the last candidate stays. Always continues the pass."""
    spec, observed = draft.spec, draft.observed
    version = named_version(spec, observed)
    wait = follow_copy(draft, spec.source.registry)
    if wait:
        _wait(draft, *wait)
    elif observed.model is None:
        _wait(draft, *_explain_missing_model(spec, observed.job))
    elif version is None and spec.source.alias:
        _wait(draft, ConditionReason.WAITING_FOR_ALIAS, f"{spec.model} has no alias {spec.source.alias} yet")
    elif version is None:
        _wait(draft, *_explain_job(spec.source.job_name, spec.model, observed.job))
    elif observed.lacks(version):
        draft.update(candidate=None)
        forget_copy(draft)
        _wait(draft, ConditionReason.WAITING_FOR_VERSION, f"{spec.model} has no version {version}")
    elif (candidate := observed.versions.get(version)) and not candidate.ready:
        draft.update(candidate=version)
        _wait(draft, ConditionReason.WAITING_FOR_VERSION, f"{spec.model} version {version} is not ready yet")
    else:
        draft.update(candidate=version, source=_describe_source(spec))
        draft.set(
            ConditionType.SOURCE_READY,
            True,
            ConditionReason.SOURCE_RESOLVED,
            _describe_candidate(spec, version),
        )
    return Continue


def require_model(draft: Draft) -> Outcome:
    """End the pass while the model does not exist.

    NB: a missing model is not treated as deleted, since the spec may point to another registry for a time. When a model appears,
    `identity` decides whether it is the same.
    """
    if draft.observed.model is not None:
        return Continue
    forget_waits(draft)
    if draft.status.registry is None:
        # The promotion is new, or an older version of the operator wrote the status without an identity to compare: start over.
        draft.update(promoted=None, previous=None, candidate=None, watch_start_time=None)
        draft.update(rollback=None, gates=None, gate_results=[], journal=None)
        draft.unset(ConditionType.DRIFTED, ConditionType.GATES_PASSED)
    condition = draft.condition(ConditionType.SOURCE_READY)
    if condition is None:
        draft.stop(ConditionReason.WAITING_FOR_MODEL, "the model does not exist")
    else:
        draft.stop(ConditionReason(condition.reason), condition.message)
    return Stop


def require_candidate(draft: Draft) -> Outcome:
    """End the pass while the source names no usable version, unless its last version is already promoted."""
    if draft.holds(ConditionType.SOURCE_READY):
        return Continue
    condition = draft.condition(ConditionType.SOURCE_READY)
    status = draft.status
    is_promoted = status.promoted is not None and status.promoted == status.candidate
    is_same_source = status.source == _describe_source(draft.spec)
    # The source alias, job or registry may be deleted once its version is promoted; a missing version is always reported.
    is_dispensable = condition is not None and condition.reason in (
        ConditionReason.WAITING_FOR_ALIAS,
        ConditionReason.WAITING_FOR_JOB,
        ConditionReason.SOURCE_UNREADABLE,
    )
    if condition and not (is_promoted and is_same_source and is_dispensable):
        forget_waits(draft)
        draft.stop(ConditionReason(condition.reason), condition.message)
        return Stop
    return Continue


def _wait(draft: Draft, reason: ConditionReason, message: str) -> None:
    draft.set(ConditionType.SOURCE_READY, False, reason, message)


def _describe_source(spec: ModelPromotionSpec) -> str:
    if spec.source.alias:
        return f"alias {spec.source.alias}"
    if spec.source.registry:
        return describe_source(spec.source.registry)
    return f"FineTuneJob {spec.source.job_name}" if spec.source.fine_tune_job_ref else "the source"


def _describe_candidate(spec: ModelPromotionSpec, version: str) -> str:
    source = _describe_source(spec)
    if spec.source.alias:
        return f"{source} points at version {version}"
    if spec.source.registry:
        return f"version {version} is the copy of {source}"
    return (
        f"{source} registered version {version}"
        if spec.source.fine_tune_job_ref
        else f"{source} is version {version}"
    )


def _explain_missing_model(spec: ModelPromotionSpec, job: SourceJob | None) -> tuple[ConditionReason, str]:
    """Explain that the source job has not registered the model's first version, or that nobody has created the model."""
    if spec.source.fine_tune_job_ref and (job is None or job.phase != "Succeeded"):
        return _explain_job(spec.source.job_name, spec.model, job)
    return ConditionReason.WAITING_FOR_MODEL, f"registered model {spec.model} does not exist"


def _explain_job(name: str, model: str, job: SourceJob | None) -> tuple[ConditionReason, str]:
    """Explain why a job names no version of the model: it does not exist, has not succeeded, or registered something else."""
    if job is None:
        return ConditionReason.WAITING_FOR_JOB, f"FineTuneJob {name} does not exist in this namespace"
    if job.phase == "Failed":
        return (
            ConditionReason.JOB_FAILED,
            f"FineTuneJob {name} has failed and has no version to promote: set spec.source to another FineTuneJob",
        )
    if job.phase != "Succeeded":
        return ConditionReason.WAITING_FOR_JOB, f"FineTuneJob {name} is {job.phase}"
    if job.elsewhere:
        return ConditionReason.JOB_FAILED, (
            f"FineTuneJob {name} registered its version in {job.elsewhere}, which is another registry: create a ModelPromotion with "
            "another name and that registry in spec.tracking"
        )
    if job.version is None:
        return (
            ConditionReason.JOB_FAILED,
            f"FineTuneJob {name} registered no version: set spec.source to a FineTuneJob with spec.register",
        )
    return (
        ConditionReason.JOB_FAILED,
        f"FineTuneJob {name} registered a version of {job.model}, not of {model}: set spec.source to a FineTuneJob that registers {model}, or "
        f"create a ModelPromotion of {job.model}",
    )
