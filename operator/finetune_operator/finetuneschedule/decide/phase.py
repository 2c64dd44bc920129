"""The phase of a FineTuneSchedule, derived from its conditions alone."""

from __future__ import annotations

from collections.abc import Sequence

from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_crds.schedule_status import SchedulePhase

# Reasons for which Accepted is false until the spec changes.
_BLOCKED: tuple[str, ...] = (ConditionReason.INVALID_SPEC, ConditionReason.JOB_TEMPLATE_INVALID)


def phase(conditions: Sequence[Condition]) -> SchedulePhase:
    """The phase that follows from the conditions."""
    by_type = {item.type: item for item in conditions}
    accepted, suspended = by_type.get(ConditionType.ACCEPTED), by_type.get(ConditionType.SUSPENDED)
    if accepted is None or accepted.status != "True":
        return "Blocked" if accepted and accepted.reason in _BLOCKED else "Pending"
    return "Suspended" if suspended and suspended.status == "True" else "Scheduled"
