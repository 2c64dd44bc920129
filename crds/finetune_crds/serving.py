"""`spec.serving`: the endpoint that follows an alias, and the settings of each backend."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import (
    OPERATOR_DEFAULT,
    WEEK_IN_SECONDS,
    ApiModel,
    NonNegative,
    Positive,
    ReplacedField,
    replaced,
    required_by_rule,
    rules,
)
from finetune_crds.env import LocalReference
from finetune_crds.gates import CanaryGates

_UnityCatalogName = Annotated[str, Field(min_length=1, max_length=255)]
_Percent = Annotated[int, Field(ge=1, le=99)]
_Concurrent = Annotated[int, Field(ge=4, le=1024, multiple_of=4)]


class InferenceTable(ApiModel):
    """The table that an endpoint logs requests and responses to."""

    catalog: _UnityCatalogName
    """Catalog of the table in Unity Catalog."""
    schema_: _UnityCatalogName = Field(alias="schema")
    """Schema of the table."""
    table_prefix: _UnityCatalogName | None = None
    """Prefix of the table's name. Default: the endpoint's name."""


class ProvisionedThroughput(ApiModel):
    """Reserved throughput for a language model, instead of a workload size."""

    model_units: Positive
    """Number of model units to reserve, as Databricks defines them for the model."""
    burst_scaling: bool = False
    """Let Databricks add units for a short time under load."""


class Concurrency(ApiModel):
    """The range of concurrent requests within which Databricks scales the machines of a version."""

    model_config = ConfigDict(
        json_schema_extra=rules(("self.min <= self.max", "min must not be above max: swap them", ".min")),
    )

    min: _Concurrent
    """Minimum number, in steps of 4."""
    max: _Concurrent
    """Maximum number, in steps of 4."""


class CanaryStep(ApiModel):
    """A share of the traffic, and its duration."""

    percent: _Percent
    """Traffic that goes to the new version, in percent."""
    duration_seconds: Annotated[int, Field(ge=0, le=WEEK_IN_SECONDS)]
    """Seconds until the next step."""


class Canary(ApiModel):
    """A gradual increase of the new version's traffic, in steps that advance automatically."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.steps.map(step, step.percent).isSorted() && "
                "self.steps.all(step, self.steps.exists_one(other, other.percent == step.percent))",
                "each step must give the new version more traffic than the step before",
            ),
        )
    )

    steps: Annotated[list[CanaryStep], Field(min_length=1, max_length=10)]
    """The steps, after which the new version receives all traffic."""
    gates: CanaryGates = Field(default_factory=list)
    """Gates that are evaluated during the steps; if one fails, the endpoint and the alias move back."""


class DatabricksServing(ApiModel):
    """Settings of an endpoint of Databricks Model Serving."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.provisionedThroughput) || (!has(self.workloadSize) && !has(self.workloadType) && "
                "!has(self.scaleToZero) && !has(self.concurrency) && !has(self.environment))",
                "workloadSize, workloadType, concurrency, scaleToZero and environment must not be set when provisionedThroughput is set",
            ),
            (
                "!has(self.concurrency) || !has(self.workloadSize)",
                "workloadSize must not be set when concurrency is set",
                ".workloadSize",
            ),
        )
        | replaced(
            endpoint=ReplacedField("string", "serving.databricks.endpoint", "replaced by serving.endpoint"),
            canary=ReplacedField("object", "serving.databricks.canary", "replaced by serving.canary"),
            previousPercent=ReplacedField(
                "integer",
                "serving.databricks.previousPercent",
                "removed: after a rollout the new version receives all traffic; remove the field",
            ),
        )
    )

    workload_size: Literal["Small", "Medium", "Large"] | None = None
    """Concurrent requests: Small 4, Medium 8 to 16, Large 16 to 64. Default: Small."""
    concurrency: Concurrency | None = None
    """Range of concurrent requests, instead of a workload size."""
    workload_type: (
        Literal[
            "CPU",
            "CPUMedium",
            "CPULarge",
            "GPUSmall",
            "GPUMedium",
            "GPULarge",
            "GPUXLarge",
            "GPUXLarge8",
            "MultiGPUMedium",
        ]
        | None
    ) = None
    """Type of machine. Default: CPU."""
    scale_to_zero: bool | None = None
    """Stop the machines when there are no requests. Default: true."""
    provisioned_throughput: ProvisionedThroughput | None = None
    """Reserved throughput for a language model."""
    environment: Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=64)] = Field(
        default_factory=dict
    )
    """Environment variables of the served model; {{secrets/scope/key}} is a secret of the workspace."""
    inference_table: InferenceTable | None = None
    """Table for requests and responses. If you remove this field, the operator turns off the logging that it turned
    on."""
    secret_ref: LocalReference | None = None
    """Secret with the login of a Databricks workspace, see tracking.secretRef. Default: databricks.host of the
    chart."""


class Serving(ApiModel):
    """The endpoint that serves the version that the alias points at. The operator creates the endpoint if it does not exist."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            # An object with `databricks.endpoint` passes this rule: that field has its own rule, whose message names the new field.
            (
                "has(self.endpoint) || (has(self.databricks) && has(self.databricks.endpoint))",
                "endpoint is required: set it to the name of the endpoint",
                ".endpoint",
            ),
            # An existing object can have the two fields below, which an earlier version stored and the operator now ignores. Whoever
            # sets `endpoint` must also move or remove these fields, so that no setting is lost silently.
            (
                "!has(self.endpoint) || !has(self.databricks) || !has(self.databricks.canary)",
                "serving.databricks.canary was replaced by serving.canary: move it",
                ".databricks",
            ),
            (
                "!has(self.endpoint) || !has(self.databricks) || !has(self.databricks.previousPercent) || "
                "self.databricks.previousPercent == 0",
                "serving.databricks.previousPercent was removed: after a rollout the new version receives all traffic; remove the field",
                ".databricks",
            ),
        )
        | required_by_rule("endpoint")
    )

    type: Literal["Databricks"]
    """Platform of the endpoint: Databricks Model Serving."""
    endpoint: Annotated[
        str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?$")
    ]
    """Name of the endpoint."""
    canary: Canary | None = None
    """A gradual increase of the new version's traffic. Default: all traffic at once."""
    alias_moves: Literal["AfterCanary", "BeforeCanary"] = "AfterCanary"
    """When the alias moves to a version with a canary. A rollback does not wait for a canary."""
    databricks: Annotated[DatabricksServing, Field(json_schema_extra=OPERATOR_DEFAULT)] = Field(
        default_factory=DatabricksServing
    )
    """Settings of an endpoint of Databricks Model Serving. Default: the default of each setting."""


