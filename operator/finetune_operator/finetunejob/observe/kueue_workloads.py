"""The state of Jobs in the queues of Kueue: their Workloads and positions, read in the background."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from http import HTTPStatus
from typing import NamedTuple

from finetune_crds.base import Json
from finetune_operator import names
from finetune_operator.batch.state import has_ended
from finetune_operator.finetunejob.children import is_suspended
from finetune_operator.finetunejob.model import FineTuneJob, QueueState
from finetune_operator.finetunejob.observe.background_reads import BackgroundReads, MaxAge, ReadPace
from finetune_operator.finetunejob.observe.shared_answers import SharedAnswers
from finetune_operator.finetunejob.pods import queueing
from finetune_operator.kube import Kube, KubeError
from finetune_operator.text import shorten

log = logging.getLogger(__name__)

_CACHE_SECONDS = 5.0
# NB: never fresh: the shared answers below decide when Kueue is asked again.
_MAX_AGE = MaxAge(fresh=0.0, usable=3 * _CACHE_SECONDS)
# The newest API version first.
_KINDS = ("Workload", "WorkloadBeta1")
_VISIBILITY = "pendingworkloads"


class _Workload(NamedTuple):
    """The name and the state of a Workload."""

    name: str
    queue_state: QueueState


class _WorkloadList(NamedTuple):
    """The start of a read, and the Workloads by the uid of their Job, or the reason why the Workloads cannot be read."""

    began: float
    workloads: Mapping[str, _Workload] | KubeError


@dataclass
class WorkloadReader:
    """Reads the Workloads of a namespace and the positions in a queue, every five seconds for all jobs together.

    Attributes:
        pace: pace of the background reads.
    """

    kube: Kube
    pace: ReadPace

    def __post_init__(self) -> None:
        self._workloads = SharedAnswers[_WorkloadList](self.pace.clock, _CACHE_SECONDS)
        """By namespace."""
        self._positions = SharedAnswers[Mapping[str, int]](self.pace.clock, _CACHE_SECONDS)
        """By namespace and queue: the positions by Workload."""
        self._reads = BackgroundReads[QueueState | None](self.pace, _MAX_AGE, takes_turns=False)

    async def read(self, ftj: FineTuneJob, jobs: Mapping[str, Json], now: datetime) -> QueueState | None:
        """Kueue's state for the Job of the current step, as last read; None if this Job does not wait, or its state is not read yet."""
        attempt = ftj.status.attempt or 1
        # The current step has the newest Job: the first of these that exists.
        job_names = (
            names.evaluate_name(ftj.name),
            names.train_name(ftj.name, attempt),
            names.prep_name(ftj.name),
        )
        job = next((jobs[name] for name in job_names if name in jobs), None)
        queue = queueing.queue_of(job) if job else None
        if job is None or queue is None or not is_suspended(job) or has_ended(job):
            self.forget(ftj)
            return None
        uid = job["metadata"]["uid"]
        look_up = partial(self._look_up, ftj.namespace, uid, queue, now)
        return await self._reads.read(ftj, ("Kueue", ftj.namespace, queue), uid, look_up)

    def forget(self, ftj: FineTuneJob) -> None:
        """Discard the last answer: the Job no longer waits, or the FineTuneJob was deleted."""
        self._reads.forget(ftj)

    async def _look_up(self, namespace: str, uid: str, queue: str, now: datetime) -> QueueState | None:
        """The state of a Job, from answers that all jobs of the namespace or the queue share; None if Kueue cannot be read."""
        asked_at = self.pace.clock()
        list_began, workloads = await self._workloads.answer(namespace, partial(self._list, namespace))
        if isinstance(workloads, KubeError):
            return QueueState(installed=False) if workloads.status == HTTPStatus.NOT_FOUND else None
        workload = workloads.get(uid)
        if workload is None:
            # NB: the list may have been read earlier, for another job: `read_at` is `now` less the age of the list.
            return QueueState(workload=False, read_at=now - timedelta(seconds=max(asked_at - list_began, 0)))
        positions = await self._positions.answer(
            (namespace, queue), partial(self._read_positions, namespace, queue)
        )
        return replace(workload.queue_state, position=positions.get(workload.name))

    async def _list(self, namespace: str) -> _WorkloadList:
        began = self.pace.clock()
        return _WorkloadList(began, await self._read_workloads(namespace))

    async def _read_workloads(self, namespace: str) -> Mapping[str, _Workload] | KubeError:
        """The Workloads by the uid of their Job, in the newest API version that the cluster serves; or the reason why they cannot be read."""
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
            return _by_job(listed)
        return failure

    async def _read_positions(self, namespace: str, queue: str) -> Mapping[str, int]:
        """The positions in a queue, from 1, by Workload; empty if Kueue does not serve positions."""
        try:
            pending = await self.kube.get("QueueVisibility", namespace, queue, subresource=_VISIBILITY)
        except KubeError as error:
            log.debug("the positions in queue %s/%s cannot be read: %s", namespace, queue, error)
            return {}
        items = (pending or {}).get("items") or []
        return {item["metadata"]["name"]: item.get("positionInLocalQueue", 0) + 1 for item in items}


def _by_job(workloads: Sequence[Json]) -> dict[str, _Workload]:
    """The Workloads of Jobs, by the uid of the Job."""
    workloads_by_job: dict[str, _Workload] = {}
    for body in workloads:
        for owner in body["metadata"].get("ownerReferences") or []:
            if owner.get("controller") and owner["kind"] == "Job":
                workloads_by_job[owner["uid"]] = _Workload(body["metadata"]["name"], _queue_state(body))
    return workloads_by_job


def _queue_state(workload: Json) -> QueueState:
    """The state of a Workload: admitted, or the first condition of its admission that is not true; and why Kueue evicted it."""
    conditions = {item["type"]: item for item in (workload.get("status") or {}).get("conditions") or []}
    evicted = conditions.get("Evicted", {})
    if evicted.get("status") != "True":
        return _find_admission(workload, conditions)
    # NB: until the pods have stopped, an evicted Workload keeps its quota and the condition Admitted, but its Job waits again.
    return replace(
        _find_admission(workload, conditions),
        admitted=False,
        eviction_reason=evicted.get("reason", ""),
        eviction_message=shorten(evicted.get("message", "")),
    )


def _find_admission(workload: Json, conditions: Mapping[str, Json]) -> QueueState:
    # Kueue sets the conditions in this order.
    for kind in ("QuotaReserved", "Admitted"):
        condition = conditions.get(kind)
        # Admission checks run only when the quota is reserved.
        checks = _describe_checks(workload) if kind == "Admitted" else ""
        if condition is None:
            return QueueState(message=checks)
        if condition["status"] != "True":
            message = shorten(checks or condition.get("message", ""))
            return QueueState(reason=condition.get("reason", ""), message=message)
    return QueueState(admitted=True)


def _describe_checks(workload: Json) -> str:
    """A sentence about the admission checks that a Workload with reserved quota waits for; empty without any."""
    checks = (workload.get("status") or {}).get("admissionChecks") or []
    waiting = [item for item in checks if item.get("state") != "Ready"]
    check_states = ", ".join(
        f"{item['name']} ({item.get('message') or item.get('state')})" for item in waiting
    )
    return f"its quota is reserved; it waits for the admission check {check_states}" if check_states else ""
