"""spec.runPolicy: restarts, deadlines, cleanup and the queue."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from finetune_crds.base import LIST_TYPE_SET, ApiModel, NonNegative, Positive, QueueName

ExitCode = Annotated[int, Field(ge=1, le=255)]
ExitCodes = Annotated[list[ExitCode], Field(max_length=64, json_schema_extra=LIST_TYPE_SET)]


class RunPolicy(ApiModel):
    """What happens when a run fails, takes too long or ends."""

    max_restarts: NonNegative = 3
    """How often the whole gang restarts after a failure. Preemption and node loss do not count, nor do attempts that cannot begin
    because a server of code or packages does not answer or refuses the login (exit code 69)."""
    restart_window_seconds: Annotated[int, Field(ge=60)] = 86400
    """How long restarts that do not count may go on without progress: a newer checkpoint, or a later step. After that, the job fails.
    Time in a queue, without a node or in suspension does not count."""
    retryable_exit_codes: ExitCodes = Field(default_factory=list)
    """If set, only these exit codes cause a restart."""
    fatal_exit_codes: ExitCodes = [64, 65]
    """Exit codes that fail the job at once: 64 the recipe is wrong, 65 the data is wrong."""
    active_deadline_seconds: Positive | None = None
    """The job fails when preparation, training and evaluation take longer than this. Time in a queue, without a node or in suspension does not
    count."""
    ttl_seconds_after_finished: NonNegative | None = None
    """Seconds from the end until the pods and other children are deleted. The FineTuneJob itself stays."""
    queue_name: QueueName | None = None
    """Kueue queue that admits the pods of each step; empty for none. Default: the queue of the installation, if it has one."""
