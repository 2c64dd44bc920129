"""`status` of a FineTuneSchedule, which the operator writes."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from finetune_crds.base import ApiModel, Name, NonNegative, list_type_map
from finetune_crds.conditions import UNSEEN, Conditions, ObservedGeneration
from finetune_crds.status_parts import Commit, Digest

SchedulePhase = Literal["Pending", "Scheduled", "Suspended", "Blocked"]

MAX_ACTIVE = 100
"""Maximum number of running jobs that the status names."""


class ActiveJob(ApiModel):
    """A FineTuneJob of the schedule that has not finished."""

    name: Name
    """Name of the FineTuneJob."""


class TrainedData(ApiModel):
    """The data of the last FineTuneJob that succeeded."""

    job: Name
    """Name of the FineTuneJob, which may no longer exist."""
    digest: Digest
    """Digest of the preparation and of its sources, as in status.data of the job."""
    source_version: NonNegative | None = None
    """Version of the Delta table that was read."""
    source_revision: Commit | None = None
    """Commit of the Hub data set that was read."""


class FineTuneScheduleStatus(ApiModel):
    """The state that the operator reports."""

    phase: SchedulePhase | None = None
    """State of the schedule as one word, derived from the conditions."""
    observed_generation: ObservedGeneration = UNSEEN
    """Generation of the spec that this status describes. It is -1 until the operator has seen the resource."""
    active: Annotated[
        list[ActiveJob], Field(max_length=MAX_ACTIVE, json_schema_extra=list_type_map("name"))
    ] = Field(default_factory=list)
    """FineTuneJobs that have not finished; at most 100, the newest."""
    active_count: NonNegative | None = None
    """Number of FineTuneJobs that have not finished."""
    last_schedule_time: datetime | None = None
    """Start time of the last FineTuneJob that was created."""
    next_schedule_time: datetime | None = None
    """Next start time. It is absent while the schedule is suspended or not valid."""
    last_successful_time: datetime | None = None
    """When a FineTuneJob last succeeded."""
    last_skipped_time: datetime | None = None
    """Start time of the last FineTuneJob that trained nothing, because its data had not changed."""
    data: TrainedData | None = None
    """The data of the last FineTuneJob that succeeded."""
    conditions: Conditions = Field(default_factory=list)
    """Conditions, as in the Kubernetes API conventions."""
