"""Which registry a URI means."""

from __future__ import annotations

from collections.abc import Mapping

from finetune_crds.base import Json
from finetune_crds.modelpromotion import PromotionTracking
from finetune_operator.mlflow.host import Credentials, canonical
from finetune_operator.registry.base import Registry
from finetune_operator.registry.mlflow import MlflowRegistry
from finetune_operator.settings import UNITY_CATALOG, Settings


def open_registry(
    settings: Settings, tracking: PromotionTracking, secret: Mapping[str, str] | None
) -> Registry:
    """The registry of a promotion, with the credentials of its Secret.

    Raises:
        ExternalError: the workspace of Unity Catalog is not known, or its credentials are incomplete.
    """
    server, registry = settings.servers(tracking)
    if registry == UNITY_CATALOG:
        from finetune_operator.databricks.workspace import workspace
        from finetune_operator.registry.unity import UnityRegistry

        return UnityRegistry.of(workspace(secret, settings))
    return MlflowRegistry(server, registry, Credentials.of(secret))


def metastore(settings: Settings, secret: Mapping[str, str] | None, *, ask: bool = True) -> str | None:
    """The metastore of a workspace, which holds the models of its Unity Catalog; None where it is not known.

    It blocks, unless it is not to `ask` for what is not known yet.

    Raises:
        ExternalError: the workspace is not known, or cannot be reached.
    """
    from finetune_operator.databricks.workspace import workspace
    from finetune_operator.registry.unity import metastore_of

    return metastore_of(workspace(secret, settings), ask=ask)


def registry_of(settings: Settings, tracking: Json) -> str:
    """The registry of a promotion or of a FineTuneJob with this spec.tracking."""
    # NB: what another version of the operator let through may not fit this one's schema.
    known = PromotionTracking.model_construct(
        uri=tracking.get("uri"), registry_uri=tracking.get("registryUri")
    )
    return canonical(settings.servers(known)[1])
