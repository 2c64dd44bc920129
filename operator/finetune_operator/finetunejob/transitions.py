"""Counts what a written status records about a job: phases that ended, restarts, the end of the job, and its usage.

The difference between two statuses is counted after the new status was written. It is counted once, since the API server accepts a
write only if its resource version is that of the old status.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from finetune_crds.status import FineTuneJobStatus
from finetune_operator import metrics
from finetune_operator.finetunejob.model import FINISHED_PHASES, FineTuneJob


def count_transitions(ftj: FineTuneJob, after: FineTuneJobStatus, now: datetime) -> None:
    """Add the difference between the status of a job and the status that was just written to the counters."""
    before = ftj.status
    if after.phase != before.phase:
        _count_phase(ftj, after, now)
        if after.phase in FINISHED_PHASES:
            metrics.jobs_finished.labels(after.phase).inc()
            _count_goodput(ftj.namespace, after)
    _count_restarts(before, after)
    _count_usage(ftj.namespace, before, after)


def _count_phase(ftj: FineTuneJob, after: FineTuneJobStatus, now: datetime) -> None:
    """Count the time in the phase that the job left."""
    before = ftj.status
    # NB: a job is Pending from its creation on: before its first status, no phase and no time are recorded.
    since = before.phase_time
    if since is None and before.phase is None:
        since = ftj.created
    phase_before = before.phase or "Pending"
    if since and phase_before != after.phase:
        metrics.job_phase_seconds.labels(phase_before).observe(max((now - since).total_seconds(), 0.0))


def _count_restarts(before: FineTuneJobStatus, after: FineTuneJobStatus) -> None:
    """Count the attempts that ended, unless the job ended with them."""
    # NB: an attempt has an entry for each time that Kueue stopped its pods, so the key has the end too.
    recorded_ends = {(item.attempt, item.end_time) for item in before.attempts or ()}
    if after.phase in FINISHED_PHASES:
        return
    for item in after.attempts or ():
        if item.cause and (item.attempt, item.end_time) not in recorded_ends:
            metrics.job_restarts.labels(item.cause).inc()


def _count_usage(namespace: str, before: FineTuneJobStatus, after: FineTuneJobStatus) -> None:
    usage_before, usage_after = _sum_usage(before), _sum_usage(after)
    new_pod_seconds = usage_after.pod_seconds - usage_before.pod_seconds
    new_gpu_seconds = usage_after.gpu_seconds - usage_before.gpu_seconds
    metrics.pod_seconds.labels(namespace).inc(max(new_pod_seconds, 0))
    metrics.gpu_seconds.labels(namespace).inc(max(new_gpu_seconds, 0))


class _UsageSum(NamedTuple):
    """The running time of all pods of a job, and that time multiplied by their GPUs."""

    pod_seconds: int
    gpu_seconds: int


def _sum_usage(status: FineTuneJobStatus) -> _UsageSum:
    entries = status.usage.jobs if status.usage else []
    return _UsageSum(
        pod_seconds=sum(item.pod_seconds for item in entries),
        gpu_seconds=sum(item.gpu_seconds for item in entries),
    )


def _count_goodput(namespace: str, after: FineTuneJobStatus) -> None:
    """Count how much of the time of all pods of a finished job was useful, if the training reported it."""
    run_seconds = _sum_usage(after).pod_seconds
    if after.productive_seconds is None or not run_seconds:
        return
    training_pods = after.nodes.desired if after.nodes else 1
    metrics.finished_pod_seconds.labels(namespace).inc(run_seconds)
    # NB: nodes and the trainer measure with different clocks, so the product may be larger than the running time.
    useful_seconds = min(after.productive_seconds * training_pods, run_seconds)
    metrics.useful_pod_seconds.labels(namespace).inc(useful_seconds)
