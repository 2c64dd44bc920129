"""spec.runPolicy: restarts, deadlines, cleanup and the queue."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from finetune_crds.base import LIST_TYPE_SET, ApiModel, NonNegative, Positive, QueueName

ExitCode = Annotated[int, Field(ge=1, le=255)]
ExitCodes = Annotated[list[ExitCode], Field(max_length=64, json_schema_extra=LIST_TYPE_SET)]


class RunPolicy(ApiModel):
    """Restarts, deadlines, cleanup and the queue of a job."""

    max_restarts: NonNegative = 3
    """Maximum number of restarts after a failure, not counting preemption and node loss. Also not counted: attempts
    that cannot start because a server of code or packages does not answer or refuses the login (exit code 69)."""
    restart_window_seconds: Annotated[int, Field(ge=60)] = 86400
    """Maximum time in which restarts that are not counted make no progress; then the job fails. A newer checkpoint or a
    later step is progress. Time in a queue, without a node or in suspension is not included."""
    retryable_exit_codes: ExitCodes = Field(default_factory=list)
    """If set, only these exit codes cause a restart."""
    fatal_exit_codes: ExitCodes = [64, 65]
    """Exit codes that fail the job at once. 64: the recipe is wrong. 65: the data is wrong."""
    active_deadline_seconds: Positive | None = None
    """Maximum time of preparation, training and evaluation together; then the job fails. Time in a queue, without a node or
    in suspension is not included."""
    ttl_seconds_after_finished: NonNegative | None = None
    """Seconds from the end of the job until its pods and other children are deleted; the FineTuneJob stays."""
    queue_name: QueueName | None = None
    """Kueue queue for the pods of each step; empty for no queue. Default: defaults.queueName of the chart."""
