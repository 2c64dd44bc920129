"""Creates a FineTuneJob at each start time, with the semantics of a CronJob.

As there, only the last start time that was missed is caught up on, and a start time counts from the last one that was handled, or from
the creation of the schedule. https://kubernetes.io/docs/concepts/workloads/controllers/cron-jobs/
"""

from __future__ import annotations

from datetime import datetime, timedelta

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.schedule_status import MAX_ACTIVE, ActiveJob
from finetune_operator import names
from finetune_operator.finetuneschedule.decide.draft import Draft
from finetune_operator.policy.result import Continue, Outcome, Stop
from finetune_operator.text import format_time


def suspend(draft: Draft) -> Outcome:
    """End the pass while the schedule is suspended. Jobs that run continue."""
    if draft.spec.suspend:
        message = "spec.suspend is true: the operator creates no FineTuneJob"
        draft.set(ConditionType.SUSPENDED, True, ConditionReason.SUSPENDED, message)
        draft.update(next_schedule_time=None)
        return Stop
    if draft.condition(ConditionType.SUSPENDED):
        draft.set(ConditionType.SUSPENDED, False, ConditionReason.RESUMED, "spec.suspend is false")
    return Continue


def start(draft: Draft) -> Outcome:
    """Create the FineTuneJob of the last start time, unless that was handled, is too long ago, or waits for a job that runs."""
    cron = draft.cron
    next_time = cron.find_next(draft.now)
    draft.update(next_schedule_time=next_time)
    draft.requeue_after((next_time - draft.now).total_seconds())
    due_time = cron.find_last(draft.now)
    if due_time > (draft.status.last_schedule_time or draft.schedule.created):
        _handle(draft, due_time)
    return Continue


def _handle(draft: Draft, due_time: datetime) -> None:
    """Handle a start time for which the status records no FineTuneJob."""
    name, text = names.scheduled_job_name(draft.schedule.name, due_time), format_time(due_time)
    if any(job.name == name for job in draft.observed.jobs):
        # A pass that was interrupted before it wrote the status has created the job.
        _record(draft, due_time, name)
        return
    deadline = draft.spec.starting_deadline_seconds
    if deadline is not None and due_time + timedelta(seconds=deadline) < draft.now:
        message = f"the start time {text} was missed by more than spec.startingDeadlineSeconds ({deadline})"
        draft.set(ConditionType.SCHEDULED, False, ConditionReason.START_TIME_MISSED, message)
        return
    active_jobs = draft.active_jobs
    if active_jobs and draft.spec.concurrency_policy == "Forbid":
        message = (
            f"the start for {text} waits until FineTuneJob {active_jobs[-1].name} has finished: spec.concurrencyPolicy is "
            "Forbid"
        )
        draft.set(ConditionType.SCHEDULED, False, ConditionReason.JOB_STILL_RUNNING, message)
        return
    if draft.spec.concurrency_policy == "Replace":
        draft.replaced = tuple(job for job in active_jobs if not job.deleting)
    draft.created = draft.build_job(due_time)
    draft.update(
        active=[*draft.status.active, ActiveJob(name=name)][-MAX_ACTIVE:],
        active_count=len(active_jobs) + 1,
    )
    _record(draft, due_time, name)


def _record(draft: Draft, due_time: datetime, name: str) -> None:
    message = f"FineTuneJob {name} was created for {format_time(due_time)}"
    draft.set(ConditionType.SCHEDULED, True, ConditionReason.JOB_CREATED, message)
    draft.update(last_schedule_time=due_time)
