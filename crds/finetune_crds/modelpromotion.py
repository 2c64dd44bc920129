"""The ModelPromotion resource."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from finetune_crds.approvals import Approval, Approvals
from finetune_crds.base import (
    WEEK_IN_SECONDS,
    YEAR_IN_SECONDS,
    ApiModel,
    Passthrough,
    ServerAddress,
    Uri,
    build_immutability_rule,
    rules,
)
from finetune_crds.env import LocalReference, ObjectReference
from finetune_crds.gates import Gates
from finetune_crds.mlflow_names import NOT_IN_UNITY_TAGS, UNITY_TAGS_MESSAGE, Alias, ModelName, Tags
from finetune_crds.promotion_status import ModelPromotionStatus
from finetune_crds.regression import OnRegression
from finetune_crds.serving import Serving
from finetune_crds.version_number import VersionNumber
from finetune_crds.windows import Windows

DEFAULT_COPY_TIMEOUT_SECONDS = 6 * 3600


class Rollback(ApiModel):
    """The version that a rollback moves the alias to."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.version) == (self.type == 'Version')",
                "version is required when type is Version, and forbidden otherwise",
                ".version",
            ),
        )
    )

    type: Literal["Previous", "Version"]
    """The version before the current one (Previous), or the one in the field version (Version)."""
    version: VersionNumber | None = None
    """Number of the version."""

    @property
    def text(self) -> str:
        """The target as status and messages show it: Previous, or the number of a version."""
        return self.version or self.type


class SourceRegistry(ApiModel):
    """A version of another registry, which a Job copies into the registry of spec.tracking."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.version) != has(self.alias)",
                "set exactly one of version and alias",
            ),
        )
    )

    uri: ServerAddress
    """Address of the MLflow server with the version."""
    secret_ref: LocalReference | None = None
    """Secret with the login of this server, with the keys of tracking.secretRef."""
    model: ModelName
    """The registered model there."""
    version: VersionNumber | None = None
    """Number of the version there."""
    alias: Alias | None = None
    """Alias there, whose version is copied, also after that alias has moved."""
    template: Passthrough | None = None
    """Other fields of a PodTemplateSpec. The init container `download` reads, and the container `main` writes."""
    timeout_seconds: Annotated[int, Field(ge=1, le=WEEK_IN_SECONDS)] | None = None
    """Time limit of a pod, from its start on a node. Default: 21600."""


class Source(ApiModel):
    """The source of the version to promote."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.version) == (self.type == 'Version') && has(self.alias) == (self.type == 'Alias') && "
                "has(self.fineTuneJobRef) == (self.type == 'FineTuneJob') && has(self.registry) == (self.type == 'Registry')",
                "set only the field that matches type: version for Version, alias for Alias, fineTuneJobRef for FineTuneJob, "
                "registry for Registry",
            ),
        )
    )

    type: Literal["Version", "Alias", "FineTuneJob", "Registry"]
    """Kind of source."""
    version: VersionNumber | None = None
    """Number of the version to promote."""
    alias: Alias | None = None
    """Another alias of the model, whose version is promoted, also after that alias has moved."""
    fine_tune_job_ref: ObjectReference | None = None
    """FineTuneJob of this namespace, whose version is promoted once it has succeeded."""
    registry: SourceRegistry | None = None
    """Version of another registry, whose copy is promoted."""

    @property
    def job_name(self) -> str:
        """The name of the FineTuneJob; empty for a source of another type."""
        return self.fine_tune_job_ref.name if self.fine_tune_job_ref else ""


class PromotionTracking(ApiModel):
    """The MLflow server and the model registry."""

    uri: Uri | None = None
    """Address of the MLflow tracking server, or databricks. Default: the chart's tracking server."""
    registry_uri: Uri | None = None
    """Address of an MLflow server with the model registry, or databricks-uc. Default: the tracking server."""
    secret_ref: LocalReference | None = None
    """Secret with MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; for Databricks,
    DATABRICKS_HOST, and DATABRICKS_TOKEN or DATABRICKS_CLIENT_ID and DATABRICKS_CLIENT_SECRET."""


