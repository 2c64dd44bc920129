"""Requests changes of endpoints of Databricks Model Serving. Nothing here waits until a change is complete."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from finetune_crds.conditions import ConditionReason
from finetune_crds.serving import DatabricksServing, Serving
from finetune_operator.databricks.workspace import translate_errors
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.serving.databricks.entities import (
    build_entity,
    build_entity_name,
    build_provisioned_entity,
)
from finetune_operator.serving.model import ConfigureEndpoint, EndpointAction, ServedVersion, StopLogging

if TYPE_CHECKING:
    from databricks.sdk import WorkspaceClient
    from databricks.sdk.service import serving as api

log = logging.getLogger(__name__)

_OWNER_TAG = "managed-by"
_OPERATOR = "finetune-operator"
# NB: for some changes in progress, Databricks answers not 409 but 400, as for a mistake: only the text of the answer differs.
_UPDATE_IN_PROGRESS = re.compile(
    r"(being|currently) updat|(update|change|deployment)( is)?( already)? in progress", re.IGNORECASE
)


def request_change(workspace: WorkspaceClient, spec: Serving, action: EndpointAction) -> None:
    """Request a change from Databricks, and return as soon as the request is accepted.

    Raises:
        ExternalError: Databricks rejects the request. With the reason EndpointBusy another change is in progress: retry
            after it.
    """
    from databricks.sdk.errors import BadRequest, ResourceConflict

    name, options = spec.endpoint, spec.databricks
    with translate_errors(workspace, f"change the serving endpoint {name}"):
        try:
            if isinstance(action, ConfigureEndpoint):
                _configure(workspace, name, options, action)
                log.info("asked Databricks to serve %s at %s", _describe_served(action.served), name)
            elif isinstance(action, StopLogging):
                _stop_logging(workspace, name)
                log.info("asked Databricks to stop logging the requests of %s", name)
            else:
                _put_table(workspace, name, _build_table(options))
                log.info("asked Databricks to log the requests of %s", name)
        except (ResourceConflict, BadRequest) as error:
            if isinstance(error, BadRequest) and not _UPDATE_IN_PROGRESS.search(str(error)):
                raise
            busy = (
                f"another change of the serving endpoint {name} is in progress: waiting until it is complete"
            )
            raise ExternalError(Problem(ConditionReason.ENDPOINT_BUSY, busy)) from None


def _configure(
    workspace: WorkspaceClient, name: str, options: DatabricksServing, action: ConfigureEndpoint
) -> None:
    """Create the endpoint, or change the versions that it serves and their shares of the traffic."""
    from databricks.sdk.service import serving as api

    serving, throughput = workspace.serving_endpoints, options.provisioned_throughput
    traffic = api.TrafficConfig(
        [
            api.Route(item.percent, served_entity_name=build_entity_name(item.version))
            for item in action.served
        ]
    )
    tags = [api.EndpointTag(_OWNER_TAG, _OPERATOR)]
    if throughput:
        provisioned = api.PtEndpointCoreConfig(
            [build_provisioned_entity(throughput, item) for item in action.served], traffic
        )
        if action.create:
            serving.create_provisioned_throughput_endpoint(name, provisioned, tags=tags)
        else:
            serving.update_provisioned_throughput_endpoint_config(name, provisioned)
        return
    entities = [build_entity(options, item) for item in action.served]
    if action.create:
        config = api.EndpointCoreConfigInput(name, served_entities=entities, traffic_config=traffic)
        serving.create(name, config=config, tags=tags)
    else:
        # NB: this PUT removes from the endpoint everything that it omits, so it has the entities and the routes.
        serving.update_config(name, served_entities=entities, traffic_config=traffic)


def _stop_logging(workspace: WorkspaceClient, name: str) -> None:
    gateway = workspace.serving_endpoints.get(name).ai_gateway
    table = gateway.inference_table_config if gateway else None
    if table is not None:
        # NB: a request to stop logging must repeat catalog, schema and prefix, or Databricks rejects it.
        _put_table(workspace, name, dataclasses.replace(table, enabled=False))


def _put_table(
    workspace: WorkspaceClient, name: str, table: api.AiGatewayInferenceTableConfig | None
) -> None:
    gateway = workspace.serving_endpoints.get(name).ai_gateway
    # NB: this PUT removes omitted settings, so it repeats the existing limits and guardrails.
    workspace.serving_endpoints.put_ai_gateway(
        name,
        fallback_config=gateway.fallback_config if gateway else None,
        guardrails=gateway.guardrails if gateway else None,
        rate_limits=gateway.rate_limits if gateway else None,
        usage_tracking_config=gateway.usage_tracking_config if gateway else None,
        inference_table_config=table,
    )


def _build_table(options: DatabricksServing) -> api.AiGatewayInferenceTableConfig | None:
    from databricks.sdk.service import serving as api

    table = options.inference_table
    if table is None:
        return None
    return api.AiGatewayInferenceTableConfig(
        catalog_name=table.catalog,
        schema_name=table.schema_,
        table_name_prefix=table.table_prefix,
        enabled=True,
    )


def _describe_served(served: Sequence[ServedVersion]) -> str:
    return ", ".join(f"{item.model} {item.version} with {item.percent}%" for item in served)
