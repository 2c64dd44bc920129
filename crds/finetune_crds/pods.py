"""`spec.pods`: who runs the job. Images, variables, accounts and templates of its pods, the part of a spec that may change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import LATE, ApiModel, Image, ObjectName, Passthrough, Rule, join_names, rules
from finetune_crds.env import CODE_ENV, EVALUATION_ENV, Env, EnvFromSource

Role = Literal["prepare", "train", "evaluate"]
ROLES: tuple[Role, ...] = ("prepare", "train", "evaluate")
MAIN_CONTAINER = "main"
"""The name of a role's own container in the template of any role."""


# Fields of an earlier version, by their names: their types, and their names in PodSettings.
_MOVED = {
    "image": ("string", "image"),
    "env": ("array", "env"),
    "envFrom": ("array", "envFrom"),
    "serviceAccountName": ("string", "serviceAccountName"),
    "podTemplate": ("object", "template"),
}


def moved(
    *fields: str, of: str, to: Role | Literal["all"], container: str = ""
) -> dict[str, tuple[str, str]]:
    """Fields of an earlier version that `spec.pods` replaces, for `replaced`.

    Args:
        of: the part that had them, as the beginning of a path such as `trainer.`.
        to: the field of `spec.pods` that has them now.
        container: the name that the role's own container had in a pod template.
    """
    note = {"podTemplate": f", where the container {container} is named {MAIN_CONTAINER}"}
    return {
        name: (kind, f"{of}{name} was replaced by pods.{to}.{new}{note.get(name, '')}")
        for name, (kind, new) in _MOVED.items()
        if name in fields
    }


class PodSettings(ApiModel):
    """What pods get. A change counts from the next pod on; running pods stay as they are."""

    env: Env = Field(default_factory=list)
    """Environment variables. A variable replaces one of the same name in `all`, and in the defaults of the installation."""
    env_from: Annotated[list[EnvFromSource], Field(max_length=16)] = Field(default_factory=list)
    """Secrets and ConfigMaps whose keys become environment variables, after those of `all` and of the installation."""
    service_account_name: ObjectName | None = None
    """ServiceAccount, for workload identity. Only a Spark driver that creates executor pods gets its API
    token. Default: default; finetune-spark for data.prepare.spark.mode Kubernetes and SparkApplication."""
    template: Passthrough | None = None
    """Any other field of a PodTemplateSpec, such as tolerations, volumes or resources. The container `main` is the pod's own."""


class RolePodSettings(PodSettings):
    """What the pods of one role get, over what all pods get."""

    image: Image | None = None
    """Image. Default: the image that the operator is installed with; of `evaluate`, the image of `train`, unless trainer.command is
    set and evaluation.command is not."""


class Pods(ApiModel):
    """The pods of the job. Of the same field, a role overrides `all`, and both override the defaults of the installation."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"!has(self.evaluate) || !has(self.evaluate.env) || !self.evaluate.env.exists(item, item.name in {[*EVALUATION_ENV]})",
                f"the operator sets {join_names(EVALUATION_ENV)}: remove them from evaluate.env",
                ".evaluate.env",
            ),
        )
    )

    all: Annotated[PodSettings, Field(json_schema_extra=LATE)] = Field(default_factory=PodSettings)
    """All pods: those of preparation, training and evaluation. It takes no GPUs: set distributed.gpusPerNode."""
    prepare: Annotated[RolePodSettings, Field(json_schema_extra=LATE)] = Field(
        default_factory=RolePodSettings
    )
    """The pods of the preparation: the prep pod, or Spark's driver and executors. Executors get no resources of the template."""
    train: Annotated[RolePodSettings, Field(json_schema_extra=LATE)] = Field(default_factory=RolePodSettings)
    """The pods of training."""
    evaluate: Annotated[RolePodSettings, Field(json_schema_extra=LATE)] = Field(
        default_factory=RolePodSettings
    )
    """The pod of the evaluation."""

    def of(self, role: Role) -> RolePodSettings:
        """The settings of a role."""
        settings: RolePodSettings = getattr(self, role)
        return settings

    def each(self) -> Iterator[tuple[str, PodSettings]]:
        """The settings of all pods and of each role, with the name of the field."""
        yield "all", self.all
        yield from ((role, self.of(role)) for role in ROLES)


def _code_env(field: str) -> Rule:
    return Rule(
        f"!has(self.trainer.code) || !has(self.pods) || !has(self.pods.{field}) || !has(self.pods.{field}.env) || "
        f"!self.pods.{field}.env.exists(item, item.name == '{CODE_ENV}')",
        f"the operator sets {CODE_ENV} to the folder of trainer.code: remove it from pods.{field}.env",
        f".pods.{field}.env",
    )


POD_RULES = (
    _code_env("all"),
    _code_env("train"),
    Rule(
        "!has(self.pods) || !has(self.pods.prepare) || (has(self.data) && has(self.data.source))",
        "pods.prepare needs data.source: without one, nothing is prepared",
        ".pods.prepare",
    ),
    Rule(
        "!has(self.pods) || !has(self.pods.prepare) || !has(self.data) || !has(self.data.prepare) || "
        "self.data.prepare.spark.mode != 'Databricks'",
        "data.prepare.spark.mode Databricks creates no prep pod: remove pods.prepare, and describe the run in "
        "data.prepare.spark.databricks.compute",
        ".pods.prepare",
    ),
    Rule(
        "!has(self.pods) || !has(self.pods.evaluate) || has(self.evaluation)",
        "pods.evaluate needs evaluation: without it, no pod evaluates the model",
        ".pods.evaluate",
    ),
)
"""Rules of FineTuneJobSpec."""
