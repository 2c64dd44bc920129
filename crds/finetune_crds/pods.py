"""`spec.pods`: images, variables, ServiceAccounts and templates of the pods. A user can change them while the job runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import (
    OPERATOR_DEFAULT,
    ApiModel,
    Image,
    ObjectName,
    Passthrough,
    ReplacedField,
    Rule,
    join_names,
    rules,
)
from finetune_crds.env import CODE_ENV, EVALUATION_ENV, Env, EnvFromSource

Role = Literal["prepare", "train", "evaluate"]
ROLES: tuple[Role, ...] = ("prepare", "train", "evaluate")
MAIN_CONTAINER = "main"
"""The name of the job's own container in the template of every role."""


# Fields of an earlier version of the API by name: the JSON type, and the new name in RolePodSettings.
_MOVED_FIELDS = {
    "image": ("string", "image"),
    "env": ("array", "env"),
    "envFrom": ("array", "envFrom"),
    "serviceAccountName": ("string", "serviceAccountName"),
    "podTemplate": ("object", "template"),
}


def build_moved_fields(
    *fields: str, prefix: str, settings: Role | Literal["all"], container: str = ""
) -> dict[str, ReplacedField]:
    """Return, for `replaced`, the fields of an earlier version that moved to `spec.pods`.

    For example, `trainer.env` was replaced by `pods.train.env`.

    Args:
        fields: the names of the fields.
        prefix: the path of the part of the spec that had the fields, with a final dot, such as `trainer.`; empty for the spec itself.
        settings: the field of `spec.pods` that has the fields now.
        container: for podTemplate, the earlier name of the role's own container.
    """
    note = {"podTemplate": f", where the container {container} is named {MAIN_CONTAINER}"}
    return {
        name: ReplacedField(
            kind, f"{prefix}{name}", f"replaced by pods.{settings}.{new_name}{note.get(name, '')}"
        )
        for name, (kind, new_name) in _MOVED_FIELDS.items()
        if name in fields
    }


class PodSettings(ApiModel):
    """Settings of pods. A change applies to new pods; running pods do not change."""

    env: Env = Field(default_factory=list)
    """Environment variables; a variable overrides its namesake in `all` and in defaults.pods of the chart."""
    env_from: Annotated[list[EnvFromSource], Field(max_length=16)] = Field(default_factory=list)
    """Secrets and ConfigMaps whose keys become variables. They come after the lists of defaults.pods of the chart and
    of `all`, and the last one with a key wins."""
    service_account_name: ObjectName | None = None
    """ServiceAccount, for workload identity. Only a Spark driver that creates executor pods gets an API token. Default:
    default; for data.prepare.spark.mode Kubernetes and SparkApplication, finetune-spark."""
    template: Passthrough | None = None
    """Other fields of a PodTemplateSpec, such as tolerations, volumes or resources; the container `main` is that of the
    job."""


class RolePodSettings(PodSettings):
    """Settings of the pods of one role. They override `all`."""

    image: Image | None = None
    """Container image. Default: the image of the chart for the role; for `evaluate` first that of `train`, unless
    trainer.command is set and the evaluation is built in."""


class Pods(ApiModel):
    """Settings of the pods. For each field, a role overrides `all`, and both override defaults.pods of the chart."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"!has(self.evaluate) || !has(self.evaluate.env) || !self.evaluate.env.exists(item, item.name in {[*EVALUATION_ENV]})",
                f"the operator sets {join_names(EVALUATION_ENV)}: remove them from evaluate.env",
                ".evaluate.env",
            ),
        )
    )

    all: Annotated[PodSettings, Field(json_schema_extra=OPERATOR_DEFAULT)] = Field(
        default_factory=PodSettings
    )
    """Settings of all pods, which cannot request GPUs: set distributed.gpusPerNode. The pods are those of preparation,
    training and evaluation."""
    prepare: Annotated[RolePodSettings, Field(json_schema_extra=OPERATOR_DEFAULT)] = Field(
        default_factory=RolePodSettings
    )
    """Settings of the pods of the preparation. They are the prep pod, or the driver and executors of Spark. Executors
    ignore the resources of the template."""
    train: Annotated[RolePodSettings, Field(json_schema_extra=OPERATOR_DEFAULT)] = Field(
        default_factory=RolePodSettings
    )
    """Settings of the training pods."""
    evaluate: Annotated[RolePodSettings, Field(json_schema_extra=OPERATOR_DEFAULT)] = Field(
        default_factory=RolePodSettings
    )
    """Settings of the evaluation pod."""

    def of(self, role: Role) -> RolePodSettings:
        """Return the settings of a role."""
        settings: RolePodSettings = getattr(self, role)
        return settings

    def each(self) -> Iterator[tuple[str, PodSettings]]:
        """Iterate over `all` and the roles: the name of the field, and its settings."""
        yield "all", self.all
        yield from ((role, self.of(role)) for role in ROLES)


def list_env_names(*fields: Role | Literal["all"]) -> str:
    """Return the CEL list of the names of the variables in fields of `spec.pods`, for a rule of a spec that has pods."""
    return " + ".join(
        f"(has(self.pods.{field}) && has(self.pods.{field}.env) ? self.pods.{field}.env.map(item, item.name) : [])"
        for field in fields
    )


POD_RULES = (
    Rule(
        f"!has(self.trainer.code) || !has(self.pods) || !('{CODE_ENV}' in {list_env_names('all', 'train')})",
        f"the operator sets {CODE_ENV} to the folder of trainer.code: remove it from pods.all.env and pods.train.env",
        ".pods",
    ),
    Rule(
        "!has(self.pods) || !has(self.pods.prepare) || (has(self.data) && has(self.data.source) && "
        "(!has(self.data.prepare) || self.data.prepare.spark.mode != 'Databricks'))",
        "pods.prepare can be set only when data.source is set and data.prepare.spark.mode is not Databricks: remove pods.prepare; "
        "data.prepare.spark.databricks.compute describes a Databricks run",
        ".pods.prepare",
    ),
    Rule(
        "!has(self.pods) || !has(self.pods.evaluate) || has(self.evaluation)",
        "pods.evaluate can be set only when evaluation is set",
        ".pods.evaluate",
    ),
)
"""Rules of FineTuneJobSpec."""
