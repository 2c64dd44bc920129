"""The decision about a schedule while it is being made."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.finetuneschedule import FineTuneScheduleSpec
from finetune_crds.schedule_status import FineTuneScheduleStatus
from finetune_operator.finetuneschedule.model import Observed, Schedule, ScheduleDecision, ScheduledJob
from finetune_operator.finetuneschedule.template import build_job
from finetune_operator.policy.cron import Cron
from finetune_operator.policy.result import Outcome, Stop
from finetune_operator.policy.status import StatusBuilder


@dataclass
class Draft(StatusBuilder[FineTuneScheduleStatus]):
    """One pass over one schedule. `status` starts as the current status and becomes the new one."""

    schedule: Schedule
    observed: Observed
    now: datetime
    status: FineTuneScheduleStatus = field(init=False)
    dry_run: Json | None = None
    replaced: tuple[ScheduledJob, ...] = ()
    created: Json | None = None
    deleted: list[ScheduledJob] = field(default_factory=list)
    requeue_seconds: float | None = None

    def __post_init__(self) -> None:
        self.status = self.schedule.status

    @property
    def generation(self) -> int:
        """Generation of the spec."""
        return self.schedule.generation

    @property
    def spec(self) -> FineTuneScheduleSpec:
        """The spec. Policies read it only after `accept` has accepted the schedule."""
        if self.schedule.spec is None:
            raise ValueError(f"the spec of {self.schedule.key} was not accepted")
        return self.schedule.spec

    @property
    def cron(self) -> Cron:
        """The start times.

        Raises:
            CronError: the schedule or the time zone is not valid, which `accept` reports.
        """
        return Cron.parse(self.spec.schedule, self.spec.time_zone)

    @property
    def active_jobs(self) -> list[ScheduledJob]:
        """The FineTuneJobs that have not finished, by start time."""
        return sorted(
            (job for job in self.observed.jobs if job.ended is None), key=lambda job: (job.start, job.name)
        )

    def build_job(self, start: datetime) -> Json:
        """Build the FineTuneJob for a start time."""
        data = self.status.data if self.spec.only_if_data_changed else None
        return build_job(self.schedule, self.spec, start, self.cron.zone, data)

    def refuse(self, reason: ConditionReason, message: str) -> Outcome:
        """Report why no FineTuneJob can be created, and end the policies."""
        self.set(ConditionType.ACCEPTED, False, reason, message)
        self.update(next_schedule_time=None)
        return Stop

    def conclude(self) -> ScheduleDecision:
        """The finished decision."""
        return ScheduleDecision(
            status=self.status,
            dry_run=self.dry_run,
            replaced=self.replaced,
            created=self.created,
            deleted=tuple(self.deleted),
            requeue_seconds=self.requeue_seconds,
        )
