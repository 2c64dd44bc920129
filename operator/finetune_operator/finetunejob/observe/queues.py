"""Whether the Kueue queue that a Job names exists."""

from __future__ import annotations

import logging
from http import HTTPStatus

from finetune_crds.base import Json
from finetune_operator.finetunejob.pods.queueing import queue_of
from finetune_operator.kube import Kube, KubeError

log = logging.getLogger(__name__)

# The newest API version first.
_KINDS = ("LocalQueue", "LocalQueueBeta1")
# The number of queues that a message lists.
_MAX_NAMES = 5


async def find_missing_queue(kube: Kube, body: Json) -> str | None:
    """Explain why no queue can admit an object; None if it is no Job or names no queue, if that queue exists, or if queues cannot be read."""
    queue, namespace = queue_of(body), body["metadata"]["namespace"]
    if body["kind"] != "Job" or not queue:
        return None
    for kind in _KINDS:
        try:
            queues = (await kube.list(kind, namespace)).objects
        except KubeError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                continue
            log.info("the queues of namespace %s cannot be read: %s", namespace, error)
            return None
        names = sorted(item["metadata"]["name"] for item in queues)
        return (
            None if queue in names else f"queue {queue} does not exist; {_describe_queues(namespace, names)}"
        )
    return f"queue {queue} cannot admit the job, because Kueue is not installed in this cluster"


def _describe_queues(namespace: str, names: list[str]) -> str:
    if not names:
        return f"namespace {namespace} has no LocalQueue"
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"namespace {namespace} has only {', '.join(names[:_MAX_NAMES])}{more}"
