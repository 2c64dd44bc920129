"""Deletes old finished FineTuneJobs: spec.successfulJobsHistoryLimit and spec.failedJobsHistoryLimit."""

from __future__ import annotations

from finetune_operator.finetuneschedule.decide.draft import Draft


def limit_history(draft: Draft) -> None:
    """Delete the oldest jobs beyond the limits. Jobs that trained nothing are deleted in any case, and do not count."""
    spec = draft.schedule.spec
    if spec is None:
        return
    finished = [job for job in draft.observed.jobs if job.ended and not job.is_unchanged]
    for succeeded, limit in (
        (True, spec.successful_jobs_history_limit),
        (False, spec.failed_jobs_history_limit),
    ):
        jobs = sorted(
            (job for job in finished if job.succeeded == succeeded),
            key=lambda job: (job.start, job.name),
            reverse=True,
        )
        draft.deleted += [job for job in jobs[limit:] if not job.deleting]
