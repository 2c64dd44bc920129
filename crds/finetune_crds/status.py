"""`status` of a FineTuneJob, which the operator writes."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from finetune_crds.base import ApiModel, Name, NonNegative, Uri, list_type_map
from finetune_crds.catalog import Catalog
from finetune_crds.checkpoint import Checkpoint
from finetune_crds.code import CodeStatus
from finetune_crds.conditions import UNSEEN, Conditions, ObservedGeneration
from finetune_crds.data import Columns
from finetune_crds.evaluation import EvaluationStatus
from finetune_crds.status_parts import (
    Commit,
    DatabricksRunStatus,
    DeviceStatus,
    Digest,
    DroppedRows,
    EvaluationSets,
    Links,
    Phase,
    PlacedPods,
    PlanStatus,
    RedactedValues,
    SourcesRows,
    SparkApplicationStatus,
    Usage,
)
from finetune_crds.sweep import SweepStatus


class SplitCounts(ApiModel):
    """A number for each split."""

    train: NonNegative = 0
    """Training split."""
    validation: NonNegative = 0
    """Validation split."""
    test: NonNegative = 0
    """Test split."""


class DataStatus(ApiModel):
    """The result of the preparation."""

    rows: SplitCounts | None = None
    """Examples in each split."""
    tokens: SplitCounts | None = None
    """Tokens in each split."""
    path: Uri | None = None
    """The Delta table with the splits."""
    version: NonNegative | None = None
    """Version of this table."""
    digest: Digest | None = None
    """Digest of the preparation and of its sources. Tables with the same digest have the same rows."""
    written_by: Name | None = None
    """The other FineTuneJob that wrote this version. It is absent if this job wrote it."""
    source_version: NonNegative | None = None
    """Version of the Delta table that was read."""
    source_revision: Commit | None = None
    """Commit of the Hub data set that was read."""
    feedback_version: NonNegative | None = None
    """Version of the table of feedback that was read, with source.type InferenceTable."""
    sources: SourcesRows | None = None
    """The sources of a mix."""
    columns: Columns | None = None
    """Columns of an example: spec.data.columns, or the columns that the preparation detected."""
    dropped: DroppedRows | None = None
    """Examples that each step dropped, in the order of the steps."""
    redacted: RedactedValues | None = None
    """Values of each kind that data.prepare.redact replaced by placeholders."""
    evaluation_sets: EvaluationSets | None = None
    """The sets of data.prepare.decontaminate."""


class Progress(ApiModel):
    """Progress of the training."""

    step: NonNegative = 0
    """Optimizer steps done."""
    max_steps: NonNegative | None = None
    """Total number of optimizer steps."""
    percent: Annotated[int, Field(ge=0, le=100)] | None = None
    """Steps done in percent."""
    summary: str | None = None
    """Progress as kubectl shows it, such as 40%. During the preparation: the step and its percent, such as writing 40%."""
    loss: float | None = None
    """Last training loss."""
    eval_loss: float | None = None
    """Last evaluation loss."""
    tokens_per_second: float | None = None
    """Tokens per second over all ranks, without padding."""
    seconds_remaining: NonNegative | None = None
    """Estimated remaining time."""
    eta: str | None = None
    """Estimated remaining time as text, such as 1h20m. It is absent while no training runs."""
    update_time: datetime | None = None
    """When the trainer last reported."""


class Nodes(ApiModel):
    """Pods of the current attempt."""

    desired: NonNegative = 0
    """Pods that should run."""
    ready: NonNegative = 0
    """Pods that are ready or have finished."""
    summary: str | None = None
    """Both numbers, as ready/desired."""
    pods: PlacedPods | None = None
    """The first 64 pods that have a node, by node rank."""


class Resolved(ApiModel):
    """Values that the spec left to the defaults of the chart. They are those of the time when the job was accepted."""

    output: Uri | None = None
    """The Delta table that preparation writes."""
    catalog: Catalog | None = None
    """Catalog of tables."""
    checkpoint: Checkpoint | None = None
    """The checkpoints."""
    model: str | None = None
    """Name of the registered model."""
    queue_name: str | None = None
    """Kueue queue from defaults.queueName of the chart."""
    learning_rate: float | None = None
    """Peak learning rate of the built-in trainer."""


class JobUids(ApiModel):
    """The uids of the batch Jobs that the operator created last. These Jobs might no longer exist.

    Internal: the operator uses the uids to identify pods that outlive their Job.
    """

    prep: str | None = None
    """Job of the preparation."""
    train: str | None = None
    """Job of the training."""
    train_attempt: NonNegative | None = None
    """Attempt of the training Job."""
    train_start_time: datetime | None = None
    """When Kueue last started its pods."""
    evaluate: str | None = None
    """Job of the evaluation."""


class MlflowStatus(ApiModel):
    """The MLflow run."""

    experiment_id: str | None = None
    """Id of the experiment."""
    run_id: str | None = None
    """Id of the run, which all attempts of the job share."""
    url: Uri | None = None
    """URL of the run for a browser."""


class ModelStatus(ApiModel):
    """The model: the registered version, and the folder that spec.output names."""

    name: str | None = None
    """Registered model."""
    version: str | None = None
    """Version."""
    uri: Uri | None = None
    """models:/name/version."""
    folder: Uri | None = None
    """The folder that spec.output names, once the model is in it."""
    summary: str | None = None
    """Name and version, as name/version; the folder, if the job registers no version."""
    aliases: list[str] | None = None
    """Aliases of the version."""
    base_eval_loss: float | None = None
    """Evaluation loss before training."""
    eval_loss: float | None = None
    """Evaluation loss at the end."""
    perplexity: float | None = None
    """exp(evalLoss)."""


class LastFailure(ApiModel):
    """The first failure in the last attempt that failed."""

    pod: str | None = None
    """Pod."""
    node: str | None = None
    """Node of the pod."""
    rank: NonNegative | None = None
    """Global rank, if known."""
    exit_code: int | None = None
    """Exit code."""
    reason: str | None = None
    """One CamelCase word."""
    message: str | None = None
    """The message of the process, or the end of its log."""
    attempt: NonNegative | None = None
    """Number of the attempt; 0 for the preparation or the evaluation."""
    checkpoint_step: NonNegative | None = None
    """Step of the newest complete checkpoint at that time."""
    step: NonNegative | None = None
    """The highest step that the training had reported by that time."""


MAX_ATTEMPTS = 10
"""Maximum number of attempts in the status."""


AttemptCause = Literal["Failed", "Fatal", "JobDeleted", "NodeLost", "NotStarted", "OutOfMemory", "Preempted"]


class EndedAttempt(ApiModel):
    """An attempt that ended before the training was complete."""

    attempt: NonNegative
    """Attempt."""
    end_time: datetime
    """Time by which the attempt had ended."""
    cause: AttemptCause | None = None
    """Class of the failure, which decides what follows. Failed: counts as a restart. Fatal: another attempt would fail too. JobDeleted:
    somebody deleted the batch Job. NodeLost: a node did not answer. NotStarted: the command did not start. OutOfMemory: the next attempt
    uses less memory. Preempted: evicted or stopped, or somebody deleted a pod."""
    reason: str | None = None
    """Reason, as in lastFailure."""
    exit_code: int | None = None
    """Exit code."""
    pod: str | None = None
    """Pod that failed first."""
    node: str | None = None
    """Node of the pod."""
    checkpoint_step: NonNegative | None = None
    """Step of the newest complete checkpoint."""
    message: str | None = None
    """Last lines of the message, at most 20."""


EndedAttempts = Annotated[
    list[EndedAttempt], Field(max_length=MAX_ATTEMPTS, json_schema_extra=list_type_map("attempt", "endTime"))
]


class ReducedMemory(ApiModel):
    """Settings that replace settings of the spec, because an attempt ran out of memory."""

    per_device_batch_size: int | None = None
    """In place of training.perDeviceBatchSize."""
    per_device_eval_batch_size: int | None = None
    """In place of training.perDeviceEvalBatchSize."""
    gradient_accumulation: int | None = None
    """In place of training.gradientAccumulation, so that a step has as many sequences."""
    activation_checkpointing: Literal["None", "Selective", "Full"] | None = None
    """In place of training.activationCheckpointing."""
    checkpoint_mode: Literal["Sync"] | None = None
    """In place of checkpoint.mode."""


class CheckpointStatus(ApiModel):
    """The newest complete checkpoint."""

    step: NonNegative | None = None
    """Step after which the checkpoint was written."""
    uri: Uri | None = None
    """Location of the checkpoint."""


class Pinned(ApiModel):
    """The versions that aliases of the spec pointed at when the job began."""

    base: Uri | None = None
    """models:/name/version of spec.model.base."""
    teacher: Uri | None = None
    """models:/name/version of the teacher."""


class ResumedFrom(ApiModel):
    """The checkpoints that spec.checkpoint.resumeFrom resolved to."""

    uri: Uri
    """The folder of the checkpoints, or one of them."""
    job: Name | None = None
    """The FineTuneJob that resumeFrom names, if any."""


class FineTuneJobStatus(ApiModel):
    """The state that the operator reports."""

    phase: Phase | None = None
    """State of the job as one word, derived from the conditions."""
    phase_time: datetime | None = None
    """When the job entered its phase. Pending begins with the creation of the job."""
    observed_generation: ObservedGeneration = UNSEEN
    """Generation of the spec that this status describes. It is -1 until the operator has seen the resource."""
    attempt: NonNegative | None = None
    """Number of the current training attempt, from 1."""
    restarts: NonNegative | None = None
    """Restarts that count against runPolicy.maxRestarts."""
    idle_restarts: NonNegative | None = None
    """Consecutive restarts that were not counted and made no progress. Each restart waits longer."""
    no_progress_since: datetime | None = None
    """End of the first of the consecutive attempts without progress. Their restarts were not counted."""
    restart_time: datetime | None = None
    """Earliest start of the current attempt. It is absent if it need not wait."""
    start_time: datetime | None = None
    """When the operator created the first child."""
    completion_time: datetime | None = None
    """When the job succeeded or failed."""
    suspend_time: datetime | None = None
    """When the job was suspended. It is absent when it is not."""
    waiting_since: datetime | None = None
    """Start of the current wait in a queue, for a node, or in suspension. Absent while the job does not wait."""
    waiting_seconds: NonNegative | None = None
    """Total time of earlier waits. It is not included in runPolicy.activeDeadlineSeconds."""
    resolved: Resolved | None = None
    """Values that the spec left to the defaults of the chart. They are those of the time when the job was accepted."""
    jobs: JobUids | None = None
    """The uids of the current Jobs, by which the operator finds their pods."""
    databricks_run: DatabricksRunStatus | None = None
    """The Databricks run of the preparation."""
    spark_application: SparkApplicationStatus | None = None
    """The SparkApplication of the preparation."""
    data: DataStatus | None = None
    """The result of the preparation."""
    progress: Progress | None = None
    """Progress of the training."""
    nodes: Nodes | None = None
    """Pods of the current attempt."""
    device: DeviceStatus | None = None
    """Devices of the training pods."""
    plan: PlanStatus | None = None
    """Memory that a rank needs for the training."""
    mlflow: MlflowStatus | None = None
    """The MLflow run."""
    model: ModelStatus | None = None
    """The model: the registered version, and the folder that spec.output names."""
    evaluation: EvaluationStatus | None = None
    """The evaluation of the registered version."""
    last_failure: LastFailure | None = None
    """The last failure."""
    attempts: EndedAttempts | None = None
    """The last attempts that ended before the training was complete."""
    reduced_memory: ReducedMemory | None = None
    """Settings of the current attempt that use less memory than those of the spec."""
    checkpoint: CheckpointStatus | None = None
    """The newest complete checkpoint."""
    sweep: SweepStatus | None = None
    """The trials of spec.sweep."""
    pinned: Pinned | None = None
    """Versions to which models:/name@alias resolves in all pods of the job."""
    resumed_from: ResumedFrom | None = None
    """The checkpoints of another job that this job starts from, once they are known."""
    code: CodeStatus | None = None
    """The commit of spec.trainer.code.git, once it is known."""
    links: Links | None = None
    """Pages for a browser."""
    usage: Usage | None = None
    """Usage of the job so far."""
    goodput: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the training time that was spent on steps whose result was kept."""
    productive_seconds: NonNegative | None = None
    """Training time that was spent on steps whose result was kept, over all attempts."""
    conditions: Conditions = Field(default_factory=list)
    """Conditions, as in the Kubernetes API conventions."""

    @property
    def run_id(self) -> str | None:
        """The id of the MLflow run, if it is known."""
        return self.mlflow.run_id if self.mlflow else None