class Route(ApiModel):
    """A version and its share of the traffic."""

    version: Annotated[str, Field(max_length=32)]
    """Version of the model."""
    percent: Annotated[int, Field(ge=0, le=100)]
    """Traffic in percent."""


_Routes = Annotated[list[Route], Field(max_length=16)]
_ShortText = Annotated[str, Field(max_length=64)]


class EndpointChange(ApiModel):
    """A change of the endpoint, recorded before the operator requests it."""

    routes: _Routes
    """The versions and their shares of the traffic after the change."""
    settings: _ShortText
    """Digest of the other settings of the endpoint in the spec."""
    revision: _ShortText | None = None
    """Time of the previous change, as the endpoint reported it."""


class EndpointFailure(ApiModel):
    """A change that failed. The operator does not try it again until the spec changes."""

    version: Annotated[str, Field(max_length=32)]
    """The version that failed."""
    generation: NonNegative
    """Generation of the spec at that time."""
    reason: Literal["EndpointFailed", "CanaryFailed"]
    """The deployment of the version failed (EndpointFailed), or a gate of the canary failed (CanaryFailed)."""
    message: Annotated[str, Field(max_length=4096)]
    """Reason in a sentence."""


class ServingStatus(ApiModel):
    """The state of the endpoint."""

    endpoint: str | None = None
    """Name of the endpoint."""
    url: Annotated[str, Field(max_length=1024)] | None = None
    """URL for requests."""
    state: str | None = None
    """Ready, NotReady, Updating, UpdateFailed or Missing, as last reported."""
    version: Annotated[str, Field(max_length=32)] | None = None
    """The version that the endpoint serves or moves to."""
    routes: _Routes | None = None
    """The versions and their current shares of the traffic."""
    step: NonNegative | None = None
    """Current step of the canary, from 1."""
    steps: NonNegative | None = None
    """Number of steps of the canary."""
    step_start_time: datetime | None = None
    """When the current step took effect. It is absent until then."""
    next_step_time: datetime | None = None
    """When the next step is due."""
    saved: _Routes | None = None
    """The routes before the current rollout, which the operator restores after a failure."""
    canary_complete: bool | None = None
    """True if the canary of the version is complete and the alias has not moved yet."""
    change: EndpointChange | None = None
    """The change that is in progress."""
    settings: _ShortText | None = None
    """Digest of the other settings in the spec when the endpoint last matched them."""
    revision: _ShortText | None = None
    """Time of the last change of the endpoint when its settings last matched the spec. The endpoint reported it."""
    failure: EndpointFailure | None = None
    """The last failure."""
    inference_table: InferenceTable | None = None
    """The table to which the operator turned on logging. It is absent while no such logging is on."""
