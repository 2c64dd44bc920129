"""Gates: conditions that a model version must meet before an alias moves to it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.json_schema import SkipJsonSchema

from finetune_crds.base import (
    WEEK_IN_SECONDS,
    ApiModel,
    Image,
    LongText,
    Name,
    Passthrough,
    join_names,
    list_type_map,
    rules,
)
from finetune_crds.env import GATE_ENV, EnvVar

MAX_JOB_GATES = 8
DEFAULT_TIMEOUT_SECONDS = 3600
_Tolerance = Annotated[float, Field(ge=0, le=1e12)]
GateName = Annotated[
    str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")
]


BOUNDS_RULES = (
    ("has(self.min) || has(self.max)", "set min, max, or both"),
    ("!has(self.min) || !has(self.max) || self.min <= self.max", "min must not be above max", ".min"),
)
"""The rules of an object with the fields min and max."""


class MetricGate(ApiModel):
    """Bounds of a number. Without `job`, the gate reads the tag of the version with this name or else the metric of its run."""

    model_config = ConfigDict(json_schema_extra=rules(*BOUNDS_RULES))

    name: Name
    """Name of the metric."""
    min: float | None = None
    """Minimum value that passes."""
    max: float | None = None
    """Maximum value that passes."""
    job: GateName | None = None
    """Gate of type Job whose Job reports the number."""


class TagGate(ApiModel):
    """A tag that the version must have."""

    name: Name
    """Name of the tag."""
    equals: Annotated[str, Field(max_length=4096)]
    """Required value of the tag."""


class Tolerance(ApiModel):
    """A distance between two numbers."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("has(self.absolute) != has(self.relative)", "set exactly one of absolute and relative"),
        )
    )

    absolute: _Tolerance | None = None
    """Distance in the unit of the metric."""
    relative: Annotated[_Tolerance, Field(json_schema_extra={"maximum": 1})] | None = None
    """Distance as a share of the value of the version that the alias points at: 0.05 for five percent."""


class ComparisonGate(ApiModel):
    """A comparison with the version that the alias points at, if both were evaluated on the same data.

    If the training started from that version, it was evaluated on the same data as the base model. If the alias does not exist yet,
    the gate passes. With `job`, the operator runs the Job for both versions.
    """

    model_config = ConfigDict(
        json_schema_extra=rules(
            ("has(self.betterBy) != has(self.notWorseThan)", "set exactly one of betterBy and notWorseThan"),
        )
    )

    metric: Name
    """Name of the metric; both versions must have it."""
    goal: Literal["Minimize", "Maximize"]
    """Better direction: Minimize for a loss, Maximize for an accuracy."""
    better_by: Tolerance | None = None
    """The version must be better by at least this much. With `absolute: 0` an equal version passes too."""
    not_worse_than: Tolerance | None = None
    """The version may be worse by at most this much."""
    job: GateName | None = None
    """Gate of type Job whose Job reports the number."""


class JobGate(ApiModel):
    """A Job that the operator runs once for each version, and again if this part of the gate changes."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"!has(self.env) || !self.env.exists(item, item.name in {[*GATE_ENV]})",
                f"the operator sets {join_names(GATE_ENV)}: remove them from env",
                ".env",
            ),
        )
    )

    image: Image
    """Container image."""
    command: Annotated[list[LongText], Field(max_length=64)] = Field(default_factory=list)
    """Command, which finds the version in MODEL_URI, MODEL_NAME and MODEL_VERSION, and fails with an exit code other
    than 0. It can write numbers to the file METRICS_PATH as a JSON object, or log them as metrics of the MLflow run
    MLFLOW_RUN_ID."""
    args: Annotated[list[LongText], Field(max_length=256)] = Field(default_factory=list)
    """Arguments of the command."""
    env: Annotated[list[EnvVar], Field(max_length=32, json_schema_extra=list_type_map("name"))] = Field(
        default_factory=list
    )
    """Environment variables; a variable overrides its namesake in defaults.pods.all of the chart."""
    template: Passthrough | None = None
    """Other fields of a PodTemplateSpec, such as resources, envFrom or serviceAccountName; the container `main` is that
    of the Job. The pod gets no API token."""
    timeout_seconds: Annotated[int, Field(ge=1, le=WEEK_IN_SECONDS)] | None = None
    """Time limit of a pod, from its start on a node. Default: 3600."""
    retries: Annotated[int, Field(ge=0, le=10)] | None = None
    """Pods that run after one that failed. Evicted and preempted pods do not count. Default: 0."""


class Gate(ApiModel):
    """One condition on a version."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.metric) == (self.type == 'Metric') && has(self.tag) == (self.type == 'Tag') && "
                "has(self.comparison) == (self.type == 'Comparison') && has(self.job) == (self.type == 'Job')",
                "set only the field that matches type: metric for Metric, tag for Tag, comparison for Comparison, job for Job",
            ),
        )
    )

    name: GateName
    """Name of the gate, also in its verdict."""
    type: Literal["Metric", "Tag", "Comparison", "Job"]
    """Kind of gate: Metric checks a number, Tag a tag, Comparison a number of two versions, Job the exit of a Job."""
    metric: MetricGate | None = None
    """Bounds of a number."""
    tag: TagGate | None = None
    """A tag that the version must have."""
    comparison: ComparisonGate | None = None
    """A comparison with the version that the alias points at."""
    job: JobGate | None = None
    """A Job that must succeed. Gates of type Metric and Comparison can use its numbers."""

    @property
    def job_name(self) -> str | None:
        """The gate of type Job whose number this gate uses; None if it uses none."""
        part = self.metric or self.comparison
        return part.job if part else None


class CanaryGate(Gate):
    """One condition on a version that receives a share of the traffic."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.metric) == (self.type == 'Metric') && has(self.tag) == (self.type == 'Tag') && "
                "has(self.comparison) == (self.type == 'Comparison')",
                "set only the field that matches type: metric for Metric, tag for Tag, comparison for Comparison",
            ),
            (
                "(!has(self.metric) || !has(self.metric.job)) && (!has(self.comparison) || !has(self.comparison.job))",
                "a gate of a canary cannot use the number of a Job: set the gate in spec.gates",
            ),
        )
    )

    type: Literal["Metric", "Tag", "Comparison"]
    """Kind of gate: Metric checks a number, Tag a tag, Comparison a number of two versions."""
    job: SkipJsonSchema[None] = None


CanaryGates = Annotated[
    list[CanaryGate],
    Field(
        max_length=32,
        json_schema_extra=list_type_map("name"),
    ),
]
Gates = Annotated[
    list[Gate],
    Field(
        max_length=32,
        json_schema_extra=list_type_map("name")
        | rules(
            (
                f"self.filter(gate, gate.type == 'Job').size() <= {MAX_JOB_GATES}",
                f"at most {MAX_JOB_GATES} gates can have type Job",
            ),
            (
                " && ".join(
                    f"self.all(gate, !has(gate.{field}) || !has(gate.{field}.job) || "
                    f"self.exists(other, other.type == 'Job' && other.name == gate.{field}.job))"
                    for field in ("metric", "comparison")
                ),
                "metric.job and comparison.job must be the name of a gate of type Job",
            ),
        ),
    ),
]
