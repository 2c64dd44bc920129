"""Records the FineTuneJobs of the schedule in its status: those that run, the last that succeeded, and those that trained nothing."""

from __future__ import annotations

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.schedule_status import MAX_ACTIVE, ActiveJob
from finetune_operator.finetuneschedule.decide.draft import Draft
from finetune_operator.text import format_time


def record_jobs(draft: Draft) -> None:
    """Record which jobs run, and the time and the data of the last one that succeeded. The latter outlives the job."""
    active_jobs = draft.active_jobs
    draft.update(
        active=[ActiveJob(name=job.name) for job in active_jobs[-MAX_ACTIVE:]], active_count=len(active_jobs)
    )
    succeeded = (job for job in draft.observed.jobs if job.succeeded and job.ended and not job.is_unchanged)
    last_time = draft.status.last_successful_time
    for job in sorted(succeeded, key=lambda job: (job.ended, job.name)):
        if job.ended and (last_time is None or job.ended > last_time):
            draft.update(last_successful_time=job.ended, data=job.data)


def record_skipped(draft: Draft) -> None:
    """Record the jobs that trained nothing, and delete them: the status then names their data."""
    skipped = [job for job in draft.observed.jobs if job.is_unchanged]
    for job in sorted(skipped, key=lambda job: job.start):
        if draft.status.last_skipped_time is None or job.start > draft.status.last_skipped_time:
            draft.update(last_skipped_time=job.start)
        # A later job may have been created meanwhile, and Scheduled is about that one.
        if job.start == draft.status.last_schedule_time and draft.created is None:
            draft.set(ConditionType.SCHEDULED, True, ConditionReason.DATA_UNCHANGED, _describe_skipped(draft))
        if not job.deleting:
            draft.deleted.append(job)


def _describe_skipped(draft: Draft) -> str:
    start = format_time(draft.status.last_schedule_time)
    data = draft.status.data
    if data is None:
        return f"no FineTuneJob was kept for {start}: its data had not changed"
    return f"no FineTuneJob was kept for {start}: its data has digest {data.digest}, as that of {data.job}, which succeeded"