class ModelPromotionSpec(ApiModel):
    """The alias, the source of its version, and the conditions that a version must meet first."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            build_immutability_rule(
                ("model", "tracking.uri", "tracking.registryUri"),
                ("alias",),
                message="model, alias, tracking.uri and tracking.registryUri cannot change: create a ModelPromotion with another name, and "
                "delete this one",
                ending="cannot change: create a ModelPromotion with another name, and delete this one",
            ),
            (
                "!has(self.source.alias) || self.source.alias != self.alias",
                "source.alias must differ from alias, which this promotion moves",
                ".source.alias",
            ),
            (
                "!has(self.tracking.registryUri) || !self.tracking.registryUri.startsWith('databricks-uc') || "
                "(has(self.model) && self.model.matches('^[^.]+[.][^.]+[.][^.]+$'))",
                "model must be catalog.schema.name for a model in Unity Catalog",
                ".model",
            ),
            (
                "!has(self.serving) || self.serving.type != 'Databricks' || "
                "!has(self.tracking.uri) && !has(self.tracking.registryUri) || "
                "(has(self.tracking.registryUri) ? self.tracking.registryUri == 'databricks-uc' : "
                "self.tracking.uri == 'databricks')",
                "serving.type Databricks requires a model in Unity Catalog: set tracking.registryUri to databricks-uc",
                ".serving",
            ),
            (
                "!has(self.onRegression) || !has(self.onRegression.endpointMetric) || has(self.serving)",
                "onRegression.endpointMetric requires serving",
                ".onRegression",
            ),
            (
                "!has(self.tags) || !has(self.tracking.registryUri) || self.tracking.registryUri != 'databricks-uc' || "
                f"self.tags.all(key, !key.matches('{NOT_IN_UNITY_TAGS}'))",
                f"{UNITY_TAGS_MESSAGE}: rename the tag",
                ".tags",
            ),
        )
    )

    model: ModelName = ""
    """The registered model; catalog.schema.name in Unity Catalog. Default: metadata.name."""
    alias: Alias
    """The alias that this resource manages."""
    source: Source
    """Source of the version to promote."""
    gates: Gates = Field(default_factory=list)
    """Conditions that the version must all meet. A gate that cannot be evaluated yet delays the promotion."""
    approval: Approval | None = None
    """If set, even to `{}`, a version waits for an approval. Default: it waits only if the platform team requires approvals."""
    approvals: Approvals = Field(default_factory=list)
    """The versions that people approved, one for each person."""
    soak_seconds: Annotated[int, Field(ge=0, le=YEAR_IN_SECONDS)] = 0
    """Seconds between passing the gates and moving the alias."""
    windows: Windows = Field(default_factory=list)
    """Times in which the alias may move to a candidate, or a canary may begin. A rollback, a withdrawal and a repair do not
    wait for a window. Default: at any time."""
    on_drift: Literal["Repair", "Warn", "Adopt"] = "Repair"
    """Reaction when someone else moves the alias: move it back (Repair), report it (Warn), or accept it until the
    source names a new version (Adopt)."""
    on_regression: OnRegression | None = None
    """Reaction to a number that gets out of bounds after a move. Default: none."""
    on_delete: Literal["KeepAlias", "RemoveAlias"] = "KeepAlias"
    """Whether the alias stays or is removed when this resource is deleted."""
    rollback_to: Rollback | None = None
    """Point the alias at an earlier version, without gates, and keep it there while this field is set."""
    suspend: bool = False
    """True: the operator does not move the alias or change the endpoint. False: the operator resumes."""
    tags: Tags = Field(default_factory=dict)
    """Tags to set on a version when the alias moves to it."""
    tracking: PromotionTracking = Field(default_factory=PromotionTracking)
    """The MLflow server and the model registry."""
    serving: Serving | None = None
    """The endpoint that serves the version that the alias points at."""


class ModelPromotion(ApiModel):
    """Keep an alias of a registered model at the version that it should point at."""

    PLURAL: ClassVar[str] = "modelpromotions"
    KIND: ClassVar[str] = "ModelPromotion"
    SHORT_NAMES: ClassVar[list[str]] = ["mprom"]
    COLUMNS: ClassVar[list[dict[str, Any]]] = [
        {"name": "Model", "type": "string", "jsonPath": ".status.model"},
        {"name": "Alias", "type": "string", "jsonPath": ".spec.alias"},
        {"name": "Phase", "type": "string", "jsonPath": ".status.phase"},
        {"name": "Reason", "type": "string", "jsonPath": ".status.conditions[?(@.type=='Ready')].reason"},
        {"name": "Current", "type": "string", "jsonPath": ".status.current"},
        {"name": "Candidate", "type": "string", "jsonPath": ".status.candidate"},
        {"name": "Gates", "type": "string", "jsonPath": ".status.gates.summary"},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
        {"name": "Previous", "type": "string", "jsonPath": ".status.previous", "priority": 1},
        {"name": "Soak-Until", "type": "string", "jsonPath": ".status.soak.endTime", "priority": 1},
        {"name": "Endpoint", "type": "string", "jsonPath": ".status.serving.state", "priority": 1},
        {
            "name": "Message",
            "type": "string",
            "jsonPath": ".status.conditions[?(@.type=='Ready')].message",
            "priority": 1,
        },
    ]

    api_version: Literal["finetune.dev/v1alpha1"] = "finetune.dev/v1alpha1"
    kind: Literal["ModelPromotion"] = "ModelPromotion"
    metadata: dict[str, Any] = Field(default_factory=dict)
    spec: ModelPromotionSpec
    """The alias, the source of its version, and the conditions that a version must meet first."""
    status: ModelPromotionStatus = Field(default_factory=ModelPromotionStatus)
    """The state that the operator reports."""
