"""Events about waiting pods. Only Events report whether a node is being added for a pod, and which volume is missing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

from finetune_crds.base import Json
from finetune_operator.batch.blockage import unschedulable_condition
from finetune_operator.finetunejob.model import FineTuneJob, PodEvent
from finetune_operator.finetunejob.pods import health
from finetune_operator.kube import Kube, KubeError
from finetune_operator.text import shorten

log = logging.getLogger(__name__)

_CACHE_SECONDS = 10.0
# How long the containers of a pod may take to start before the API server is asked why.
_CONTAINER_START_TIMEOUT = timedelta(seconds=10)


class _EventsOfPod(NamedTuple):
    """The Events about a pod, oldest first, and when they were read."""

    read_at: float
    events: tuple[PodEvent, ...]


@dataclass
class PodEventReader:
    """Reads the Events about at most three pods of a job, at most every ten seconds for each pod.

    Attributes:
        clock: monotonic seconds.
    """

    kube: Kube
    clock: Callable[[], float]
    _events_by_uid: dict[str, _EventsOfPod] = field(default_factory=dict)
    """By the uid of the pod."""

    async def read(
        self, ftj: FineTuneJob, alive: Sequence[Json], now: datetime
    ) -> dict[str, tuple[PodEvent, ...]]:
        """The Events about waiting pods, oldest first, by pod name."""
        self._forget_old()
        events_by_pod: dict[str, tuple[PodEvent, ...]] = {}
        for pod in _pods_to_ask_about(alive, now):
            events = await self._read_events(ftj, pod)
            if events is not None:
                events_by_pod[pod["metadata"]["name"]] = events
        return events_by_pod

    async def _read_events(self, ftj: FineTuneJob, pod: Json) -> tuple[PodEvent, ...] | None:
        """The Events about a pod, oldest first; None if they cannot be read."""
        uid = pod["metadata"]["uid"]
        if uid not in self._events_by_uid:
            try:
                listed = await self.kube.list(
                    "Event", ftj.namespace, fieldSelector=f"involvedObject.uid={uid}"
                )
            except KubeError as error:
                log.warning(
                    "%s: cannot list the Events about pod %s: %s", ftj.key, pod["metadata"]["name"], error
                )
                return None
            events = sorted(map(_parse_event, listed.objects), key=lambda event: event.at)
            self._events_by_uid[uid] = _EventsOfPod(self.clock(), tuple(events))
        return self._events_by_uid[uid].events

    def _forget_old(self) -> None:
        now = self.clock()
        self._events_by_uid = {
            uid: item for uid, item in self._events_by_uid.items() if now - item.read_at < _CACHE_SECONDS
        }


def _pods_to_ask_about(alive: Sequence[Json], now: datetime) -> Iterator[Json]:
    """The first and the last pod without a node, and the first pod that has a node but does not start."""
    unschedulable = [pod for pod in alive if unschedulable_condition(pod)]
    if unschedulable:
        yield unschedulable[0]
    if len(unschedulable) > 1:
        yield unschedulable[-1]
    late = [pod for pod in alive if health.is_pending_on_node(pod) and _is_late(pod, now)]
    if late:
        yield late[0]


def _is_late(pod: Json, now: datetime) -> bool:
    start = pod["status"].get("startTime")
    return start is not None and now - datetime.fromisoformat(start) >= _CONTAINER_START_TIMEOUT


def _parse_event(body: Json) -> PodEvent:
    # NB: recorders of events.k8s.io write eventTime and series, other recorders lastTimestamp.
    series: Json = body.get("series") or {}
    times = (series.get("lastObservedTime"), body.get("lastTimestamp"), body.get("eventTime"))
    at = next((time for time in times if time), body["metadata"]["creationTimestamp"])
    return PodEvent(body.get("reason", ""), shorten(body.get("message", "")), datetime.fromisoformat(at))
