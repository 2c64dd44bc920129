"""`status` of a FineTuneJob: what the operator has to say."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from finetune_crds.base import ApiModel, NonNegative, Uri
from finetune_crds.conditions import Conditions

Phase = Literal[
    "Pending", "Preparing", "Starting", "Training", "Registering", "Suspended", "Succeeded", "Failed"
]


class SplitCounts(ApiModel):
    """A number for each split."""

    train: NonNegative = 0
    """Training split."""
    validation: NonNegative = 0
    """Evaluation split."""
    test: NonNegative = 0
    """Held-out split."""


class DataStatus(ApiModel):
    """What preparation made."""

    rows: SplitCounts | None = None
    """Examples in each split."""
    tokens: SplitCounts | None = None
    """Tokens in each split."""
    path: Uri | None = None
    """The Delta table with the splits."""
    version: NonNegative | None = None
    """Its version."""
    source_version: NonNegative | None = None
    """Version of the Delta table that was read."""


class Progress(ApiModel):
    """How far training is."""

    step: NonNegative = 0
    """Optimizer steps done."""
    max_steps: NonNegative | None = None
    """Optimizer steps in all."""
    percent: Annotated[int, Field(ge=0, le=100)] | None = None
    """Steps done in percent."""
    summary: str | None = None
    """The same as kubectl shows it, such as 40%."""
    loss: float | None = None
    """Last training loss."""
    eval_loss: float | None = None
    """Last evaluation loss."""
    tokens_per_second: float | None = None
    """Tokens that are no padding, all ranks together."""
    seconds_remaining: NonNegative | None = None
    """Estimate of the time to go."""
    updated_at: datetime | None = None
    """When the trainer last reported."""


class Nodes(ApiModel):
    """Pods of the present attempt."""

    desired: NonNegative = 0
    """Pods wanted."""
    ready: NonNegative = 0
    """Pods running and ready, or done."""
    summary: str | None = None
    """Both, as ready/desired."""


class MlflowStatus(ApiModel):
    """The MLflow run."""

    experiment_id: str | None = None
    """Experiment."""
    run_id: str | None = None
    """Run: one for the job, whatever the attempt."""
    url: Uri | None = None
    """Where a browser finds the run."""


class ModelStatus(ApiModel):
    """The registered version."""

    name: str | None = None
    """Registered model."""
    version: str | None = None
    """Version."""
    uri: Uri | None = None
    """models:/name/version."""
    summary: str | None = None
    """Both, as name/version."""
    aliases: list[str] | None = None
    """Aliases that were pointed at it."""
    base_eval_loss: float | None = None
    """Evaluation loss before training."""
    eval_loss: float | None = None
    """Evaluation loss at the end."""
    perplexity: float | None = None
    """exp(evalLoss)."""


class LastFailure(ApiModel):
    """The failure that came first in the last attempt that failed."""

    pod: str | None = None
    """Pod."""
    rank: NonNegative | None = None
    """Global rank, where known."""
    exit_code: int | None = None
    """Exit code."""
    reason: str | None = None
    """One CamelCase word."""
    message: str | None = None
    """The process's own sentence, or the end of its log."""
    attempt: NonNegative | None = None
    """Attempt; 0 is preparation."""
    checkpoint_step: NonNegative | None = None
    """Step of the newest checkpoint at that time."""


class CheckpointStatus(ApiModel):
    """The newest complete checkpoint."""

    step: NonNegative | None = None
    """Step after which it was made."""
    uri: Uri | None = None
    """Where it is."""


class FineTuneJobStatus(ApiModel):
    """What the operator has to say."""

    phase: Phase | None = None
    """One word for where the job stands; derived from the conditions."""
    observed_generation: NonNegative | None = None
    """Generation of the spec that this status is about."""
    attempt: NonNegative | None = None
    """Number of the present training attempt, from 1."""
    restarts: NonNegative | None = None
    """Restarts that count against runPolicy.maxRestarts."""
    idle_restarts: NonNegative | None = None
    """Restarts in a row that did not count and had no newer checkpoint: each waits longer."""
    restart_at: datetime | None = None
    """When the present attempt may start; absent for at once."""
    start_time: datetime | None = None
    """When the first child was made."""
    completion_time: datetime | None = None
    """When the job succeeded or failed."""
    suspended_at: datetime | None = None
    """Since when the job is suspended."""
    suspended_seconds: NonNegative | None = None
    """Time spent suspended before; the deadline leaves it out."""
    data: DataStatus | None = None
    """What preparation made."""
    progress: Progress | None = None
    """How far training is."""
    nodes: Nodes | None = None
    """Pods of the present attempt."""
    mlflow: MlflowStatus | None = None
    """The MLflow run."""
    model: ModelStatus | None = None
    """The registered version."""
    last_failure: LastFailure | None = None
    """The last failure."""
    checkpoint: CheckpointStatus | None = None
    """The newest complete checkpoint."""
    goodput: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the training time that went into steps which counted."""
    conditions: Conditions = Field(default_factory=list)
    """Conditions, as in the Kubernetes API conventions."""
