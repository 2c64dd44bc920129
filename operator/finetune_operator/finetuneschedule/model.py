"""The data of a pass over a FineTuneSchedule: the resource, the observation and the decision."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason
from finetune_crds.finetuneschedule import FineTuneScheduleSpec
from finetune_crds.schedule_status import FineTuneScheduleStatus, TrainedData
from finetune_operator.tenancy.model import Refusal

KIND = "FineTuneSchedule"


@dataclass(frozen=True)
class Schedule:
    """A FineTuneSchedule as the API server has it.

    `spec` is None when it does not fit this version's schema; `invalid` then has the reason. `version` is the resource version.
    """

    name: str
    namespace: str
    uid: str
    version: str
    generation: int
    created: datetime
    spec: FineTuneScheduleSpec | None
    status: FineTuneScheduleStatus
    invalid: str | None = None
    deleting: bool = False

    @property
    def key(self) -> str:
        """namespace/name."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class ScheduledJob:
    """A FineTuneJob of the schedule.

    Attributes:
        start: the start time that it was created for.
        ended: when it succeeded or failed; None while it has not finished.
        succeeded: whether it has succeeded, also if it trained nothing.
        is_unchanged: whether it trained nothing, because its data had not changed.
        data: the data that it prepared, if it prepared data.
    """

    name: str
    uid: str
    start: datetime
    ended: datetime | None = None
    succeeded: bool = False
    is_unchanged: bool = False
    data: TrainedData | None = None
    deleting: bool = False


@dataclass(frozen=True)
class DryRunAnswer:
    """Whether the API server would create the next FineTuneJob, and what it says."""

    admitted: bool
    reason: ConditionReason
    message: str


@dataclass(frozen=True)
class Observed:
    """The FineTuneJobs of a schedule, and the answer to a dry run that an earlier decision of this pass requested.

    `refusal`: why its FineTuneJobs would not be permitted.
    """

    jobs: tuple[ScheduledJob, ...] = ()
    dry_run_answer: DryRunAnswer | None = None
    refusal: Refusal | None = None


@dataclass(frozen=True)
class ScheduleDecision:
    """The new status, and what to write, in the order of the fields: replaced, created, the status, deleted.

    Attributes:
        dry_run: a FineTuneJob to create as a dry run; the decision is then made again with the answer.
        replaced: running FineTuneJobs that the created one replaces.
        created: the FineTuneJob to create.
        deleted: finished FineTuneJobs that are no longer needed.
        requeue_seconds: when to reconcile again without an event; None for the longest wait.
    """

    status: FineTuneScheduleStatus
    dry_run: Json | None = None
    replaced: tuple[ScheduledJob, ...] = ()
    created: Json | None = None
    deleted: tuple[ScheduledJob, ...] = ()
    requeue_seconds: float | None = None
