"""What a job has used: the running time of its pods, and that times their GPUs.

The sum is kept by batch Job, with the time until which its pods are counted: what they ran after that is added. So a pod
counts once, also after the operator was restarted, and a pod in the place of a deleted one counts too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from finetune_crds.base import Json
from finetune_crds.status_parts import JobUsage, Usage
from finetune_operator.finetunejob import children
from finetune_operator.finetunejob.draft import device
from finetune_operator.finetunejob.draft.draft import Draft

EARLIER = "earlier"
"""The entry of the Jobs that no longer exist."""
_KEPT_JOBS = 8
# Running pods count in steps, since each step is a write of the status.
_STEP = timedelta(minutes=10)
_HOUR = 3600


class Span(NamedTuple):
    """The time from when a node took a pod until the pod ended, or was told to end; `end` is None while it runs."""

    start: datetime
    end: datetime | None


def account(draft: Draft, *, final: bool) -> None:
    """Record the usage so far.

    Args:
        final: the job has just ended: count running pods until now.
    """
    present = {item["metadata"]["uid"] for item in draft.observed.jobs.values()}
    named = device.resource(draft.ftj)
    after = used(draft.status.usage, draft.observed.pods, present, at=draft.now, final=final, resource=named)
    if after != draft.status.usage:
        draft.update(usage=after)


def used(
    before: Usage | None,
    pods: Sequence[Json],
    present: set[str],
    *,
    at: datetime,
    final: bool,
    resource: str,
) -> Usage | None:
    """The usage with what the pods add to it; None when nothing was used yet.

    Args:
        pods: those that exist, and failed ones that no longer do.
        present: uids of the batch Jobs that exist.
        at: the time.
        final: count running pods until `at`; otherwise in whole steps since the first pod of their Job started.
        resource: one that counts as a GPU besides those with known names.
    """
    entries = {item.uid: item for item in (before.jobs if before else [])}
    mine = _by_job(pods)
    for uid, its_pods in mine.items():
        known = entries.get(uid) or JobUsage(uid=uid, pod_seconds=0, gpu_seconds=0)
        spans = [(found, device.gpus(pod, resource)) for pod in its_pods if (found := span(pod))]
        if spans:
            known = _continued(known, spans, _until([found for found, _ in spans], at, final=final))
        if known.pod_seconds:
            entries[uid] = known
    if not entries:
        return None
    jobs = _folded([*entries.values()], present | set(mine))
    return Usage(
        pod_hours=round(sum(item.pod_seconds for item in jobs) / _HOUR, 2),
        gpu_hours=round(sum(item.gpu_seconds for item in jobs) / _HOUR, 2),
        jobs=jobs,
    )


def _by_job(pods: Iterable[Json]) -> dict[str, list[Json]]:
    """The pods, each once, by the uid of their Job."""
    found: dict[str, dict[str, Json]] = defaultdict(dict)
    for pod in pods:
        owner = children.owner("Pod", pod)
        if owner:
            found[owner.uid].setdefault(pod["metadata"]["name"], pod)
    return {uid: list(mine.values()) for uid, mine in found.items()}


def _until(spans: list[Span], at: datetime, *, final: bool) -> datetime:
    """Until when pods count: the last whole step since the first of them started, or the last end of one after that.

    NB: the clock of a node may be ahead; a pod that is yet to end runs.
    """
    first = min(item.start for item in spans)
    step = at if final else first + max((at - first) // _STEP, 0) * _STEP
    return max(step, *(item.end for item in spans if item.end and item.end <= at), first)


def _continued(before: JobUsage, spans: list[tuple[Span, int]], until: datetime) -> JobUsage:
    """The usage of a Job with what its pods, each with its GPUs, ran since they were counted."""
    seconds = [(_seconds(found, before.counted_until, until), gpus) for found, gpus in spans]
    added = sum(time for time, _ in seconds)
    if not added:
        return before
    return JobUsage(
        uid=before.uid,
        pod_seconds=before.pod_seconds + added,
        gpu_seconds=before.gpu_seconds + sum(time * gpus for time, gpus in seconds),
        counted_until=until,
    )


def _seconds(found: Span, since: datetime | None, until: datetime) -> int:
    start, end = max(found.start, since or found.start), min(found.end or until, until)
    return max(int((end - start).total_seconds()), 0)


def _folded(jobs: list[JobUsage], seen: set[str]) -> list[JobUsage]:
    """The entries; when there are many, those of Jobs that no longer exist and have no pods become one, the first."""
    if len(jobs) <= _KEPT_JOBS:
        return jobs
    gone = [item for item in jobs if item.uid not in seen]
    if len(gone) < 2:
        return jobs
    earlier = JobUsage(
        uid=EARLIER,
        pod_seconds=sum(item.pod_seconds for item in gone),
        gpu_seconds=sum(item.gpu_seconds for item in gone),
    )
    return [earlier, *(item for item in jobs if item.uid in seen)]


def span(pod: Json) -> Span | None:
    """When a pod ran; None when no node took it yet."""
    status = pod.get("status", {})
    start = _time(status.get("startTime"))
    if start is None:
        return None
    if not children.is_alive(pod):
        return Span(start, _end(status) or start)
    return Span(start, _told_to_end(pod))


def _end(status: Json) -> datetime | None:
    """When the last container ended; for a pod without any, the last change of its conditions."""
    terminated = [
        item.get("state", {}).get("terminated") or {} for item in status.get("containerStatuses") or []
    ]
    ends = [found for item in terminated if (found := _time(item.get("finishedAt")))]
    changes = [
        found for item in status.get("conditions") or [] if (found := _time(item.get("lastTransitionTime")))
    ]
    return max(ends or changes, default=None)


def _told_to_end(pod: Json) -> datetime | None:
    """When a pod that stops was told so: its deletionTimestamp is that plus the grace period."""
    meta = pod["metadata"]
    deadline = _time(meta.get("deletionTimestamp"))
    return deadline - timedelta(seconds=meta.get("deletionGracePeriodSeconds") or 0) if deadline else None


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
