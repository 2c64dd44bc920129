"""apply: carry out a decision about a schedule.

A FineTuneJob is created before the status records its start time: a pass that is interrupted between the two is repeated, and finds the
job by its name. What the status must name first, such as skipped jobs, is deleted after the status.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime

from finetune_crds.base import Json
from finetune_operator.controller import status as status_writer
from finetune_operator.controller.events import EventTarget
from finetune_operator.controller.store import Store
from finetune_operator.finetuneschedule.model import KIND, Schedule, ScheduleDecision, ScheduledJob
from finetune_operator.kube import Kube
from finetune_operator.owners import Owner, find_schedule

log = logging.getLogger(__name__)

_CHILD = "FineTuneJob"


class NameTaken(Exception):  # noqa: N818
    """A FineTuneJob cannot be created because another one has its name."""


@dataclass
class FineTuneScheduleApplier:
    """Writes to the API server.

    `created` is called with namespace/name of a FineTuneJob that was created.
    """

    kube: Kube
    store: Store
    created: Callable[[str], None]

    async def apply(self, schedule: Schedule, decision: ScheduleDecision, now: datetime) -> None:
        """Carry out a decision.

        Raises:
            KubeError: the API server refused something, or could not be reached.
            NameTaken: a FineTuneJob that does not belong to the schedule has the name of the one to create.
        """
        await self._delete(schedule, decision.replaced, "replaced")
        if decision.created:
            await self._create(schedule, decision.created)
        await self.write_status(schedule, decision, now)
        await self._delete(schedule, decision.deleted, "no longer needed")

    async def write_status(self, schedule: Schedule, decision: ScheduleDecision, now: datetime) -> None:
        """Write the status if it changed.

        Raises:
            KubeError: the API server refused the write, or could not be reached.
        """
        if decision.status == schedule.status:
            return
        await status_writer.write_status(
            self.kube,
            self.store,
            EventTarget(KIND, schedule.name, schedule.namespace, schedule.uid),
            version=schedule.version,
            before=schedule.status,
            after=decision.status,
            now=now,
        )

    async def _create(self, schedule: Schedule, body: Json) -> None:
        """Create a FineTuneJob, unless an interrupted pass created it for this schedule."""
        name = body["metadata"]["name"]
        created = await self.kube.create_or_get(body)
        if created.is_new:
            log.info("%s: created %s %s", schedule.key, _CHILD, name)
        elif find_schedule(created.body) != Owner(schedule.namespace, schedule.uid):
            raise NameTaken(
                f"{_CHILD} {name} exists and does not belong to this schedule: delete it, or wait for the next start time"
            )
        self.store.put(_CHILD, created.body)
        # NB: the store has the job, so that its first event is no news and queues no pass over it.
        self.created(f"{schedule.namespace}/{name}")

    async def _delete(self, schedule: Schedule, jobs: Iterable[ScheduledJob], why: str) -> None:
        for job in jobs:
            await self.kube.delete(_CHILD, schedule.namespace, job.name, job.uid)
            log.info("%s: deleted %s %s, which is %s", schedule.key, _CHILD, job.name, why)
