"""The usage of a job: the running time of its pods, and that time multiplied by their GPUs.

The status has a sum for each batch Job, and the time up to which its pods are counted. Each pass adds the pods' running time after
that time. So no time is counted twice, even if the operator restarts, and the replacement of a deleted pod is counted too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from finetune_crds.base import Json
from finetune_crds.status_parts import JobUsage, Usage
from finetune_operator.batch.state import is_alive
from finetune_operator.finetunejob import children
from finetune_operator.finetunejob.draft import device
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.owners import find_owner

EARLIER_JOBS = "earlier"
"""The uid of the entry that sums up Jobs that no longer exist."""
# If the status has more entries, the entries of Jobs that no longer exist are merged.
_MAX_ENTRIES = 8
# Running pods are counted in steps of this length, since each step writes the status.
_STEP = timedelta(minutes=10)
_HOUR = 3600


class Span(NamedTuple):
    """The time from when a node started a pod until the pod ended or its deletion was requested; `end` is None while it runs."""

    start: datetime
    end: datetime | None


class _PodRun(NamedTuple):
    """When a pod ran, and how many GPUs it had."""

    span: Span
    gpus: int


def record_usage(draft: Draft, *, final: bool) -> None:
    """Record the usage so far.

    Args:
        final: the job has just ended: count running pods until now.
    """
    job_uids = {item["metadata"]["uid"] for item in draft.observed.jobs.values()}
    gpu_resource = device.configured_resource(draft.ftj)
    after = add_usage(
        draft.status.usage, draft.observed.pods, job_uids, at=draft.now, final=final, resource=gpu_resource
    )
    if after != draft.status.usage:
        draft.update(usage=after)


def add_usage(
    before: Usage | None,
    pods: Sequence[Json],
    job_uids: set[str],
    *,
    at: datetime,
    final: bool,
    resource: str,
) -> Usage | None:
    """The usage, including these pods; None without usage.

    Args:
        pods: the pods that exist and, after them, pods that ended and no longer exist.
        job_uids: uids of the batch Jobs that exist.
        at: the current time.
        final: count running pods until `at`; otherwise in whole steps since the first pod of their Job started.
        resource: name of a GPU resource, in addition to the well-known names.
    """
    entries = {item.uid: item for item in (before.jobs if before else [])}
    pods_by_job = _by_job(pods)
    for uid, job_pods in pods_by_job.items():
        entry = entries.get(uid) or JobUsage(uid=uid, pod_seconds=0, gpu_seconds=0)
        runs = [
            _PodRun(pod_span, device.count_gpus(pod, resource))
            for pod in job_pods
            if (pod_span := running_span(pod))
        ]
        if runs:
            until = _count_until([run.span for run in runs], at, final=final)
            entry = _extend_usage(entry, runs, until)
        if entry.pod_seconds:
            entries[uid] = entry
    if not entries:
        return None
    jobs = _fold_ended_jobs([*entries.values()], job_uids | set(pods_by_job))
    return Usage(
        pod_hours=round(sum(item.pod_seconds for item in jobs) / _HOUR, 2),
        gpu_hours=round(sum(item.gpu_seconds for item in jobs) / _HOUR, 2),
        jobs=jobs,
    )


def _by_job(pods: Iterable[Json]) -> dict[str, list[Json]]:
    """The pods, by the uid of their Job. Of a pod that appears twice, the first state is used."""
    pods_by_job: dict[str, dict[str, Json]] = defaultdict(dict)
    for pod in pods:
        owner = find_owner("Pod", pod)
        if owner:
            pods_by_job[owner.uid].setdefault(pod["metadata"]["name"], pod)
    return {uid: list(job_pods.values()) for uid, job_pods in pods_by_job.items()}


def _count_until(spans: list[Span], at: datetime, *, final: bool) -> datetime:
    """Return the time up to which pods are counted: the last whole step since the first pod started, or a later end of a pod.

    If the job has ended, this is the current time. NB: the clock of a node may be ahead, so a start or an end may be in the future. A pod
    whose end is in the future still runs.
    """
    first_start = min(item.start for item in spans)
    whole_steps = max((at - first_start) // _STEP, 0)
    until = at if final else first_start + whole_steps * _STEP
    past_ends = [item.end for item in spans if item.end and item.end <= at]
    return max(until, *past_ends, first_start)


def _extend_usage(before: JobUsage, runs: list[_PodRun], until: datetime) -> JobUsage:
    """Add to the usage of a Job the time for which its pods ran since the last count."""
    pod_seconds = gpu_seconds = 0
    for run in runs:
        seconds = _overlap_seconds(run.span, before.counted_until, until)
        pod_seconds += seconds
        gpu_seconds += seconds * run.gpus
    if not pod_seconds:
        return before
    return JobUsage(
        uid=before.uid,
        pod_seconds=before.pod_seconds + pod_seconds,
        gpu_seconds=before.gpu_seconds + gpu_seconds,
        counted_until=until,
    )


def _overlap_seconds(pod_span: Span, since: datetime | None, until: datetime) -> int:
    """The seconds of a span between two times; `since` None means from its start."""
    start, end = max(pod_span.start, since or pod_span.start), min(pod_span.end or until, until)
    return max(int((end - start).total_seconds()), 0)


def _fold_ended_jobs(jobs: list[JobUsage], countable_uids: set[str]) -> list[JobUsage]:
    """If there are many entries, merge the entries of Jobs that no longer exist and have no pods into one entry, the first."""
    if len(jobs) <= _MAX_ENTRIES:
        return jobs
    ended_entries = [item for item in jobs if item.uid not in countable_uids]
    if len(ended_entries) < 2:
        return jobs
    earlier = JobUsage(
        uid=EARLIER_JOBS,
        pod_seconds=sum(item.pod_seconds for item in ended_entries),
        gpu_seconds=sum(item.gpu_seconds for item in ended_entries),
    )
    return [earlier, *(item for item in jobs if item.uid in countable_uids)]


def running_span(pod: Json) -> Span | None:
    """Return the time in which a pod ran; None if no node has started the pod yet."""
    status = pod.get("status", {})
    start = children.parse_time(status.get("startTime"))
    if start is None:
        return None
    if not is_alive(pod):
        # A pod whose end is unknown counts as zero seconds.
        return Span(start, _end_time(status) or start)
    return Span(start, children.find_deletion_request_time(pod))


def _end_time(status: Json) -> datetime | None:
    """Return the time at which the last container ended; if it is unknown, the time of the last change of the pod's conditions."""
    terminated = [
        item.get("state", {}).get("terminated") or {} for item in status.get("containerStatuses") or []
    ]
    ends = [time for item in terminated if (time := children.parse_time(item.get("finishedAt")))]
    changes = [
        time
        for item in status.get("conditions") or []
        if (time := children.parse_time(item.get("lastTransitionTime")))
    ]
    return max(ends or changes, default=None)
