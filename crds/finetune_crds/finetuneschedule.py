"""The FineTuneSchedule resource."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import ApiModel, LabelValue, NonNegative, Passthrough, Positive, rules
from finetune_crds.cron import Schedule, TimeZone
from finetune_crds.finetunejob import FineTuneJob
from finetune_crds.schedule_status import FineTuneScheduleStatus


class JobTemplateMetadata(ApiModel):
    """Metadata of the FineTuneJobs."""

    labels: Annotated[dict[str, LabelValue], Field(max_length=64)] = Field(default_factory=dict)
    """Labels of the FineTuneJobs, in addition to finetune.dev/schedule."""
    annotations: Annotated[dict[str, str], Field(max_length=64)] = Field(default_factory=dict)
    """Annotations of the FineTuneJobs."""


class JobTemplate(ApiModel):
    """The FineTuneJob to create."""

    metadata: JobTemplateMetadata = Field(default_factory=JobTemplateMetadata)
    """Labels and annotations of the FineTuneJobs."""
    spec: Passthrough
    """Spec of the FineTuneJobs. The operator checks it by a dry run of the API server; see the condition Accepted."""


class FineTuneScheduleSpec(ApiModel):
    """When to create FineTuneJobs, and their template. All fields can change; a change applies to the next FineTuneJob."""

    schedule: Schedule
    """Start times as a cron expression with five fields, such as `0 2 * * *`, or @hourly, @daily, @weekly, @monthly, @yearly."""
    time_zone: TimeZone = "Etc/UTC"
    """Time zone of the schedule, such as Europe/Berlin. As in a CronJob, a start time that does not exist on a day of the
    clock change is skipped, and one that exists twice starts two jobs."""
    concurrency_policy: Literal["Allow", "Forbid", "Replace"] = "Allow"
    """At a start time while a job of this schedule runs: start another job (Allow), wait until the job has finished
    (Forbid), or delete it and start another (Replace)."""
    starting_deadline_seconds: Positive | None = None
    """A job is not started later than this after its start time. If several start times were missed, one job starts,
    for the last of them. Default: no limit."""
    successful_jobs_history_limit: NonNegative = 3
    """Number of succeeded FineTuneJobs to keep. Older ones are deleted."""
    failed_jobs_history_limit: NonNegative = 1
    """Number of failed FineTuneJobs to keep. Older ones are deleted."""
    suspend: bool = False
    """True: no FineTuneJob is created; those that run continue. False: a start time that was missed meanwhile is caught up
    on, within startingDeadlineSeconds."""
    only_if_data_changed: bool = False
    """Train only if the preparation finds other data than that of the last job that succeeded; requires
    jobTemplate.spec.data.source. Otherwise the job ends after its preparation and is deleted."""
    job_template: JobTemplate
    """The FineTuneJob to create."""


class FineTuneSchedule(ApiModel):
    """Create FineTuneJobs at the times of a cron schedule, as a CronJob creates Jobs."""

    PLURAL: ClassVar[str] = "finetuneschedules"
    KIND: ClassVar[str] = "FineTuneSchedule"
    SHORT_NAMES: ClassVar[list[str]] = ["fts"]
    COLUMNS: ClassVar[list[dict[str, Any]]] = [
        {"name": "Schedule", "type": "string", "jsonPath": ".spec.schedule"},
        {"name": "Suspend", "type": "boolean", "jsonPath": ".spec.suspend"},
        {"name": "Active", "type": "integer", "jsonPath": ".status.activeCount"},
        {"name": "Last Schedule", "type": "date", "jsonPath": ".status.lastScheduleTime"},
        {"name": "Ready", "type": "string", "jsonPath": ".status.conditions[?(@.type=='Ready')].status"},
        {"name": "Reason", "type": "string", "jsonPath": ".status.conditions[?(@.type=='Ready')].reason"},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
        {"name": "Timezone", "type": "string", "jsonPath": ".spec.timeZone", "priority": 1},
        {"name": "Next Schedule", "type": "string", "jsonPath": ".status.nextScheduleTime", "priority": 1},
        {
            "name": "Message",
            "type": "string",
            "jsonPath": ".status.conditions[?(@.type=='Ready')].message",
            "priority": 1,
        },
    ]
    # The name of a FineTuneJob ends in '-' and the minutes since 1970, which have 8 digits until the year 2160.
    MAX_NAME: ClassVar[int] = FineTuneJob.MAX_NAME - 9

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"size(self.metadata.name) <= {MAX_NAME} && self.metadata.name.matches('^[a-z][a-z0-9-]*$')",
                f"metadata.name must have at most {MAX_NAME} lowercase letters, digits and '-', and begin with a letter: the names of "
                "its FineTuneJobs are longer by 9 characters",
            ),
        )
    )

    api_version: Literal["finetune.dev/v1alpha1"] = "finetune.dev/v1alpha1"
    kind: Literal["FineTuneSchedule"] = "FineTuneSchedule"
    metadata: dict[str, Any] = Field(default_factory=dict)
    spec: FineTuneScheduleSpec
    """When to create FineTuneJobs, and their template."""
    status: FineTuneScheduleStatus = Field(default_factory=FineTuneScheduleStatus)
    """The state that the operator reports."""
