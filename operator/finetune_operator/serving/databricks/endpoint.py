"""Reads endpoints of Databricks Model Serving."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from finetune_crds.serving import DatabricksServing, InferenceTable, Serving
from finetune_operator.databricks.workspace import translate_errors
from finetune_operator.serving.databricks.entities import (
    build_entity,
    build_entity_name,
    build_provisioned_entity,
)
from finetune_operator.serving.databricks.traffic import parse_traffic
from finetune_operator.serving.model import Endpoint, ServedVersion

if TYPE_CHECKING:
    from databricks.sdk import WorkspaceClient
    from databricks.sdk.service import serving as api

log = logging.getLogger(__name__)

_MAX_MESSAGE_CHARS = 1000
# Fields that a request omits if the spec does not set them: then the endpoint must not have them either.
_OPTIONAL_FIELDS = {
    "environment_vars",
    "workload_size",
    "min_provisioned_concurrency",
    "max_provisioned_concurrency",
}


def read_endpoint(workspace: WorkspaceClient, spec: Serving, *, with_traffic: bool) -> Endpoint:
    """Return the current state of the endpoint.

    Args:
        with_traffic: also read the metrics of each served version.

    Raises:
        ExternalError: Databricks cannot be reached, or refuses.
    """
    from databricks.sdk.errors import NotFound

    # NB: other promotions also show this message, since none of them tries again for a while if the workspace cannot be reached.
    with translate_errors(workspace, "read serving endpoints"):
        try:
            details = workspace.serving_endpoints.get(spec.endpoint)
        except NotFound:
            return Endpoint()
        endpoint = _parse_endpoint(details, spec, workspace.config.host)
        if not with_traffic:
            return endpoint
        return dataclasses.replace(endpoint, traffic=_read_traffic(workspace, spec, endpoint))


def _read_traffic(
    workspace: WorkspaceClient, spec: Serving, endpoint: Endpoint
) -> dict[str, Mapping[str, float]]:
    """The metrics of each served version, by version and then by name; empty if the endpoint exports no metrics."""
    from databricks.sdk.errors.base import DatabricksError

    try:
        contents = workspace.serving_endpoints.export_metrics(spec.endpoint).contents
        text = contents.read().decode() if contents else ""
        versions = [item.version for item in endpoint.served]
        return {version: parse_traffic(text, build_entity_name(version)) for version in versions}
    except (DatabricksError, OSError, ValueError) as error:
        # Gates on these metrics become inconclusive, with a message about the missing metrics. NB: the error must not count as an outage of
        # the workspace, during which the operator reads none of its endpoints.
        log.warning("the metrics of endpoint %s cannot be read: %s", spec.endpoint, error)
        return {}


def _parse_endpoint(details: api.ServingEndpointDetailed, spec: Serving, host: str) -> Endpoint:
    """The state of an endpoint that exists."""
    from databricks.sdk.service import serving as api

    update = details.state.config_update if details.state else None
    failed = update in (
        api.EndpointStateConfigUpdate.UPDATE_FAILED,
        api.EndpointStateConfigUpdate.UPDATE_CANCELED,
    )
    served = _parse_served_versions(details.config)
    # NB: the API returns no URL for endpoints that are reached through the workspace's host.
    url = details.endpoint_url or f"{host}/serving-endpoints/{spec.endpoint}/invocations"
    return Endpoint(
        exists=True,
        ready=bool(details.state and details.state.ready == api.EndpointStateReady.READY),
        updating=update == api.EndpointStateConfigUpdate.IN_PROGRESS,
        failed=failed,
        message=_describe_failure(details) if failed else _describe_recovery(details.config),
        served=served,
        pending=_parse_served_versions(details.pending_config),
        matches_spec=_matches_options(details.config, spec.databricks),
        logged_to=_parse_table(details.ai_gateway),
        revision=None if details.last_updated_timestamp is None else str(details.last_updated_timestamp),
        url=url,
    )


def _parse_served_versions(
    config: api.EndpointCoreConfigOutput | api.EndpointPendingConfig | None,
) -> tuple[ServedVersion, ...]:
    """The versions in a configuration, with their shares of the traffic."""
    entities = (config.served_entities if config else None) or []
    traffic = config.traffic_config if config else None
    routes = (traffic.routes if traffic else None) or []
    shares = {
        (route.served_entity_name or route.served_model_name): route.traffic_percentage for route in routes
    }
    # Without routes, a single entity gets all the traffic.
    default_percent = 100 if len(entities) == 1 and not routes else 0
    return tuple(
        # External and foundation models have no name in a registry.
        ServedVersion(
            model=item.entity_name or "",
            version=item.entity_version or "",
            percent=shares.get(item.name, default_percent),
        )
        for item in entities
    )


def _matches_options(config: api.EndpointCoreConfigOutput | None, options: DatabricksServing) -> bool:
    """Whether every field that Databricks reports about the served versions is as in the spec. Databricks may omit fields."""
    throughput = options.provisioned_throughput
    for entity in (config.served_entities if config else None) or []:
        item = ServedVersion(entity.entity_name or "", entity.entity_version or "")
        expected: dict[str, Any] = (
            build_provisioned_entity(throughput, item) if throughput else build_entity(options, item)
        ).as_dict()
        reported = entity.as_dict()
        # The name of an entity is no setting.
        fields = (set(expected) - {"name"}) | (set() if throughput else _OPTIONAL_FIELDS)
        if any(field in reported and reported[field] != expected.get(field) for field in fields):
            return False
    return True


def _parse_table(gateway: api.AiGatewayConfig | None) -> InferenceTable | None:
    table = gateway.inference_table_config if gateway else None
    if table is None or not table.enabled or not table.catalog_name or not table.schema_name:
        return None
    return InferenceTable.model_validate(
        {
            "catalog": table.catalog_name,
            "schema": table.schema_name,
            "tablePrefix": table.table_name_prefix or None,
        }
    )


def _describe_failure(details: api.ServingEndpointDetailed) -> str:
    """Databricks' messages about the served versions that it could not deploy."""
    from databricks.sdk.service import serving as api

    failed_states = (
        api.ServedModelStateDeployment.DEPLOYMENT_FAILED,
        api.ServedModelStateDeployment.DEPLOYMENT_ABORTED,
    )
    for config in (details.pending_config, details.config):
        messages = [
            f"version {item.entity_version}: {item.state.deployment_state_message}"
            for item in (config.served_entities if config else None) or []
            if item.state and item.state.deployment in failed_states and item.state.deployment_state_message
        ]
        if messages:
            return "; ".join(messages)[:_MAX_MESSAGE_CHARS]
    cancelled = details.state and details.state.config_update == api.EndpointStateConfigUpdate.UPDATE_CANCELED
    return (
        "the update was cancelled" if cancelled else "Databricks reports no reason: see the endpoint's events"
    )


def _describe_recovery(config: api.EndpointCoreConfigOutput | None) -> str:
    """Databricks' messages about the served versions that it is restarting; empty without any."""
    from databricks.sdk.service import serving as api

    recovering = api.ServedModelStateDeployment.DEPLOYMENT_RECOVERING
    return "; ".join(
        f"version {item.entity_version} is recovering: {item.state.deployment_state_message or 'no reason reported'}"
        for item in (config.served_entities if config else None) or []
        if item.state and item.state.deployment == recovering
    )[:_MAX_MESSAGE_CHARS]
