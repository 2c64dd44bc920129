"""The chart's defaults for fields that a FineTuneJob omits: storage, pods, queue, catalog, model cache, checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, model_validator

from finetune_crds.base import (
    ENV_NAME,
    SUBDOMAIN,
    ApiModel,
    Json,
    Name,
    Positive,
    QueueName,
    Uri,
)
from finetune_crds.catalog import HTTP_SERVER, METASTORES, Catalog
from finetune_crds.env import (
    NO_SCOPE_IN_PODS,
    RESERVED_ENV,
    SCOPE_START,
    EnvFromSource,
    EnvVar,
    ObjectReference,
)
from finetune_crds.pods import MAIN_CONTAINER, Pods, PodSettings, RolePodSettings
from finetune_crds.training import ModelCache
from finetune_operator.template_merge import requested_devices

_STORAGE_PATTERN = r"/\S+|(s3a?|gs)://[^/\s]\S*|abfss://[^/@\s]+@[^/@\s]\S*"
# Fields of a pod spec that must be lists of objects. The items of _NAMED_LISTS are merged with a job's items by name.
_TEMPLATE_LISTS = ("containers", "initContainers", "volumes", "tolerations")
_NAMED_LISTS = ("containers", "initContainers", "volumes")


def _check_pattern(values: Iterable[str | None], pattern: str, what: str) -> None:
    for value in values:
        if value is not None and not re.fullmatch(pattern, value):
            raise ValueError(f"{value!r} is not a valid {what}")


def _check_pods(field: str, pods: PodSettings) -> None:
    """Check the rules for pods that the API server or the operator checks in a job."""
    # The settings for all pods have no image.
    image = pods.image if isinstance(pods, RolePodSettings) else None
    _check_pattern([image], r"\S+", "image name")
    _check_pattern([pods.service_account_name], SUBDOMAIN, "object name")
    references = [ref for item in pods.env_from for ref in (item.secret_ref, item.config_map_ref)]
    _check_pattern([ref.name for ref in references if ref], SUBDOMAIN, "object name")
    _check_pattern([item.name for item in pods.env], ENV_NAME, "variable name")
    _check_pattern([item.prefix for item in pods.env_from], ENV_NAME, "variable prefix")
    _check_sources(field, pods.env, pods.env_from)
    _check_template(f"{field}.template", pods.template or {})


def _check_sources(field: str, env: Iterable[EnvVar], env_from: Iterable[EnvFromSource]) -> None:
    for variable in env:
        if variable.name in RESERVED_ENV:
            raise ValueError(f"{field} sets {variable.name}, which the operator sets: remove the variable")
        if variable.value is not None and variable.value_from is not None:
            raise ValueError(
                f"{field} sets both value and valueFrom of the variable {variable.name}: remove one"
            )
        if variable.value is not None and SCOPE_START in variable.value:
            raise ValueError(
                f"{field} sets {variable.name} to a secret of a Databricks workspace: {NO_SCOPE_IN_PODS}"
            )
    for source in env_from:
        if (source.secret_ref is None) == (source.config_map_ref is None):
            raise ValueError(f"{field} must set either secretRef or configMapRef in each item of envFrom")


def _check_template(field: str, template: Json) -> None:
    """Check that a template has the shape of a pod template, since every job's template is merged with it."""
    unknown = [name for name in template if name not in ("metadata", "spec")]
    if unknown:
        raise ValueError(f"{field} can have only the fields metadata and spec: remove {', '.join(unknown)}")
    spec = template.get("spec", {})
    objects = {f"{field}.metadata": template.get("metadata", {}), f"{field}.spec": spec}
    if isinstance(spec, dict):
        objects[f"{field}.spec.nodeSelector"] = spec.get("nodeSelector", {})
    wrong_paths = [path for path, value in objects.items() if not isinstance(value, dict)]
    if wrong_paths:
        raise ValueError(f"{wrong_paths[0]} must be an object")
    for name in _TEMPLATE_LISTS:
        items = spec.get(name, [])
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise ValueError(f"{field}.spec.{name} must be a list of objects")
        if name in _NAMED_LISTS and not all("name" in item for item in items):
            raise ValueError(f"every item of {field}.spec.{name} requires a name")
    other_containers = [item["name"] for item in spec.get("containers", []) if item["name"] != MAIN_CONTAINER]
    if other_containers:
        raise ValueError(
            f"{field} has the container {other_containers[0]!r}: name it {MAIN_CONTAINER!r} if it is the pod's own container, or move it "
            "to initContainers with restartPolicy: Always"
        )


