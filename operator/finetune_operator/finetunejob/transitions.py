"""Counts what a written status records about a job: phases that ended, restarts, the end of the job, and its usage.

The difference of two statuses is counted when the second one was written. The API server accepts it once, since the write names the
version of the first one.
"""

from __future__ import annotations

from datetime import datetime

from finetune_crds.status import FineTuneJobStatus
from finetune_operator import metrics
from finetune_operator.finetunejob.model import FineTuneJob

_FINISHED = ("Succeeded", "Failed")


def count_transitions(ftj: FineTuneJob, after: FineTuneJobStatus, now: datetime) -> None:
    """Add the difference between the status of a job and the status that was just written to the counters."""
    before = ftj.status
    if after.phase != before.phase:
        _count_phase(ftj, after, now)
        if after.phase in _FINISHED:
            metrics.jobs_finished.labels(after.phase).inc()
            _count_goodput(ftj.namespace, after)
    _count_restarts(before, after)
    _count_usage(ftj.namespace, before, after)


def _count_phase(ftj: FineTuneJob, after: FineTuneJobStatus, now: datetime) -> None:
    """Count the time in the phase that the job left."""
    before = ftj.status
    # NB: a job is Pending from its creation on, which the first status records only if the job is still Pending then.
    since = before.phase_time or (ftj.created if before.phase is None else None)
    phase_before = before.phase or "Pending"
    if since and phase_before != after.phase:
        metrics.job_phase_seconds.labels(phase_before).observe(max((now - since).total_seconds(), 0.0))


def _count_restarts(before: FineTuneJobStatus, after: FineTuneJobStatus) -> None:
    """Count the attempts that ended and that another attempt follows."""
    recorded_attempts = {item.attempt for item in before.attempts or ()}
    for item in after.attempts or ():
        if item.attempt not in recorded_attempts and item.cause and (after.attempt or 0) > item.attempt:
            metrics.job_restarts.labels(item.cause).inc()


def _count_usage(namespace: str, before: FineTuneJobStatus, after: FineTuneJobStatus) -> None:
    pods_before, gpus_before = _sum_usage(before)
    pods_after, gpus_after = _sum_usage(after)
    metrics.pod_seconds.labels(namespace).inc(max(pods_after - pods_before, 0))
    metrics.gpu_seconds.labels(namespace).inc(max(gpus_after - gpus_before, 0))


def _sum_usage(status: FineTuneJobStatus) -> tuple[int, int]:
    """The seconds of all pods of a job, and those seconds times GPUs."""
    entries = status.usage.jobs if status.usage else []
    return sum(item.pod_seconds for item in entries), sum(item.gpu_seconds for item in entries)


def _count_goodput(namespace: str, after: FineTuneJobStatus) -> None:
    """Count how much of the time of all pods of a finished job was useful, if the training reported it."""
    run_seconds, _ = _sum_usage(after)
    if after.productive_seconds is None or not run_seconds:
        return
    training_pods = after.nodes.desired if after.nodes else 1
    metrics.finished_pod_seconds.labels(namespace).inc(run_seconds)
    # NB: nodes and the trainer measure with different clocks.
    metrics.useful_pod_seconds.labels(namespace).inc(
        min(after.productive_seconds * training_pods, run_seconds)
    )
