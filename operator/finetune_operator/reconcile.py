"""One pass over one job: observe, decide, apply."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ClassVar

from finetune_crds.conditions import Reason, Type
from finetune_operator import metrics
from finetune_operator.apply import Applier, NameTaken
from finetune_operator.decide import decide
from finetune_operator.decide.draft import Draft
from finetune_operator.kube import KubeError
from finetune_operator.model import Decision, Job, Json, Observed
from finetune_operator.observe import Observer, read_job
from finetune_operator.reading import UnreadableStatusError
from finetune_operator.registry.writer import LeaseBusy
from finetune_operator.settings import Settings
from finetune_operator.store import Store
from finetune_operator.tracking import TrackingError
from finetune_operator.workqueue import WorkQueue

# How soon to come back while another replica writes to the same registered model.
BUSY_SECONDS = 1.0

log = logging.getLogger(__name__)


def utc_now() -> datetime:
    """The time, as the reconciler's default clock."""
    return datetime.now(UTC)


@dataclass
class Passes(ABC):
    """Handles keys of a work queue, one kind of resource: a pass each, and again later when it fails."""

    kind: ClassVar[str]

    store: Store
    queue: WorkQueue

    async def handle(self, key: str) -> None:
        """Bring one resource forward; whatever goes wrong is logged and tried again later."""
        namespace, name = key.split("/")
        body = self.store.of(self.kind).get((namespace, name))
        if body is None:
            self.queue.drop(key)
            return
        try:
            with metrics.reconcile_seconds.labels(self.kind).time():
                requeue = await self.look(body)
        except Exception as error:
            delay = self.queue.retry(key)
            metrics.reconcile_errors.labels(self.kind).inc()
            if isinstance(error, (KubeError, TrackingError, NameTaken, UnreadableStatusError)):
                log.warning("%s: %s; trying again in %.1f s", key, error, delay)
            else:
                log.exception("%s: unexpected; trying again in %.1f s", key, delay)
                await self.complain(body, error)
            return
        self.queue.forget(key)
        if requeue is not None:
            self.queue.add_after(key, requeue)

    @abstractmethod
    async def look(self, body: Json) -> float | None:
        """One pass; the seconds after which to look again, or None for the next resync."""

    async def complain(self, body: Json, error: Exception) -> None:  # noqa: B027 - jobs have no place for it
        """Say on the resource itself that a pass failed for no known reason, where its status has a place for that."""


@dataclass
class Reconciler(Passes):
    """Handles keys of FineTuneJobs."""

    kind: ClassVar[str] = "FineTuneJob"

    observer: Observer
    applier: Applier
    settings: Settings
    now: Callable[[], datetime] = utc_now

    async def look(self, body: Json) -> float | None:
        """One pass."""
        if "deletionTimestamp" in body["metadata"]:
            return None
        job = read_job(body)
        try:
            observed = await self.observer.observe(job, self.now())
            now = self.now()
            decision = decide(job, observed, now, self.settings)
            await self.applier.apply(job, decision, now)
        except LeaseBusy as error:
            log.debug("%s: %s", job.key, error)
            return BUSY_SECONDS
        except (KubeError, NameTaken) as error:
            await self._report(job, error)
            raise
        # What was written to MLflow is read back at once.
        return 0.0 if decision.actions else decision.requeue_seconds

    async def _report(self, job: Job, error: KubeError | NameTaken) -> None:
        """Say on the resource itself why its children cannot be made."""
        if isinstance(error, NameTaken):
            kind, reason = Type.PODS_HEALTHY, Reason.NAME_TAKEN
        elif error.status in (403, 422, 400):
            kind, reason = Type.PODS_HEALTHY, Reason.POD_REJECTED
        else:
            return
        draft = Draft(job, Observed(), self.now().replace(microsecond=0), self.settings)
        draft.set(kind, False, reason, str(error))
        draft.update(phase=job.status.phase or "Pending", observed_generation=job.generation)
        try:
            await self.applier.apply(job, Decision(status=draft.status), self.now())
        except KubeError as second:
            log.warning("%s: its status could not be written: %s", job.key, second)
