"""The server of a FineTuneJob's run and version: an MLflow server, or a Databricks workspace and its Unity Catalog."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune_crds.conditions import ConditionReason
from finetune_crds.modelpromotion import PromotionTracking
from finetune_crds.tracking import Tracking
from finetune_operator.errors import ExternalError
from finetune_operator.mlflow.client import Credentials
from finetune_operator.mlflow.runs import Server
from finetune_operator.registry.base import JobRegistry
from finetune_operator.registry.mlflow import MlflowRegistry
from finetune_operator.settings import DATABRICKS, Settings

if TYPE_CHECKING:
    from databricks.sdk import WorkspaceClient


@dataclass(frozen=True)
class Tracked:
    """The server with the run, and the registry with the version. Their methods block.

    Attributes:
        workspace: the Databricks workspace that both belong to; None for an MLflow server.
    """

    server: Server
    workspace: WorkspaceClient | None = None

    def registry(self) -> JobRegistry:
        """The registry of the version.

        Raises:
            ExternalError: the workspace cannot be reached.
        """
        if self.workspace is None:
            return MlflowRegistry.of(self.server)
        from finetune_operator.registry.unity import UnityRegistry

        return UnityRegistry.of(self.workspace)

    def refused(self, error: ExternalError) -> None:
        """After an error: if the workspace no longer accepts the token, log in again at the next use."""
        # A workspace is called like an MLflow server, so the reason is MLflow's.
        if self.workspace is not None and error.problem.reason == ConditionReason.MLFLOW_FORBIDDEN:
            from finetune_operator.databricks.workspace import forget

            forget(self.workspace)


def open_tracked(
    settings: Settings, tracking: Tracking | PromotionTracking, secret: Mapping[str, str] | None
) -> Tracked | None:
    """The server and the registry of a job or a promotion, with the credentials of its Secret; None if it has no server. May block.

    Raises:
        ExternalError: the workspace is not known, its credentials are incomplete, or it does not accept them.
    """
    uri, registry = settings.servers(tracking)
    if not uri:
        return None
    if uri != DATABRICKS:
        return Tracked(Server(uri, registry, Credentials.of(secret)))
    # NB: the SDK takes a second to import, and most installations have no Databricks.
    from finetune_operator.databricks.workspace import get_bearer_token, open_workspace

    client = open_workspace(secret, settings)
    # The token is short-lived, and the SDK renews it, so this function asks for it each time.
    return Tracked(Server(client.config.host, registry, Credentials(token=get_bearer_token(client))), client)