def _check_catalog(catalog: Catalog) -> None:
    """Check the rules for a catalog that the API server checks in a job."""
    parts = {"UnityCatalog": catalog.unity_catalog, "Databricks": catalog.databricks, "Hive": catalog.hive}
    configured = [kind for kind, part in parts.items() if part is not None]
    # A catalog of type Databricks may have no fields of its own.
    fits_type = configured == [catalog.type] or (catalog.type == "Databricks" and not configured)
    if not fits_type:
        raise ValueError(
            f"catalog.type is {catalog.type}, but the catalog configures {' and '.join(configured) or 'no server'}: set the fields of that "
            "type only"
        )
    server, metastore = catalog.unity_catalog, catalog.hive
    _check_pattern([server.uri if server else None], HTTP_SERVER, "Unity Catalog server address")
    _check_pattern([metastore.uri if metastore else None], METASTORES, "Hive metastore address")


class CheckpointDefaults(ApiModel):
    """Defaults for the fields of spec.checkpoint."""

    every_steps: Positive | None = None
    """Steps between checkpoints."""
    keep: Annotated[int, Field(ge=1, le=100)] | None = None
    """Number of complete checkpoints to keep."""
    mode: Literal["Async", "Sync"] | None = None
    """Whether training continues while a checkpoint is written (Async) or waits (Sync)."""


class Defaults(ApiModel):
    """The defaults of the chart; every part is optional."""

    storage: Uri | None = None
    """Folder for splits and checkpoints: a folder of s3://, gs:// or abfss://, or an absolute path."""
    image_pull_secrets: list[ObjectReference] = Field(default_factory=list)
    """Secrets of the job's namespace with registry credentials."""
    pods: Pods = Field(default_factory=Pods)
    """Images, variables, accounts and templates for the pods of all jobs; a job's own settings take precedence."""
    queue_name: QueueName | None = None
    """Kueue queue."""
    catalog: Catalog | None = None
    """The catalog of the tables that jobs name."""
    model_cache: ModelCache | None = None
    """The volume that keeps downloaded models."""
    checkpoint: CheckpointDefaults = Field(default_factory=CheckpointDefaults)
    """Defaults for the fields of spec.checkpoint."""

    @model_validator(mode="after")
    def _checked(self) -> Defaults:
        """Check the rules that the API server checks in a job. NB: the API server never sees the defaults."""
        objects = [secret.name for secret in self.image_pull_secrets]
        objects += [self.model_cache.claim_name] if self.model_cache else []
        _check_pattern(objects, SUBDOMAIN, "object name")
        _check_pattern([self.queue_name], SUBDOMAIN, "queue name")
        _check_pattern(
            [self.storage],
            _STORAGE_PATTERN,
            "storage location: use a folder of s3://, gs:// or abfss://, or an absolute path",
        )
        if self.catalog:
            _check_catalog(self.catalog)
        for name, pods in self.pods.each():
            _check_pods(f"pods.{name}", pods)
        shared_devices = requested_devices(self.pods.all.template)
        if shared_devices:
            raise ValueError(
                f"pods.all.template requests {shared_devices[0]} for all pods: remove the request; jobs request GPUs with spec.distributed.gpusPerNode"
            )
        return self

    def folder(self, *parts: Name) -> str:
        """The path of a folder in the storage; empty without storage."""
        return "/".join((self.storage.rstrip("/"), *parts)) if self.storage else ""
