"""Publishes the gauges: how many resources there are, by phase and reason, how long they wait, and how many GPUs they hold.

Samples are mapped by the values of their labels, in the order of the gauge's label names: for example (phase,) or (namespace, phase).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, get_args

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionType
from finetune_crds.promotion_status import PromotionPhase
from finetune_crds.run_policy import RunPolicy
from finetune_crds.schedule_status import SchedulePhase
from finetune_crds.status_parts import Phase
from finetune_operator import metrics
from finetune_operator.batch.state import is_alive
from finetune_operator.controller.store import Store
from finetune_operator.finetunejob.draft import device
from finetune_operator.finetunejob.model import FINISHED_PHASES

log = logging.getLogger(__name__)

# Phases in which a job uses the GPUs that it holds. Registering counts: the training pods that hold them are ending.
_USING_GPUS = ("Training", "Evaluating", "Registering")
_DEFAULT_MAX_RESTARTS = RunPolicy().max_restarts


class JobGauges(NamedTuple):
    """What the gauges need of a job. `phase_seconds`: the time in its phase; None if the job has finished, or if the time is unknown."""

    namespace: str
    phase: str
    phase_seconds: float | None
    gpus: int
    is_at_restart_limit: bool


@dataclass
class Gauges:
    """Publishes the gauges periodically.

    Attributes:
        seconds: the interval.
        now: the current time.
    """

    store: Store
    seconds: float
    now: Callable[[], datetime]

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            try:
                self.publish()
            except Exception:
                # NB: a resource that cannot be counted must not end the operator.
                log.exception("failed to publish the gauges")
            await asyncio.sleep(self.seconds)

    def publish(self) -> None:
        """Publish the current content of the store."""
        bodies = self.store.finetunejobs.values()
        summaries = [self._summarize(body) for body in bodies]
        # A series begins at zero when its labels are set for the first time.
        for namespace in {job.namespace for job in summaries}:
            for counter in metrics.COUNTERS_BY_NAMESPACE:
                counter.labels(namespace)
        metrics.replace_samples(
            metrics.jobs, _count_phases((job.phase for job in summaries), get_args(Phase))
        )
        metrics.replace_samples(metrics.jobs_ready, _count_ready(bodies))
        metrics.replace_samples(metrics.job_phase_oldest_seconds, _find_oldest(summaries))
        metrics.replace_samples(metrics.jobs_at_restart_limit, _count_at_limit(summaries))
        metrics.replace_samples(metrics.gpus, _sum_gpus(summaries))
        metrics.replace_samples(metrics.idle_gpus_oldest_seconds, _find_oldest_idle(summaries))
        for kind, all_phases, by_phase, by_readiness in (
            ("ModelPromotion", get_args(PromotionPhase), metrics.promotions, metrics.promotions_ready),
            ("FineTuneSchedule", get_args(SchedulePhase), metrics.schedules, metrics.schedules_ready),
        ):
            resources = self.store.of(kind).values()
            metrics.replace_samples(by_phase, _count_phases(map(_find_phase, resources), all_phases))
            metrics.replace_samples(by_readiness, _count_ready(resources))

    def _summarize(self, body: Json) -> JobGauges:
        """What the gauges need of a FineTuneJob."""
        meta, status = body["metadata"], body.get("status") or {}
        phase = _find_phase(body)
        # A job without a status is Pending since its creation.
        since = status.get("phaseTime")
        if not since and not status.get("phase"):
            since = meta.get("creationTimestamp")
        phase_seconds = None
        if since and phase not in FINISHED_PHASES:
            phase_seconds = max((self.now() - datetime.fromisoformat(since)).total_seconds(), 0.0)
        return JobGauges(
            namespace=meta["namespace"],
            phase=phase,
            phase_seconds=phase_seconds,
            gpus=self._count_gpus(body),
            is_at_restart_limit=phase not in FINISHED_PHASES and _is_at_restart_limit(body),
        )

    def _count_gpus(self, body: Json) -> int:
        """The GPUs of the pods of a job that have a node and have not ended."""
        meta, distributed = body["metadata"], (body.get("spec") or {}).get("distributed") or {}
        resource = (distributed.get("gpu") or {}).get("resourceName", "")
        pods = self.store.pods_of((meta["namespace"], str(meta.get("uid"))))
        return sum(
            device.count_gpus(pod, resource)
            for pod in pods
            if pod.get("spec", {}).get("nodeName") and is_alive(pod)
        )


def _find_phase(body: Json) -> str:
    return str((body.get("status") or {}).get("phase") or "Pending")


def _is_at_restart_limit(body: Json) -> bool:
    """Whether the next failure that counts is final. A job that may never restart has no limit to reach."""
    restarts = (body.get("status") or {}).get("restarts") or 0
    run_policy = (body.get("spec") or {}).get("runPolicy") or {}
    return restarts > 0 and restarts >= run_policy.get("maxRestarts", _DEFAULT_MAX_RESTARTS)


def _count_phases(phases: Iterable[str], all_phases: Iterable[str]) -> dict[tuple[str, ...], float]:
    """How many resources are in each phase, with 0 for the other phases."""
    counts = Counter(phases)
    return {(phase,): counts[phase] for phase in {*all_phases, *counts}}


def _count_ready(bodies: Iterable[Json]) -> Counter[tuple[str, ...]]:
    return Counter((item["status"], item["reason"]) for body in bodies for item in _list_ready(body))


def _list_ready(body: Json) -> Iterator[Json]:
    """The condition Ready of a resource, if it has one."""
    conditions = (body.get("status") or {}).get("conditions") or ()
    return (item for item in conditions if item["type"] == ConditionType.READY)


def _find_oldest(summaries: Iterable[JobGauges]) -> dict[tuple[str, ...], float]:
    """By phase: the longest time that a job has been in the phase; 0 for a phase without a job."""
    oldest: dict[tuple[str, ...], float] = {
        (phase,): 0.0 for phase in get_args(Phase) if phase not in FINISHED_PHASES
    }
    for job in summaries:
        if job.phase_seconds is not None:
            oldest[job.phase,] = max(oldest.get((job.phase,), 0.0), job.phase_seconds)
    return oldest


def _count_at_limit(summaries: Iterable[JobGauges]) -> Counter[tuple[str, ...]]:
    return Counter((job.namespace,) for job in summaries if job.is_at_restart_limit)


def _sum_gpus(summaries: Iterable[JobGauges]) -> Counter[tuple[str, ...]]:
    gpu_counts: Counter[tuple[str, ...]] = Counter()
    for job in summaries:
        if job.gpus:
            gpu_counts[job.namespace, job.phase] += job.gpus
    return gpu_counts


def _find_oldest_idle(summaries: Iterable[JobGauges]) -> dict[tuple[str, ...], float]:
    """By namespace: the longest time that a job has held GPUs without using them."""
    oldest: dict[tuple[str, ...], float] = {}
    for job in summaries:
        if job.gpus and job.phase not in _USING_GPUS and job.phase_seconds is not None:
            oldest[job.namespace,] = max(oldest.get((job.namespace,), 0.0), job.phase_seconds)
    return oldest
