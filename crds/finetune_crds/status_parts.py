"""Parts of a FineTuneJob's status that answer what people ask: on which device and nodes, at what cost, and where to look."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from finetune_crds.base import ApiModel, Name, NonNegative, Quantity, Uri, list_type_map
from finetune_crds.cleaning import MAX_EVALUATION_SETS, RedactKind
from finetune_crds.source import MAX_SOURCES, SourceName

MAX_DROPPED = 32
MAX_PODS = 64
MAX_USAGE = 64

Commit = Annotated[str, Field(max_length=64)]
"""A commit of a repository of the Hub."""
Digest = Annotated[str, Field(max_length=64)]
"""The beginning of a SHA-256."""
StepName = Annotated[str, Field(min_length=1, max_length=64)]


class SourceRows(ApiModel):
    """What became of one source of a mix."""

    name: SourceName
    """The source, as in data.source.sources."""
    rows: NonNegative
    """Its examples in the splits."""
    version: NonNegative | None = None
    """Version of the Delta table that was read."""
    revision: Commit | None = None
    """Commit of the Hub data set that was read."""


SourcesRows = Annotated[
    list[SourceRows], Field(max_length=MAX_SOURCES, json_schema_extra=list_type_map("name"))
]


class Dropped(ApiModel):
    """The examples that one step of the preparation dropped."""

    step: StepName
    """The step, named after its field of data.prepare: notNull, language, dedupe, maxTokens."""
    rows: NonNegative
    """Examples."""


DroppedRows = Annotated[list[Dropped], Field(max_length=MAX_DROPPED, json_schema_extra=list_type_map("step"))]


class Redacted(ApiModel):
    """The values of one kind that the preparation replaced by a placeholder."""

    kind: RedactKind
    """The kind, as in data.prepare.redact."""
    values: NonNegative
    """Values, in the examples that pass the filters and are in the languages to keep."""


RedactedValues = Annotated[list[Redacted], Field(max_length=8, json_schema_extra=list_type_map("kind"))]


class EvaluationSet(ApiModel):
    """An evaluation set with which no example may share a run of words."""

    name: SourceName
    """The set, as in data.prepare.decontaminate.sources."""
    examples: NonNegative
    """Different examples that were dropped because they share words with it. One that shares words with two sets counts twice."""
    version: NonNegative | None = None
    """Version of the Delta table that was read."""
    revision: Commit | None = None
    """Commit of the Hub data set that was read."""


EvaluationSets = Annotated[
    list[EvaluationSet], Field(max_length=MAX_EVALUATION_SETS, json_schema_extra=list_type_map("name"))
]


class PlacedPod(ApiModel):
    """A training pod that has a node."""

    name: Name
    """Pod."""
    node: Name
    """Its node."""
    node_rank: NonNegative | None = None
    """Its node rank. Its global ranks begin at nodeRank * processesPerNode."""
    ready: bool = False
    """Whether it is ready or has succeeded."""


PlacedPods = Annotated[list[PlacedPod], Field(max_length=MAX_PODS, json_schema_extra=list_type_map("name"))]


class DeviceStatus(ApiModel):
    """What the training pods compute on, from their resource limits."""

    type: Literal["GPU", "CPU"]
    """GPU or CPU."""
    count: NonNegative | None = None
    """GPUs of all pods together; absent on CPUs."""
    product: Annotated[str, Field(max_length=253)] | None = None
    """The GPU, as a label of the node or of the pod's nodeSelector names it."""
    summary: str | None = None
    """All of it, such as 16x NVIDIA-H100-80GB-HBM3."""


Recomputation = Literal["None", "Selective", "Full"]


class PlanStatus(ApiModel):
    """What the built-in trainer plans before it loads the weights."""

    activation_checkpointing: Recomputation
    """What training.activationCheckpointing says or Auto chooses; Full if Selective would change gradients."""
    memory: Quantity
    """Peak memory of a rank, as estimated."""
    limit: Quantity | None = None
    """Memory that a rank may use, of its GPU or its share of the pod."""
    host_memory: Quantity | None = None
    """Memory of the host that a rank needs besides, for asynchronous checkpoints."""
    parameters: NonNegative
    """Parameters of the model with its adapter."""
    trained_parameters: NonNegative
    """Those of them that are trained."""
    four_bit_parameters: NonNegative | None = None
    """Those of them that are in four bits, with method QLoRA. The others stay whole: experts that the model keeps in one tensor, the
    embedding and the output layer."""


class JobUsage(ApiModel):
    """The use by the pods of one batch Job. The operator writes and reads it, so that each pod counts once."""

    uid: Annotated[str, Field(min_length=1, max_length=64)]
    """uid of the batch Job, or `earlier` for the Jobs that no longer exist."""
    pod_seconds: NonNegative
    """Running time of the pods."""
    gpu_seconds: NonNegative
    """The same, times the GPUs of each pod."""
    counted_until: datetime | None = None
    """Until when its pods are counted; absent for `earlier`."""


class Usage(ApiModel):
    """What the job has used so far: every pod of preparation and training, of all attempts.

    A pod counts from when its node takes it until it ends. For running pods the figures grow every ten minutes.
    """

    pod_hours: Annotated[float, Field(ge=0)] = 0.0
    """Running time of the pods in hours."""
    gpu_hours: Annotated[float, Field(ge=0)] = 0.0
    """The same, times the GPUs of each pod."""
    jobs: Annotated[list[JobUsage], Field(max_length=MAX_USAGE, json_schema_extra=list_type_map("uid"))] = (
        Field(default_factory=list)
    )
    """The same by batch Job, for the operator itself."""


RunState = Literal["Submitting", "Pending", "Running", "Canceling", "Succeeded", "Failed", "Canceled"]


class DatabricksRunStatus(ApiModel):
    """The Databricks run of the preparation. The operator writes it before it submits the run, and reads it."""

    attempt: Annotated[int, Field(ge=1)]
    """Which run of the job, from 1: one that failed without fault of recipe and data, or was canceled for a suspension, is
    followed by another."""
    failures: NonNegative = 0
    """Runs that failed so far without fault of recipe and data. The third one fails the job."""
    state: RunState
    """What it does, as one word."""
    run_id: Annotated[str, Field(max_length=32)] | None = None
    """Its id in the workspace; absent until it is submitted."""
    url: Uri | None = None
    """Its page in the workspace."""


class SparkApplicationStatus(ApiModel):
    """The SparkApplication of the preparation. The operator writes it when it creates one, and reads it."""

    attempt: Annotated[int, Field(ge=1)]
    """Which SparkApplication of the job, from 1: one that failed without fault of recipe and data, or was deleted for a
    suspension, is followed by another with another name."""
    failures: NonNegative = 0
    """SparkApplications that failed so far without fault of recipe and data. The third one fails the job."""
    name: Name
    """Its name."""
    state: Annotated[str, Field(min_length=1, max_length=64)]
    """Its state, as the spark-operator has it and in CamelCase, such as Submitted, Running, Completed or Failed. New: the
    spark-operator has not seen it. Deleted: the operator has deleted it."""


class Links(ApiModel):
    """Pages for a browser."""

    run: Uri | None = None
    """The MLflow run."""
    model: Uri | None = None
    """The registered version."""
    preparation: Uri | None = None
    """The Databricks run of the preparation."""
    dashboard: Uri | None = None
    """The installation's dashboard of the job: tracking.dashboardUrl of the chart."""
