"""The ModelPromotion resource."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from finetune_crds.base import ApiModel, Name, StringMap, Uri, rules
from finetune_crds.env import LocalReference
from finetune_crds.finetunejob import Alias
from finetune_crds.gates import Gates
from finetune_crds.promotion_status import ModelPromotionStatus
from finetune_crds.serving import Serving

_NUMBER = "[1-9][0-9]{0,9}"
_LARGEST_VERSION = 9_999_999_999
_YEAR_IN_SECONDS = 366 * 24 * 3600


def _number_or_word(pattern: str) -> dict[str, Any]:
    """A schema for what people write with or without quotes."""
    choices = [{"type": "integer"}, {"type": "string"}]
    bounds = {"minimum": 1, "maximum": _LARGEST_VERSION, "pattern": f"^{pattern}$"}
    return {"x-kubernetes-int-or-string": True, "anyOf": choices, **bounds}


def _text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


VersionNumber = Annotated[
    str,
    BeforeValidator(_text),
    Field(pattern=f"^{_NUMBER}$", json_schema_extra=_number_or_word(_NUMBER)),
]
"""A version of a registered model, written as a number or as text."""

RollbackTarget = Annotated[
    str,
    BeforeValidator(_text),
    Field(pattern=f"^(Previous|{_NUMBER})$", json_schema_extra=_number_or_word(f"(Previous|{_NUMBER})")),
]


class Source(ApiModel):
    """Where the version comes from."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "[has(self.version), has(self.alias), has(self.fineTuneJob)].filter(is_set, is_set).size() == 1",
                "set one of version, alias and fineTuneJob",
            ),
        )
    )

    version: VersionNumber | None = None
    """A version by its number."""
    alias: Alias | None = None
    """Whatever version another alias of the model points at, now and later."""
    fine_tune_job: Name | None = None
    """The version that a FineTuneJob of this namespace registers; waited for until the job has succeeded."""


class Approval(ApiModel):
    """A person's word."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.required || !(has(self.version) || has(self.bypassSoak) || has(self.timeoutSeconds) || "
                "has(self.by))",
                "approval.required is false: remove version, by, bypassSoak and timeoutSeconds, or set it to true",
            ),
        )
    )

    required: bool = True
    """Whether a version that passed its gates waits for a person."""
    version: VersionNumber | None = None
    """The version that is approved; it counts for no other."""
    by: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """Who approves, for the history."""
    bypass_soak: bool | None = None
    """Do not wait for the rest of soakSeconds once the version is approved."""
    timeout_seconds: Annotated[int, Field(ge=1, le=_YEAR_IN_SECONDS)] | None = None
    """The version is refused when it is not approved within this time. Default: no limit."""


class PromotionTracking(ApiModel):
    """The MLflow server and the model registry."""

    uri: Uri | None = None
    """MLflow tracking server, or databricks. Default: the one the operator was installed with."""
    registry_uri: Uri | None = None
    """Model registry: that of an MLflow server, or databricks-uc. Default: the tracking server."""
    secret_ref: LocalReference | None = None
    """Secret with MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN; for Databricks with
    DATABRICKS_HOST and DATABRICKS_TOKEN, or DATABRICKS_CLIENT_ID and DATABRICKS_CLIENT_SECRET."""


def _fixed(field: str) -> tuple[str, str]:
    both = f"has(self.{field}) == has(oldSelf.{field})"
    return (
        f"{both} && (!has(self.{field}) || self.{field} == oldSelf.{field})",
        f"spec.{field} cannot change: create a ModelPromotion with another name, and delete this one",
    )


class ModelPromotionSpec(ApiModel):
    """Which alias should point where, and what has to be true before it does."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            *(_fixed(field) for field in ("model", "alias", "tracking.uri", "tracking.registryUri")),
            (
                "!has(self.source.alias) || self.source.alias != self.alias",
                "source.alias is the alias itself: name the one that comes before it",
            ),
            (
                "!self.model.matches('[/:]')",
                "MLflow takes no slash and no colon in the name of a model: remove them",
            ),
            (
                "!has(self.tracking.registryUri) || !self.tracking.registryUri.startsWith('databricks-uc') || "
                "self.model.matches('^[^.]+[.][^.]+[.][^.]+$')",
                "a model in Unity Catalog has three names: write spec.model as catalog.schema.name",
            ),
        )
    )

    model: Annotated[str, Field(min_length=1, max_length=768)]
    """The registered model; catalog.schema.name in Unity Catalog."""
    alias: Alias
    """The alias that this resource keeps."""
    source: Source
    """Where the version comes from."""
    gates: Gates = Field(default_factory=list)
    """What the version has to meet. All of them must pass; one that cannot be judged yet is waited for."""
    approval: Approval | None = None
    """Wait for a person. Default: nobody is asked."""
    soak_seconds: Annotated[int, Field(ge=0, le=_YEAR_IN_SECONDS)] = 0
    """Time between passing the gates and moving the alias."""
    on_drift: Literal["Repair", "Warn", "Adopt"] = "Repair"
    """When somebody else moves the alias: put it back, only say so, or take it as it is until a new version comes."""
    on_delete: Literal["KeepAlias", "RemoveAlias"] = "KeepAlias"
    """What becomes of the alias when this resource is deleted."""
    rollback_to: RollbackTarget | None = None
    """Point the alias at the version before (Previous) or at a version by number, without gates, and keep it there for
    as long as this is set."""
    suspend: bool = False
    """Move nothing, whatever happens; false again goes on."""
    tags: StringMap = Field(default_factory=dict)
    """Tags that a version gets when the alias moves to it."""
    tracking: PromotionTracking = Field(default_factory=PromotionTracking)
    """The MLflow server and the model registry."""
    serving: Serving | None = None
    """The endpoint that serves the version the alias points at."""


class ModelPromotion(ApiModel):
    """Keep an alias of a registered model at the version that should hold it."""

    PLURAL: ClassVar[str] = "modelpromotions"
    KIND: ClassVar[str] = "ModelPromotion"
    SHORT_NAMES: ClassVar[list[str]] = ["mp"]
    COLUMNS: ClassVar[list[dict[str, Any]]] = [
        {"name": "Model", "type": "string", "jsonPath": ".spec.model"},
        {"name": "Alias", "type": "string", "jsonPath": ".spec.alias"},
        {"name": "Phase", "type": "string", "jsonPath": ".status.phase"},
        {"name": "Reason", "type": "string", "jsonPath": ".status.conditions[?(@.type=='Ready')].reason"},
        {"name": "Current", "type": "string", "jsonPath": ".status.current"},
        {"name": "Candidate", "type": "string", "jsonPath": ".status.candidate"},
        {"name": "Gates", "type": "string", "jsonPath": ".status.gates.summary"},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
        {"name": "Previous", "type": "string", "jsonPath": ".status.previous", "priority": 1},
        {"name": "Soak-Until", "type": "string", "jsonPath": ".status.soak.until", "priority": 1},
        {"name": "Endpoint", "type": "string", "jsonPath": ".status.serving.state", "priority": 1},
    ]

    api_version: Literal["finetune.dev/v1alpha1"] = "finetune.dev/v1alpha1"
    kind: Literal["ModelPromotion"] = "ModelPromotion"
    metadata: dict[str, Any] = Field(default_factory=dict)
    spec: ModelPromotionSpec
    """Which alias should point where, and what has to be true before it does."""
    status: ModelPromotionStatus = Field(default_factory=ModelPromotionStatus)
    """What the operator has to say."""
