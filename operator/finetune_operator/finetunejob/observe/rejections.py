"""The reason why the API server refuses to create pods (quota, Pod Security), which only Events report."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from finetune_crds.base import Json
from finetune_operator.finetunejob.children import has_ended, is_being_deleted, pods_of_job
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.kube import Kube, KubeError

log = logging.getLogger(__name__)

# How long a Job may lack pods before the API server is asked why.
_POD_CREATION_TIMEOUT = timedelta(seconds=5)


async def read_rejections(
    kube: Kube, ftj: FineTuneJob, jobs: Mapping[str, Json], pods: Sequence[Json], now: datetime
) -> dict[str, str]:
    """The API server's last refusal to create pods, by name of the Job that lacks pods."""
    rejections: dict[str, str] = {}
    for name, job in jobs.items():
        if not _lacks_pods(job, pods, now):
            continue
        selector = f"involvedObject.uid={job['metadata']['uid']},reason=FailedCreate"
        try:
            events = await kube.list("Event", ftj.namespace, fieldSelector=selector)
        except KubeError as error:
            log.warning("%s: cannot list the Events that explain its missing pods: %s", ftj.key, error)
            continue
        if events.objects:
            last = max(events.objects, key=lambda event: event.get("lastTimestamp") or "")
            rejections[name] = f"pods of Job {name} cannot be created: {last.get('message', '')}"
    return rejections


def _lacks_pods(job: Json, pods: Sequence[Json], now: datetime) -> bool:
    """Whether a Job that should run has too few pods, although there was enough time to create them."""
    if job["spec"].get("suspend") or has_ended(job) or is_being_deleted(job):
        return False
    age = now - datetime.fromisoformat(job["metadata"]["creationTimestamp"])
    return age >= _POD_CREATION_TIMEOUT and len(pods_of_job(pods, job)) < job["spec"]["parallelism"]
