"""Tables that a spec names in a catalog: mistakes in the names, and the login of the prep pod to the catalog."""

from __future__ import annotations

from collections.abc import Iterator

from finetune_crds import tables
from finetune_crds.base import Json
from finetune_crds.catalog import DATABRICKS_PREFIX, TOKEN_KEY, Catalog
from finetune_crds.data import Data
from finetune_crds.databricks import SECRET_KEYS
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_operator.finetunejob.pods.secret_env import build_login, build_variable
from finetune_operator.finetunejob.pods.workspace import federated_login
from finetune_operator.settings import Settings


def mistakes(spec: FineTuneJobSpec) -> Iterator[str]:
    """Yield a mistake for each table name that the catalog of the spec, or else of the chart, does not allow."""
    return (f"spec.{sentence}" for sentence in (tables.find_misnamed_tables(spec.data) if spec.data else ()))


def find_missing_catalog(spec: FineTuneJobSpec) -> str | None:
    """Report that a job names a table but has no catalog; None if it has a catalog, or names no table."""
    data, prepare = spec.data, spec.prepare
    if data is None or prepare is None or prepare.catalog or prepare.spark.has_catalog:
        return None
    field, table = next(tables.list_sources(data), ("", ""))
    if not table:
        return _find_missing_catalog_of_splits(data)
    return (
        f"spec.{field} {table} requires a catalog: install the chart with defaults.catalog, or create a FineTuneJob with another name and "
        "spec.data.prepare.catalog, or with a path instead of a table"
    )


def _find_missing_catalog_of_splits(data: Data) -> str | None:
    field, table = next(tables.list_split_tables(data), ("", ""))
    if not table:
        return None
    return (
        f"spec.{field} {table} requires a catalog of type Hive or a Databricks run: install the chart with defaults.catalog of type Hive, or "
        "create a FineTuneJob with another name and spec.data.prepare.catalog of type Hive, or with spec.data.prepare.spark.mode Databricks"
    )


def find_missing_workspace(spec: FineTuneJobSpec, settings: Settings) -> str | None:
    """Report that a Databricks catalog has no workspace; None if a workspace is configured, or not needed."""
    catalog = _catalog_of(spec)
    if catalog is None or not _is_federated(catalog, spec, settings) or settings.databricks_host:
        return None
    return (
        "spec.data.prepare.catalog of type Databricks has no workspace: install the chart with databricks.host, or create a FineTuneJob "
        "with another name and a Secret with DATABRICKS_HOST in spec.data.prepare.catalog.databricks.secretRef"
    )


def login(spec: FineTuneJobSpec, settings: Settings, container: str) -> Json:
    """Return the part of the prep pod's template with the login to the catalog; empty if the pod needs only the login for tracking.

    NB: the pod gets only the login keys of a Secret. Executors get no login: the driver asks the catalog for
    credentials to read the files, and passes these credentials on.
    """
    catalog = _catalog_of(spec)
    if catalog is None:
        return {}
    if _is_federated(catalog, spec, settings):
        return federated_login(settings, container)
    env = [*_env(catalog)]
    return {"spec": {"containers": [{"name": container, "env": env}]}} if env else {}


def _catalog_of(spec: FineTuneJobSpec) -> Catalog | None:
    return spec.prepare.catalog if spec.prepare else None


def _is_federated(catalog: Catalog, spec: FineTuneJobSpec, settings: Settings) -> bool:
    """Whether the catalog requires a login of the pod's ServiceAccount to the chart's workspace, which tracking does not already add."""
    has_secret = catalog.databricks is not None and catalog.databricks.secret_ref is not None
    return catalog.type == "Databricks" and not has_secret and not settings.on_databricks(spec.tracking)


def _env(catalog: Catalog) -> Iterator[Json]:
    """Variables from the Secret of a catalog."""
    token_secret = catalog.unity_catalog and catalog.unity_catalog.secret_ref
    if token_secret:
        yield build_variable(TOKEN_KEY, token_secret.name, TOKEN_KEY, optional=token_secret.optional)
    workspace_secret = catalog.databricks and catalog.databricks.secret_ref
    if workspace_secret:
        yield from build_login(workspace_secret.name, SECRET_KEYS, prefix=DATABRICKS_PREFIX)
