"""Environment variables of the pods, and the names that are reserved for the operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import ConfigDict, Field

from finetune_crds.base import ApiModel, EnvName, ObjectName, Passthrough, Rule, list_type_map, rules

SCOPE_START = "{{secrets/"
"""The start of {{secrets/scope/key}}, a secret of a Databricks workspace."""
NAMES_SECRET = f"contains('{SCOPE_START}')"
"""CEL method call on a string: whether the string names a secret of a Databricks workspace."""
NO_SCOPE_IN_PODS = (
    "{{secrets/scope/key}} is resolved only at Databricks: use valueFrom.secretKeyRef or envFrom"
)

# Variables that only the operator sets. torchrun reads PET_* and TORCH_ELASTIC_SHUTDOWN_TIMEOUT; the programs in the pods read the
# others.
RESERVED_ENV = (
    "PET_NNODES",
    "PET_NPROC_PER_NODE",
    "PET_NODE_RANK",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
    "PET_RDZV_CONF",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NUM_NODES",
    "NODE_RANK",
    "LOCAL_WORLD_SIZE",
    "WORLD_SIZE",
    "MLFLOW_TRACKING_URI",
    "MLFLOW_REGISTRY_URI",
    "MLFLOW_RUN_ID",
    "FINETUNE_RECIPE",
    "HYPERPARAMETERS_PATH",
    "FINETUNE_ATTEMPT",
    "FINETUNE_POD_NAME",
    "FINETUNE_POD_NAMESPACE",
    "FINETUNE_DRIVER_HOST",
    "FINETUNE_EXECUTOR_SELECTOR",
    "FINETUNE_EXECUTOR_TEMPLATE",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
)

# Only the operator sets this variable in the training pods of a job with trainer.code; other pods can use the name.
CODE_ENV = "CODE_SOURCE_PATH"
# Only the operator sets these variables in an evaluation pod with your own command; other pods can use the names.
EVALUATION_ENV = ("MODEL_PATH", "METRICS_PATH")

# Only the operator sets these variables in the pod of a gate; other pods can use the names.
GATE_ENV = ("MODEL_URI", "MODEL_NAME", "MODEL_VERSION", "METRICS_PATH")


def _build_pattern(names: Sequence[str]) -> str:
    """Return a pattern of names that has each prefix, up to the first underscore, only once."""
    names_by_prefix: dict[str, list[str]] = {}
    for name in names:
        prefix, _, rest = name.partition("_")
        names_by_prefix.setdefault(prefix, []).append(rest)
    groups = [f"{prefix}_({'|'.join(rests)})" for prefix, rests in names_by_prefix.items()]
    return f"^({'|'.join(groups)})$"


class EnvVar(ApiModel):
    """One environment variable, as in a Pod."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                f"!self.name.matches('{_build_pattern(RESERVED_ENV)}')",
                "the operator sets this variable: remove it",
                ".name",
                "'the operator sets ' + self.name + ': remove it'",
            ),
            (
                "!has(self.value) || !has(self.valueFrom)",
                "value and valueFrom must not both be set",
            ),
            (f"!has(self.value) || !self.value.{NAMES_SECRET}", NO_SCOPE_IN_PODS),
        )
    )

    name: EnvName
    """Name of the variable. It can contain letters, digits, '_', '-' and '.', and cannot begin with a digit or '..'."""
    value: Annotated[str, Field(max_length=16384)] | None = None
    """Literal value."""
    value_from: Passthrough | None = None
    """Source of the value: secretKeyRef, configMapKeyRef, fieldRef or resourceFieldRef, as in a Pod."""


class ObjectReference(ApiModel):
    """An object of the same namespace."""

    name: ObjectName
    """Object name. It consists of lowercase letters and digits, with '-' and '.' only between them."""


Env = Annotated[list[EnvVar], Field(max_length=64, json_schema_extra=list_type_map("name"))]
"""Environment variables with unique names."""


class LocalReference(ApiModel):
    """A Secret or ConfigMap of the same namespace."""

    name: ObjectName
    """Object name. It consists of lowercase letters and digits, with '-' and '.' only between them."""
    optional: bool = False
    """The object can be missing. Pods start without it, and the operator sends no credentials."""


class EnvFromSource(ApiModel):
    """A Secret or ConfigMap whose keys become environment variables."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.secretRef) != has(self.configMapRef)",
                "set exactly one of secretRef and configMapRef",
            ),
        )
    )

    prefix: EnvName | None = None
    """Prefix of each variable name. It can contain letters, digits, '_', '-' and '.', and cannot begin with a digit or
    '..'."""
    secret_ref: LocalReference | None = None
    """The Secret."""
    config_map_ref: LocalReference | None = None
    """The ConfigMap."""
