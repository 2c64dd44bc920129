"""The backend of `spec.serving` for endpoints of Databricks Model Serving."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from finetune_crds.conditions import ConditionReason
from finetune_crds.env import LocalReference
from finetune_crds.serving import InferenceTable, Serving
from finetune_operator.databricks import secret_scopes
from finetune_operator.databricks.access import find_workspace
from finetune_operator.databricks.workspace import open_workspace
from finetune_operator.serving.databricks.change import request_change
from finetune_operator.serving.databricks.endpoint import read_endpoint
from finetune_operator.serving.databricks.entities import resolve_workload
from finetune_operator.serving.model import Endpoint, EndpointAction, EndpointClient
from finetune_operator.settings import UNITY_CATALOG, Settings
from finetune_operator.text import strip_user

if TYPE_CHECKING:
    from databricks.sdk import WorkspaceClient

_FIELD = "spec.serving.databricks"


@dataclass(frozen=True)
class DatabricksBackend:
    """An endpoint of Databricks Model Serving."""

    spec: Serving
    secret_field: ClassVar[str] = f"{_FIELD}.secretRef"
    rejection_reasons: ClassVar[tuple[ConditionReason, ...]] = (
        ConditionReason.DATABRICKS_ERROR,
        ConditionReason.DATABRICKS_FORBIDDEN,
        ConditionReason.DATABRICKS_NOT_CONFIGURED,
        ConditionReason.DATABRICKS_UNREACHABLE,
    )

    @property
    def secret_ref(self) -> LocalReference | None:
        """The Secret with the login; None for the chart's login."""
        return self.spec.databricks.secret_ref

    @property
    def configuration(self) -> object:
        """The machines or the provisioned throughput, and the environment variables of the served model."""
        options = self.spec.databricks
        throughput = options.provisioned_throughput
        fields = throughput.to_json() if throughput else dataclasses.asdict(resolve_workload(options))
        capacity = {name: value for name, value in fields.items() if value is not None}
        return [capacity, dict(options.environment)]

    @property
    def inference_table(self) -> InferenceTable | None:
        """The spec's table for logged requests; None without logging."""
        return self.spec.databricks.inference_table

    def find_mistakes(self, registry: str) -> Iterator[str]:
        """Messages about a registry that Databricks cannot serve, and about secrets that the chart's login would read."""
        if registry and registry != UNITY_CATALOG:
            yield (
                f"a Databricks endpoint can serve only models in Unity Catalog, but the registry is {strip_user(registry)}: remove "
                f"spec.serving, or create a ModelPromotion with another name and spec.tracking.registryUri {UNITY_CATALOG}"
            )
        if not secret_scopes.is_own_login(self.secret_ref):
            yield from secret_scopes.find_unreadable(
                self.spec.databricks.environment, f"{_FIELD}.environment", self.secret_field
            )

    def find_address(self, settings: Settings, secret: Mapping[str, str] | None) -> str:
        """The address of the workspace.

        Raises:
            ExternalError: no workspace is known, or the Secret is incomplete.
        """
        return find_workspace(settings, secret)

    def open_client(self, settings: Settings, secret: Mapping[str, str] | None) -> EndpointClient:
        """Open the endpoint in the workspace that a Secret names or, without a Secret, in the chart's workspace.

        Raises:
            ExternalError: no workspace is known, or the Secret is incomplete.
        """
        return _WorkspaceEndpoint(self.spec, open_workspace(secret, settings))


@dataclass(frozen=True)
class _WorkspaceEndpoint:
    """The endpoint of a spec in one workspace."""

    spec: Serving
    workspace: WorkspaceClient

    def read(self, *, with_traffic: bool) -> Endpoint:
        """The current state of the endpoint; `with_traffic`: with the metrics of each served version.

        Raises:
            ExternalError: Databricks cannot be reached, or refuses.
        """
        return read_endpoint(self.workspace, self.spec, with_traffic=with_traffic)

    def act(self, action: EndpointAction) -> None:
        """Request a change, without waiting until it is complete."""
        request_change(self.workspace, self.spec, action)
