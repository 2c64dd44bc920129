"""The serving endpoint that follows an alias."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import ApiModel, NonNegative, Positive, rules
from finetune_crds.env import LocalReference
from finetune_crds.gates import Gates

_UcName = Annotated[str, Field(min_length=1, max_length=255)]
_Percent = Annotated[int, Field(ge=1, le=99)]


class InferenceTable(ApiModel):
    """Where the AI gateway logs requests and responses."""

    catalog: _UcName
    """Catalog in Unity Catalog."""
    schema_: _UcName = Field(alias="schema")
    """Schema in that catalog."""
    table_prefix: _UcName | None = None
    """Start of the table's name. Default: the endpoint's name."""


class ProvisionedThroughput(ApiModel):
    """Throughput that is reserved for a language model, in place of a workload of a size."""

    model_units: Positive
    """Model units to reserve, as Databricks sells them for the model."""
    burst_scaling: bool = False
    """Let Databricks add units for a short time under load."""


class CanaryStep(ApiModel):
    """A share of the traffic for a time."""

    percent: _Percent
    """Traffic that goes to the new version, in percent."""
    minutes: Annotated[int, Field(ge=0, le=10080)]
    """How long, before the next step."""


class Canary(ApiModel):
    """The way to full traffic, in steps that go forward on their own."""

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
    """The steps; after the last one the new version gets everything."""
    gates: Gates = Field(default_factory=list)
    """Looked at all the time during the steps. One that fails takes the endpoint and the alias back."""


class DatabricksServing(ApiModel):
    """An endpoint of Databricks Model Serving, created when it does not exist."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.provisionedThroughput) || (!has(self.workloadSize) && !has(self.workloadType) && "
                "!has(self.scaleToZero))",
                "provisionedThroughput replaces workloadSize, workloadType and scaleToZero: remove them",
            ),
            (
                "!has(self.provisionedThroughput) || !has(self.environment)",
                "an endpoint with provisioned throughput takes no environment: remove it",
            ),
        )
    )

    endpoint: Annotated[
        str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?$")
    ]
    """Name of the endpoint."""
    workload_size: Literal["Small", "Medium", "Large"] | None = None
    """How many requests are served at a time: Small 4, Medium 8 to 16, Large 16 to 64. Default: Small."""
    workload_type: Literal["CPU", "GPU_SMALL", "GPU_MEDIUM", "GPU_LARGE", "MULTIGPU_MEDIUM"] | None = None
    """Kind of machine. Default: CPU."""
    scale_to_zero: bool | None = None
    """Stop the machines when nobody asks. Default: true."""
    provisioned_throughput: ProvisionedThroughput | None = None
    """Throughput that is reserved for a language model."""
    previous_percent: Annotated[int, Field(ge=0, le=99)] = 0
    """Traffic that the previous version keeps once the new one is in place, in percent."""
    environment: Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=64)] = Field(
        default_factory=dict
    )
    """Environment of the served model; a value may be a secret of the workspace: {{secrets/scope/key}}."""
    inference_table: InferenceTable | None = None
    """Where requests and responses are logged."""
    canary: Canary | None = None
    """The way to full traffic. Default: at once."""
    secret_ref: LocalReference | None = None
    """Secret with DATABRICKS_HOST and DATABRICKS_TOKEN, or DATABRICKS_CLIENT_ID and DATABRICKS_CLIENT_SECRET. Default:
    the workspace that the operator was installed with."""


class Serving(ApiModel):
    """What serves the version that the alias points at."""

    model_config = ConfigDict(
        json_schema_extra=rules(("has(self.databricks)", "set databricks")),
    )

    databricks: DatabricksServing | None = None
    """An endpoint of Databricks Model Serving."""


class Route(ApiModel):
    """A version, and the share of the traffic that it gets."""

    version: Annotated[str, Field(max_length=32)]
    """Version of the model."""
    percent: Annotated[int, Field(ge=0, le=100)]
    """Traffic in percent."""


_Routes = Annotated[list[Route], Field(max_length=16)]
_Mark = Annotated[str, Field(max_length=64)]


class EndpointChange(ApiModel):
    """A change of the endpoint, written down before Databricks is asked for it."""

    routes: _Routes
    """Who is to get how much of the traffic."""
    settings: _Mark
    """Digest of everything else that the spec says of the endpoint."""
    revision: _Mark | None = None
    """When the endpoint was last changed before that, as Databricks said."""


class EndpointFailure(ApiModel):
    """A change that failed; it is not tried again until the spec changes."""

    version: Annotated[str, Field(max_length=32)]
    """The version that was to be served."""
    generation: NonNegative
    """Generation of the spec then."""
    reason: Literal["EndpointFailed", "CanaryFailed"]
    """EndpointFailed: Databricks could not deploy it. CanaryFailed: a gate of the canary failed."""
    message: Annotated[str, Field(max_length=4096)]
    """Why, in a sentence."""


class ServingStatus(ApiModel):
    """What is known of the endpoint."""

    endpoint: str | None = None
    """Its name."""
    url: Annotated[str, Field(max_length=1024)] | None = None
    """Where requests go."""
    state: str | None = None
    """Ready, NotReady, Updating, UpdateFailed or Missing, as Databricks last said."""
    version: Annotated[str, Field(max_length=32)] | None = None
    """The version that it is being moved to, or serves."""
    routes: _Routes | None = None
    """Who gets how much of the traffic now."""
    step: NonNegative | None = None
    """Step of the canary that is under way, from 1."""
    steps: NonNegative | None = None
    """Steps in all."""
    step_since: datetime | None = None
    """Since when that step is in force; absent until it is."""
    next_step_at: Annotated[str, Field(max_length=64)] | None = None
    """When the next step is due."""
    saved: _Routes | None = None
    """The routes before the move, while it is under way: what the endpoint goes back to."""
    change: EndpointChange | None = None
    """The change that Databricks is being asked for."""
    settings: _Mark | None = None
    """Digest of what else the spec said of the endpoint when it was last found right."""
    revision: _Mark | None = None
    """When the endpoint had last been changed then, as Databricks said."""
    failure: EndpointFailure | None = None
    """What failed last."""
