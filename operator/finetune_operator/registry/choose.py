"""Opens the registry that a spec or the chart names."""

from __future__ import annotations

from collections.abc import Mapping

from finetune_crds.base import Json
from finetune_crds.modelpromotion import PromotionTracking
from finetune_operator.mlflow.client import Credentials
from finetune_operator.registry.base import Registry
from finetune_operator.registry.mlflow import MlflowRegistry
from finetune_operator.settings import UNITY_CATALOG, Settings
from finetune_operator.text import normalize_address


def open_registry(
    settings: Settings, tracking: PromotionTracking, secret: Mapping[str, str] | None
) -> Registry:
    """The registry of a promotion, with the credentials of its Secret.

    Raises:
        ExternalError: the workspace of Unity Catalog is not known, or its credentials are incomplete.
    """
    server, registry = settings.servers(tracking)
    if registry == UNITY_CATALOG:
        # NB: the SDK takes a second to import, and most installations have no Databricks.
        from finetune_operator.databricks.workspace import open_workspace
        from finetune_operator.registry.unity import UnityRegistry

        return UnityRegistry.of(open_workspace(secret, settings))
    return MlflowRegistry(server, registry, Credentials.of(secret))


def find_metastore(settings: Settings, secret: Mapping[str, str] | None, *, fetch: bool = True) -> str | None:
    """The metastore that has the Unity Catalog models of a workspace; None if it is unknown.

    Blocks, unless `fetch` is False: then only metastores that were fetched before are known.

    Raises:
        ExternalError: the workspace is not known, or cannot be reached.
    """
    from finetune_operator.databricks.workspace import open_workspace
    from finetune_operator.registry import unity

    return unity.find_metastore(open_workspace(secret, settings), fetch=fetch)


def resolve_registry(settings: Settings, tracking: Json) -> str:
    """The registry of a promotion or of a FineTuneJob with this spec.tracking."""
    # NB: another version of the operator may have accepted a spec that does not fit this version's schema. So this validates nothing.
    addresses = PromotionTracking.model_construct(
        uri=tracking.get("uri"), registry_uri=tracking.get("registryUri")
    )
    _, registry = settings.servers(addresses)
    return normalize_address(registry)
