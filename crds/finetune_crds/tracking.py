"""spec.tracking and spec.register: the MLflow run of a job, other trackers, and the model that it registers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import LIST_TYPE_SET, ApiModel, Name, Uri, rules
from finetune_crds.databricks import ON_DATABRICKS
from finetune_crds.env import LocalReference
from finetune_crds.mlflow_names import NOT_IN_UNITY_TAGS, UNITY_TAGS_MESSAGE, Alias, ModelName, Tags
from finetune_crds.sinks import Sinks

PublicUrl = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^https?://")]


class Tracking(ApiModel):
    """The MLflow run, and other trackers."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "!has(self.uri) || !has(self.registryUri) || "
                "(self.uri == 'databricks') == (self.registryUri == 'databricks-uc')",
                "tracking.uri databricks and tracking.registryUri databricks-uc require each other",
            ),
        )
    )

    uri: Uri | None = None
    """MLflow tracking server, or databricks. Default: the chart's tracking server."""
    public_url: PublicUrl | None = None
    """Address of the tracking server for browsers, used in status.links. Default: uri."""
    registry_uri: Uri | None = None
    """MLflow model registry, or databricks-uc. Default: the tracking server; when uri is databricks, Unity Catalog."""
    experiment: Name | None = None
    """Name of the experiment, or its path at Databricks. Default: the namespace of the job; at Databricks,
    /Shared/namespace."""
    run_name: Name | None = None
    """Name of the run. Default: the name of the job."""
    tags: Tags = Field(default_factory=dict)
    """Tags of the run."""
    secret_ref: LocalReference | None = None
    """Secret with MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD; for Databricks,
    DATABRICKS_HOST, and DATABRICKS_TOKEN or DATABRICKS_CLIENT_ID and DATABRICKS_CLIENT_SECRET. The pods use it too,
    unless trainerSecretRef is set."""
    trainer_secret_ref: LocalReference | None = None
    """Secret that the pods use instead of secretRef. Its credentials need only to write the run and to create a model
    version. Default: secretRef."""
    system_metrics: bool = False
    """Log CPU, memory and GPU metrics of each rank, every 10 s. A WandB sink logs those of the first pod."""
    sinks: Sinks = Field(default_factory=list)
    """Trackers besides MLflow; one that fails never stops a job. They get the metrics of the built-in training and
    evaluation; your own command gets their variables."""

    @property
    def secret_of_pods(self) -> LocalReference | None:
        """The Secret that the pods use."""
        return self.trainer_secret_ref or self.secret_ref


Upload = Literal["Proxy", "Direct"]


class Register(ApiModel):
    """The registered model."""

    model: ModelName = ""
    """Name of the registered model. Default: metadata.name."""
    aliases: Annotated[list[Alias], Field(max_length=10, json_schema_extra=LIST_TYPE_SET)] = ["candidate"]
    """Aliases to point at the new version."""
    tags: Tags = Field(default_factory=dict)
    """Tags of the version."""
    signature: bool = True
    """Store the model's input and output signature with the version."""
    upload: Upload | None = None
    """Upload of the files of the model through the MLflow server (Proxy), or of large files straight to its store,
    which the pods must reach (Direct). Direct uses addresses that the server signs. Default: Direct for files above 500
    MiB if the server supports it."""


def _build_databricks_rule(condition: str, message: str, field: str) -> tuple[str, str, str]:
    """Return a rule for jobs whose run or model is at Databricks."""
    return f"!{ON_DATABRICKS} || ({condition})", message, field


MLFLOW_RULES = (
    _build_databricks_rule(
        "!has(self.register) || has(self.register.model) && self.register.model.matches('^[^./ ]+[.][^./ ]+[.][^./ ]+$') && "
        "(!has(self.register.signature) || self.register.signature) && !has(self.register.upload)",
        "a model in Unity Catalog requires register.model catalog.schema.name, register.signature true, and no register.upload",
        ".register",
    ),
    _build_databricks_rule(
        "!has(self.register) || !has(self.register.tags) || "
        f"self.register.tags.all(key, !key.matches('{NOT_IN_UNITY_TAGS}'))",
        f"{UNITY_TAGS_MESSAGE}: rename the tag",
        ".register.tags",
    ),
    _build_databricks_rule(
        "!has(self.tracking.experiment) || self.tracking.experiment.startsWith('/')",
        "tracking.experiment must be a path at Databricks, such as /Shared/support",
        ".tracking.experiment",
    ),
)
"""Rules of FineTuneJobSpec."""
