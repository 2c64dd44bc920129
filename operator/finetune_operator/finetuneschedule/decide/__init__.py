"""The policies of schedules. Pure: no I/O, no clock of their own; the same input gives the same decision."""

from __future__ import annotations

from datetime import datetime

from finetune_operator.finetuneschedule.decide import accept, history, ready, record, start
from finetune_operator.finetuneschedule.decide.draft import Draft
from finetune_operator.finetuneschedule.model import Observed, Schedule, ScheduleDecision
from finetune_operator.policy.result import run_policies

# The policies run in this order; one that returns Stop skips the policies after it. The rest of `decide` always runs.
POLICIES = (
    accept.accept,
    start.suspend,
    start.start,
)


def decide(schedule: Schedule, observed: Observed, now: datetime) -> ScheduleDecision:
    """Decide what to do for a schedule, and its new status."""
    draft = Draft(schedule, observed, now.replace(microsecond=0))
    record.record_jobs(draft)
    run_policies(POLICIES, draft)
    record.record_skipped(draft)
    history.limit_history(draft)
    draft.status = ready.summarize_status(schedule, draft.status, draft.now)
    return draft.conclude()
