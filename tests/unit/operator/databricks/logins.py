"""Ways to log in to a workspace, and a request that needs a login."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.databricks.workspace import open_workspace, translate_errors
from finetune_operator.errors import ExternalError
from finetune_operator.settings import Settings
from fixtures.fake_databricks import Workspace

ENDPOINT = "/api/2.0/serving-endpoints/support"


def ask(secret: Mapping[str, str] | None, settings: Settings | None = None) -> None:
    """One request, which needs a login."""
    client = open_workspace(secret, settings or Settings())
    with translate_errors(client, "read the serving endpoint support"):
        client.serving_endpoints.get("support")


def problem(
    secret: Mapping[str, str] | None, settings: Settings | None = None
) -> tuple[ConditionReason, str]:
    with pytest.raises(ExternalError) as raised:
        ask(secret, settings)
    assert raised.value.__cause__ is None
    return raised.value.problem.reason, raised.value.problem.message


def by_token(state: Workspace, credential: str = "dapi-good\n") -> dict[str, str]:
    return {"DATABRICKS_HOST": f"{state.uri}/\n", "DATABRICKS_TOKEN": credential}


def by_client(state: Workspace, credential: str = "principal-secret") -> dict[str, str]:
    return {
        "DATABRICKS_HOST": state.uri,
        "DATABRICKS_CLIENT_ID": "principal",
        "DATABRICKS_CLIENT_SECRET": credential,
    }


def installed(state: Workspace, path: Path, client_id: str = "operator") -> Settings:
    return Settings(
        databricks_host=state.uri, databricks_client_id=client_id, databricks_token_file=str(path / "token")
    )


def serve_endpoint(state: Workspace) -> None:
    entity: dict[str, object] = {
        "name": "version-1",
        "entity_name": "main.llm.support",
        "entity_version": "1",
        "workload_size": "Small",
        "scale_to_zero_enabled": True,
    }
    routes = {"routes": [{"served_entity_name": "version-1", "traffic_percentage": 100}]}
    state.endpoints.create(
        {"name": "support", "config": {"served_entities": [entity], "traffic_config": routes}}
    )
