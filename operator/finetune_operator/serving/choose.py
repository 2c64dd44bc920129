"""The workspace of a promotion, with its credentials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune_crds.serving import DatabricksServing
from finetune_operator.serving.model import Endpoint, EndpointAction, Serving
from finetune_operator.settings import Settings

if TYPE_CHECKING:
    from databricks.sdk import WorkspaceClient


@dataclass(frozen=True)
class Databricks:
    """Endpoints of Databricks Model Serving in one workspace."""

    workspace: WorkspaceClient

    def endpoint(self, spec: DatabricksServing) -> Endpoint:
        """The current state of the endpoint."""
        from finetune_operator.serving import databricks

        return databricks.read_endpoint(self.workspace, spec)

    def act(self, action: EndpointAction) -> None:
        """Request a change, without waiting until it is complete."""
        from finetune_operator.serving import databricks

        databricks.request_change(self.workspace, action)


def open_serving(settings: Settings, secret: Mapping[str, str] | None) -> Serving:
    """The workspace that a Secret names or, without one, that of the installation.

    Raises:
        ExternalError: no workspace is known, or the Secret is incomplete.
    """
    # NB: the SDK takes a second to import, and most installations have no Databricks.
    from finetune_operator.databricks.workspace import open_workspace

    return Databricks(open_workspace(secret, settings))


def workspace_host(secret: Mapping[str, str] | None, settings: Settings) -> str:
    """The address of that workspace.

    Raises:
        ExternalError: no workspace is known, or the Secret is incomplete.
    """
    from finetune_operator.databricks.access import resolve_access

    return resolve_access(secret, settings).host
