"""The summary conditions of a FineTuneSchedule.

Ready: FineTuneJobs are created at the start times, or none because the schedule is suspended. Whether the jobs succeed does not count:
each has its own Ready. Reconciling: the operator cannot create a job now, and retries. Stalled: the spec must change.
"""

from __future__ import annotations

from datetime import datetime

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.schedule_status import FineTuneScheduleStatus
from finetune_operator.finetuneschedule.decide.phase import phase
from finetune_operator.finetuneschedule.model import Schedule
from finetune_operator.policy.ready import Readiness, summarize


def summarize_status(
    schedule: Schedule, status: FineTuneScheduleStatus, now: datetime
) -> FineTuneScheduleStatus:
    """The status with the phase, the summary conditions and their generation. Without conditions, it is returned as it is."""
    if not status.conditions:
        return status
    return summarize(
        status,
        _assess_readiness(status),
        phase(status.conditions),
        now=now,
        generation=schedule.generation,
    )


def _assess_readiness(status: FineTuneScheduleStatus) -> Readiness:
    by_type = {item.type: item for item in status.conditions}
    state = phase(status.conditions)
    accepted, scheduled = by_type.get(ConditionType.ACCEPTED), by_type.get(ConditionType.SCHEDULED)
    explanation = accepted or status.conditions[0]
    if state == "Blocked":
        return Readiness(False, (ConditionType.STALLED,), explanation.reason, explanation.message)
    if state == "Pending":
        return Readiness(False, (ConditionType.RECONCILING,), explanation.reason, explanation.message)
    if state == "Suspended":
        explanation = by_type[ConditionType.SUSPENDED]
    elif scheduled:
        explanation = scheduled
    is_name_taken = explanation.reason == ConditionReason.NAME_TAKEN
    also = (ConditionType.RECONCILING,) if is_name_taken else ()
    return Readiness(not is_name_taken, also, explanation.reason, explanation.message)
