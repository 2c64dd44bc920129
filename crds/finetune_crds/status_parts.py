"""Parts of a FineTuneJob's status: its phase, the results of the preparation, devices and nodes, usage, and links."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from finetune_crds.base import ApiModel, Name, NonNegative, Quantity, Uri, list_type_map
from finetune_crds.cleaning import MAX_EVALUATION_SETS, RedactKind
from finetune_crds.source import MAX_SOURCES, SourceName

# Maximum lengths of lists in the status.
MAX_DROPPED = 32
MAX_PODS = 64
MAX_USAGE = 64

Commit = Annotated[str, Field(max_length=64)]
"""A commit of a repository of the Hub."""
Digest = Annotated[str, Field(max_length=64)]
"""The beginning of a SHA-256."""
StepName = Annotated[str, Field(min_length=1, max_length=64)]

Phase = Literal[
    "Pending",
    "Queued",
    "Preparing",
    "Starting",
    "Training",
    "Evaluating",
    "Registering",
    "Suspended",
    "Succeeded",
    "Failed",
]


class SourceRows(ApiModel):
    """The result of one source of a mix."""

    name: SourceName
    """The source, as in data.source.sources."""
    rows: NonNegative
    """The source's examples in the splits."""
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
    """The step, named after its field of data.prepare, or why an answer of an inference table is no example. For
    example, notNull, language, dedupe, maxTokens; noFeedback."""
    rows: NonNegative
    """Number of examples."""


DroppedRows = Annotated[list[Dropped], Field(max_length=MAX_DROPPED, json_schema_extra=list_type_map("step"))]


class Redacted(ApiModel):
    """The values of one kind that the preparation replaced by a placeholder."""

    kind: RedactKind
    """The kind, as in data.prepare.redact."""
    values: NonNegative
    """Number of values in the examples that pass the filters and are in a language to keep."""


RedactedValues = Annotated[list[Redacted], Field(max_length=8, json_schema_extra=list_type_map("kind"))]


class EvaluationSet(ApiModel):
    """An evaluation set, and the examples that share a run of words with it."""

    name: SourceName
    """The set, as in data.prepare.decontaminate.sources."""
    examples: NonNegative
    """Distinct examples that were dropped because they share words with the set. An example that shares words with two sets
    counts in both."""
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
    """Name of the pod."""
    node: Name
    """Node of the pod."""
    node_rank: NonNegative | None = None
    """Node rank of the pod. The pod's global ranks begin at nodeRank * processesPerNode."""
    ready: bool = False
    """Whether the pod is ready or has succeeded."""


PlacedPods = Annotated[list[PlacedPod], Field(max_length=MAX_PODS, json_schema_extra=list_type_map("name"))]


class DeviceStatus(ApiModel):
    """The devices of the training pods, from the pods' resource limits."""

    type: Literal["GPU", "CPU"]
    """GPU or CPU."""
    count: NonNegative | None = None
    """Number of GPUs of all pods. It is absent on CPUs."""
    product: Annotated[str, Field(max_length=253)] | None = None
    """GPU model, from a label of the node or the pod's nodeSelector."""
    summary: str | None = None
    """GPU count and model, such as 16x NVIDIA-H100-80GB-HBM3."""


Recomputation = Literal["None", "Selective", "Full"]


class PlanStatus(ApiModel):
    """The memory plan that the built-in trainer makes before it loads the weights."""

    activation_checkpointing: Recomputation
    """Value of training.activationCheckpointing, or the choice of Auto. Full if Selective would change gradients."""
    memory: Quantity
    """Estimated peak memory of a rank."""
    limit: Quantity | None = None
    """Memory that a rank can use, of its GPU or its share of the pod."""
    host_memory: Quantity | None = None
    """Additional host memory of a rank, for asynchronous checkpoints."""
    parameters: NonNegative
    """Parameters of the model with its adapter."""
    trained_parameters: NonNegative
    """Parameters that are trained."""
    four_bit_parameters: NonNegative | None = None
    """Parameters that method QLoRA stores in four bits. The embedding, the output layer, and experts that the model keeps in
    one tensor are not quantized."""


class JobUsage(ApiModel):
    """Usage by the pods of one batch Job. Internal: with it, the operator counts each pod once."""

    uid: Annotated[str, Field(min_length=1, max_length=64)]
    """uid of the batch Job, or `earlier` for the Jobs that no longer exist."""
    pod_seconds: NonNegative
    """Running seconds of all pods."""
    gpu_seconds: NonNegative
    """Running seconds times GPUs, over all pods."""
    counted_until: datetime | None = None
    """Time up to which the Job's pods are counted. It is absent for `earlier`."""


class Usage(ApiModel):
    """Usage of the job so far, by every pod of preparation and training in all attempts.

    A pod counts from its start on a node until its end. For running pods, the numbers change every ten minutes.
    """

    pod_hours: Annotated[float, Field(ge=0)] = 0.0
    """Running hours of all pods."""
    gpu_hours: Annotated[float, Field(ge=0)] = 0.0
    """Running hours times GPUs, over all pods."""
    jobs: Annotated[list[JobUsage], Field(max_length=MAX_USAGE, json_schema_extra=list_type_map("uid"))] = (
        Field(default_factory=list)
    )
    """Usage by batch Job, for the operator itself."""


RunState = Literal["Submitting", "Pending", "Running", "Canceling", "Succeeded", "Failed", "Canceled"]


class DatabricksRunStatus(ApiModel):
    """The Databricks run of the preparation. The operator records it before it submits the run."""

    attempt: Annotated[int, Field(ge=1)]
    """Number of the run, from 1. A new run follows if it failed for a reason other than recipe and data, or was canceled for
    a suspension."""
    failures: NonNegative = 0
    """Number of runs that failed for a reason other than recipe and data. The third failure fails the job."""
    state: RunState
    """State of the run, as one word."""
    run_id: Annotated[str, Field(max_length=32)] | None = None
    """Id of the run in the workspace. It is absent until the run is submitted."""
    url: Uri | None = None
    """Page of the run in the workspace."""


class SparkApplicationStatus(ApiModel):
    """The SparkApplication of the preparation. The operator records it when it creates one."""

    attempt: Annotated[int, Field(ge=1)]
    """Number of the SparkApplication, from 1. A new one, with another name, follows if it failed for a reason other than
    recipe and data, or was deleted for a suspension."""
    failures: NonNegative = 0
    """Number of SparkApplications that failed for a reason other than recipe and data. The third failure fails the job."""
    name: Name
    """Name of the SparkApplication."""
    state: Annotated[str, Field(min_length=1, max_length=64)]
    """State that the spark-operator reports, in CamelCase, such as Submitted, Running, Completed or Failed. New: no state is
    reported yet. Deleted: the operator deleted it."""


class Links(ApiModel):
    """Pages for a browser."""

    run: Uri | None = None
    """The MLflow run."""
    model: Uri | None = None
    """The registered version."""
    preparation: Uri | None = None
    """The Databricks run of the preparation."""
    dashboard: Uri | None = None
    """Dashboard of the job, from tracking.dashboardUrl of the chart."""
