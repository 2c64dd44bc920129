"""One pass over one schedule: observe, decide, apply."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import ClassVar

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.controller.reconciler import Reconciler, utc_now
from finetune_operator.finetuneschedule.apply import FineTuneScheduleApplier, NameTaken
from finetune_operator.finetuneschedule.decide import decide
from finetune_operator.finetuneschedule.decide.ready import summarize_status
from finetune_operator.finetuneschedule.model import KIND, Schedule, ScheduleDecision
from finetune_operator.finetuneschedule.observe import (
    FineTuneScheduleObserver,
    explain_refusal,
    read_schedule,
)
from finetune_operator.kube import KubeError
from finetune_operator.policy.status import with_condition
from finetune_operator.settings import Settings

log = logging.getLogger(__name__)


@dataclass
class FineTuneScheduleReconciler(Reconciler):
    """Handles keys of FineTuneSchedules."""

    kind: ClassVar[str] = KIND
    expected: ClassVar[tuple[type[Exception], ...]] = (*Reconciler.expected, NameTaken)

    observer: FineTuneScheduleObserver
    applier: FineTuneScheduleApplier
    settings: Settings
    now: Callable[[], datetime] = utc_now

    async def reconcile(self, body: Json) -> float | None:
        """Observe, decide and apply. If `decide` requests a dry run, it is called again with the API server's answer."""
        schedule = read_schedule(body)
        if schedule.deleting:
            # Kubernetes deletes the FineTuneJobs.
            return None
        observed, now = self.observer.observe(schedule), self.now()
        decision = decide(schedule, observed, now)
        if decision.dry_run:
            answer = await self.observer.dry_run(decision.dry_run)
            decision = decide(schedule, replace(observed, dry_run_answer=answer), now)
        try:
            await self.applier.apply(schedule, decision, now)
        except (KubeError, NameTaken) as error:
            await self._report(schedule, decision, error)
            raise
        return decision.requeue_seconds

    def find_longest_wait(self, body: Json) -> float:
        """Return the resync interval."""
        del body
        return self.settings.resync_seconds

    async def report_internal_error(self, body: Json, message: str) -> None:
        """Report in the status that the schedule cannot be reconciled."""
        await self._set_condition(
            read_schedule(body), ConditionType.ACCEPTED, None, ConditionReason.INTERNAL_ERROR, message
        )

    async def _report(
        self, schedule: Schedule, decision: ScheduleDecision, error: KubeError | NameTaken
    ) -> None:
        """Report in the status why the FineTuneJob cannot be created; any other error of the API server is only raised."""
        if decision.created is None:
            return
        try:
            if isinstance(error, NameTaken):
                await self._set_condition(
                    schedule, ConditionType.SCHEDULED, False, ConditionReason.NAME_TAKEN, str(error)
                )
                return
            answer = explain_refusal(error, decision.created)
            if answer:
                await self._set_condition(
                    schedule, ConditionType.ACCEPTED, False, answer.reason, answer.message
                )
        except KubeError as status_error:
            log.warning("%s: failed to write the status: %s", schedule.key, status_error)

    async def _set_condition(
        self,
        schedule: Schedule,
        kind: ConditionType,
        holds: bool | None,
        reason: ConditionReason,
        message: str,
    ) -> None:
        """Write the status from before the pass with one condition changed: no job was created, so no start time is recorded."""
        now, generation = self.now(), schedule.generation
        status = with_condition(schedule.status, kind, holds, reason, message, now=now, generation=generation)
        await self.applier.write_status(
            schedule, ScheduleDecision(status=summarize_status(schedule, status, now)), now
        )
