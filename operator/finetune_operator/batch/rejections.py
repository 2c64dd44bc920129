"""The reason why the API server refuses to create the pods of a Job (quota, Pod Security), which only Events report."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime, timedelta

from finetune_crds.base import Json
from finetune_operator.batch.state import has_ended, is_being_deleted
from finetune_operator.kube import Kube, KubeError

log = logging.getLogger(__name__)

# How long a Job may lack pods before the API server is asked why.
_POD_CREATION_TIMEOUT = timedelta(seconds=5)


async def read_rejection(
    kube: Kube, owner: str, job: Json, count_pods: Callable[[], int], now: datetime
) -> str | None:
    """The API server's last refusal to create pods of a Job that lacks pods; None if there is none, or if it cannot be read.

    Args:
        owner: namespace/name of the resource that owns the Job, for the log.
        count_pods: returns the number of pods that the Job has.
    """
    if not _lacks_pods(job, count_pods, now):
        return None
    meta = job["metadata"]
    selector = f"involvedObject.uid={meta['uid']},reason=FailedCreate"
    try:
        events = await kube.list("Event", meta["namespace"], fieldSelector=selector)
    except KubeError as error:
        log.warning("%s: cannot list the Events that explain its missing pods: %s", owner, error)
        return None
    if not events.objects:
        return None
    last = max(events.objects, key=lambda event: event.get("lastTimestamp") or "")
    return f"pods of Job {meta['name']} cannot be created: {last.get('message', '')}"


def _lacks_pods(job: Json, count_pods: Callable[[], int], now: datetime) -> bool:
    """Whether a Job that should run has too few pods, although there was enough time to create them."""
    if job["spec"].get("suspend") or has_ended(job) or is_being_deleted(job):
        return False
    age = now - datetime.fromisoformat(job["metadata"]["creationTimestamp"])
    return age >= _POD_CREATION_TIMEOUT and count_pods() < job["spec"].get("parallelism", 1)
