"""The summary conditions of a FineTuneJob, which kstatus and `kubectl wait` read.

Ready: the job has succeeded. Stalled: it has failed, or waits for a change of its spec. Reconciling: it runs, or waits for anything else.
Finished: it has succeeded or failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_crds.status import FineTuneJobStatus
from finetune_crds.status_parts import Phase
from finetune_operator.finetunejob.decide.phase import phase
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.policy.ready import Readiness, summarize

# For each phase: the conditions that explain it, the most specific first.
_EXPLANATIONS: dict[Phase, tuple[ConditionType, ...]] = {
    "Failed": (ConditionType.FAILED,),
    "Succeeded": (ConditionType.SUCCEEDED,),
    "Suspended": (ConditionType.SUSPENDED,),
    "Registering": (ConditionType.REGISTERED, ConditionType.TRAINED),
    "Evaluating": (ConditionType.EVALUATED,),
    "Training": (ConditionType.TRAINED,),
    "Starting": (ConditionType.TRAINED,),
    "Preparing": (ConditionType.PREPARED,),
    "Queued": (ConditionType.EVALUATED, ConditionType.TRAINED, ConditionType.PREPARED),
    "Pending": (ConditionType.TRAINED, ConditionType.PREPARED, ConditionType.ACCEPTED),
}
# The conditions of the summary that are set in addition to Ready; in other phases, Reconciling or Stalled.
_SUMMARY_CONDITIONS: dict[Phase, tuple[ConditionType, ...]] = {
    "Succeeded": (ConditionType.FINISHED,),
    "Failed": (ConditionType.STALLED, ConditionType.FINISHED),
}
_SETTLED: tuple[Phase, ...] = ("Failed", "Succeeded", "Suspended")
OBSTACLES = (
    ConditionType.ACCEPTED,
    ConditionType.CODE_RESOLVED,
    ConditionType.PODS_ADMITTED,
    ConditionType.MODELS_FOUND,
    ConditionType.CHECKPOINT_FOUND,
    ConditionType.PODS_HEALTHY,
)
"""Conditions that explain a delay better than the conditions of the phase. The first condition that is not true is reported."""
# Reasons of obstacles that only a change of the spec removes or, for a spec that is not permitted, of the tenancy.
_SPEC_CHANGE_REASONS: tuple[str, ...] = (
    ConditionReason.INVALID_SPEC,
    ConditionReason.NOT_PERMITTED,
    ConditionReason.POD_TEMPLATE_INVALID,
)


def summarize_status(ftj: FineTuneJob, status: FineTuneJobStatus, now: datetime) -> FineTuneJobStatus:
    """Add to the status what follows from its conditions: the phase, the summary, and the observed generation."""
    conditions = status.conditions
    after = summarize(
        status, assess_readiness(conditions), phase(conditions), now=now, generation=ftj.generation
    )
    return after.model_copy(update={"phase_time": _find_phase_time(ftj, after.phase, now)})


def _find_phase_time(ftj: FineTuneJob, after: Phase | None, now: datetime) -> datetime | None:
    """When the job entered the phase; None if an earlier version of the operator wrote this phase without the time."""
    before = ftj.status
    if after == before.phase:
        return before.phase_time
    if before.phase is None and after == "Pending":
        return ftj.created or now.replace(microsecond=0)
    return now.replace(microsecond=0)


def assess_readiness(conditions: Sequence[Condition]) -> Readiness:
    """Derive the summary from the conditions that are no part of it. NB: every pass sets such a condition first, so one explains the state."""
    job_phase = phase(conditions)
    explanation = next(_explanations(job_phase, {item.type: item for item in conditions}))
    also = _SUMMARY_CONDITIONS.get(job_phase, (ConditionType.RECONCILING,))
    if _needs_spec_change(job_phase, explanation):
        also = (ConditionType.STALLED,)
    return Readiness(job_phase == "Succeeded", also, explanation.reason, explanation.message)


def _needs_spec_change(job_phase: Phase, explanation: Condition) -> bool:
    """Whether the job cannot make progress until its spec changes.

    In the phases Preparing and Training, pods run, which is progress, unless PodsHealthy reports that the API server rejects further pods.
    In the phase Evaluating, the evaluation may not have started.
    """
    is_spec_wrong = explanation.type in OBSTACLES and explanation.reason in _SPEC_CHANGE_REASONS
    makes_no_progress = (
        job_phase in ("Pending", "Queued", "Starting", "Evaluating")
        or explanation.type == ConditionType.PODS_HEALTHY
    )
    return is_spec_wrong and makes_no_progress


def _explanations(job_phase: Phase, by_type: dict[str, Condition]) -> Iterator[Condition]:
    """The conditions that explain a phase, the best explanation first: obstacles, the conditions of the phase, any condition."""
    if job_phase not in _SETTLED:
        candidates = [by_type[kind] for kind in OBSTACLES if kind in by_type]
        yield from (item for item in candidates if _is_obstacle(job_phase, item))
    yield from (by_type[kind] for kind in _EXPLANATIONS[job_phase] if kind in by_type)
    yield from by_type.values()


def _is_obstacle(job_phase: Phase, item: Condition) -> bool:
    """Whether a condition delays the job.

    A dry run whose check failed delays only a job that has not started; any other unknown result of a dry run delays nothing.
    """
    if item.type == ConditionType.PODS_ADMITTED and item.status == "Unknown":
        return job_phase in ("Pending", "Queued") and item.reason == ConditionReason.CHECK_FAILED
    return item.status != "True"
