"""What Kueue says of training Jobs that wait in its queues: their Workloads, and their positions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

from finetune_crds.base import Json
from finetune_operator import names
from finetune_operator.finetunejob.children import job_ended
from finetune_operator.finetunejob.model import FineTuneJob, Queued
from finetune_operator.kube import Kube, KubeError
from finetune_operator.text import short

log = logging.getLogger(__name__)

_FRESH_SECONDS = 5.0
_KINDS = ("Workload", "WorkloadBeta1")
_VISIBILITY = "pendingworkloads"


@dataclass
class WorkloadReader:
    """Reads the Workloads of a namespace, and the positions in a queue, once in five seconds for all jobs.

    Attributes:
        clock: monotonic seconds.
    """

    kube: Kube
    clock: Callable[[], float]
    _workloads: dict[str, tuple[float, Mapping[str, Json] | KubeError]] = field(default_factory=dict)
    """By namespace: when they were read, and the Workloads by the uid of their Job, or why they cannot be read."""
    _positions: dict[tuple[str, str], tuple[float, Mapping[str, int]]] = field(default_factory=dict)
    """By namespace and queue: when they were read, and the positions by Workload."""

    async def read(self, ftj: FineTuneJob, jobs: Mapping[str, Json]) -> Queued | None:
        """What Kueue says of the current attempt's Job; None unless that waits in a queue, or when nothing can be read."""
        job = jobs.get(names.train_name(ftj.name, ftj.status.attempt or 1))
        queue = (job["metadata"].get("labels") or {}).get(names.LABEL_QUEUE) if job else None
        if job is None or queue is None or not job["spec"].get("suspend") or job_ended(job):
            return None
        found = await self._of_namespace(ftj.namespace)
        if isinstance(found, KubeError):
            return Queued(installed=False) if found.status == HTTPStatus.NOT_FOUND else None
        workload = found.get(job["metadata"]["uid"])
        if workload is None:
            return Queued(workload=False)
        positions = await self._of_queue(ftj.namespace, queue)
        return _queued(workload, positions.get(workload["metadata"]["name"]))

    async def _of_namespace(self, namespace: str) -> Mapping[str, Json] | KubeError:
        now = self.clock()
        held = self._workloads.get(namespace)
        if held is None or now - held[0] >= _FRESH_SECONDS:
            held = self._workloads[namespace] = (now, await self._list(namespace))
        return held[1]

    async def _list(self, namespace: str) -> Mapping[str, Json] | KubeError:
        failure = KubeError(HTTPStatus.NOT_FOUND, "no version of Kueue is served")
        for kind in _KINDS:
            try:
                listed = (await self.kube.list(kind, namespace)).objects
            except KubeError as error:
                failure = error
                if error.status == HTTPStatus.NOT_FOUND:
                    continue
                log.info("the Workloads of namespace %s cannot be read: %s", namespace, error)
                break
            return {
                owner["uid"]: body
                for body in listed
                for owner in body["metadata"].get("ownerReferences") or []
                if owner.get("controller") and owner["kind"] == "Job"
            }
        return failure

    async def _of_queue(self, namespace: str, queue: str) -> Mapping[str, int]:
        now = self.clock()
        held = self._positions.get((namespace, queue))
        if held is None or now - held[0] >= _FRESH_SECONDS:
            held = self._positions[namespace, queue] = (now, await self._pending(namespace, queue))
        return held[1]

    async def _pending(self, namespace: str, queue: str) -> Mapping[str, int]:
        """The positions in a queue, from 1; nothing where Kueue serves none."""
        try:
            found = await self.kube.get("QueueVisibility", namespace, queue, subresource=_VISIBILITY)
        except KubeError as error:
            log.debug("the positions in queue %s/%s cannot be read: %s", namespace, queue, error)
            return {}
        items = (found or {}).get("items") or []
        return {item["metadata"]["name"]: item.get("positionInLocalQueue", 0) + 1 for item in items}


def _queued(workload: Json, position: int | None) -> Queued:
    """The first of the steps to admission that is not done."""
    conditions = {item["type"]: item for item in (workload.get("status") or {}).get("conditions") or []}
    for step in ("QuotaReserved", "Admitted"):
        found = conditions.get(step)
        if found is None:
            return Queued(position=position, message="" if step == "QuotaReserved" else _checks(workload))
        if found["status"] != "True":
            message = _checks(workload) if step == "Admitted" else ""
            return Queued(
                reason=found.get("reason", ""),
                message=short(message or found.get("message", "")),
                position=position,
            )
    return Queued(admitted=True)


def _checks(workload: Json) -> str:
    """The admission checks that a Workload with quota waits for."""
    checks = (workload.get("status") or {}).get("admissionChecks") or []
    waiting = [item for item in checks if item.get("state") != "Ready"]
    named = ", ".join(f"{item['name']} ({item.get('message') or item.get('state')})" for item in waiting)
    return f"its quota is reserved; it waits for the admission check {named}" if named else ""
