"""Databricks Model Serving: reads endpoints and requests changes. Nothing here waits until a change is complete."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from finetune_crds.conditions import ConditionReason
from finetune_crds.serving import DatabricksServing, InferenceTable
from finetune_operator.databricks.workspace import translate_errors
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.serving.model import (
    ConfigureEndpoint,
    Endpoint,
    EndpointAction,
    ServedVersion,
    StopLogging,
    resolve_workload,
)
from finetune_operator.serving.traffic import parse_traffic

if TYPE_CHECKING:
    from databricks.sdk import WorkspaceClient
    from databricks.sdk.service import serving as api

log = logging.getLogger(__name__)

_OWNER_TAG = "managed-by"
_OPERATOR = "finetune-operator"


def read_endpoint(workspace: WorkspaceClient, spec: DatabricksServing) -> Endpoint:
    """The current state of the endpoint. Never raises: `problem` says why it could not be read."""
    from databricks.sdk.errors import NotFound

    try:
        with translate_errors(workspace, f"read the serving endpoint {spec.endpoint}"):
            try:
                details = workspace.serving_endpoints.get(spec.endpoint)
            except NotFound:
                return Endpoint()
            state = _parse_endpoint(details, spec, workspace.config.host)
            gated = spec.canary is not None and bool(spec.canary.gates)
            return (
                dataclasses.replace(state, traffic=_read_traffic(workspace, spec, state)) if gated else state
            )
    except ExternalError as error:
        return Endpoint(problem=error.problem)


def _read_traffic(
    workspace: WorkspaceClient, spec: DatabricksServing, state: Endpoint
) -> dict[str, Mapping[str, float]]:
    """The numbers of each served version; none where the endpoint exports no metrics."""
    from databricks.sdk.errors import NotFound, PermissionDenied

    try:
        contents = workspace.serving_endpoints.export_metrics(spec.endpoint).contents
        text = contents.read().decode() if contents else ""
        return {item.version: parse_traffic(text, build_entity_name(item.version)) for item in state.served}
    except (NotFound, PermissionDenied, ValueError) as error:
        # Gates that need them are inconclusive, and say so.
        log.warning("the metrics of endpoint %s cannot be read: %s", spec.endpoint, error)
        return {}


def request_change(workspace: WorkspaceClient, action: EndpointAction) -> None:
    """Request a change from Databricks, and return as soon as the request is accepted.

    Raises:
        ExternalError: Databricks rejects the request. With the reason EndpointBusy another change is in progress: retry
            after it.
    """
    from databricks.sdk.errors import BadRequest, ResourceConflict

    name = action.spec.endpoint
    with translate_errors(workspace, f"change the serving endpoint {name}"):
        try:
            if isinstance(action, ConfigureEndpoint):
                _configure(workspace, action)
                log.info("asked Databricks to serve %s at %s", _describe_served(action.served), name)
            elif isinstance(action, StopLogging):
                _stop_logging(workspace, action)
                log.info("asked Databricks to stop logging the requests of %s", name)
            else:
                _put_table(workspace, name, _build_table(action.spec))
                log.info("asked Databricks to log the requests of %s", name)
        except (ResourceConflict, BadRequest) as error:
            if isinstance(error, BadRequest) and not _UPDATE_IN_PROGRESS.search(str(error)):
                raise
            busy = (
                f"another change of the serving endpoint {name} is in progress: waiting until it is complete"
            )
            raise ExternalError(Problem(ConditionReason.ENDPOINT_BUSY, busy)) from None


# NB: not only HTTP 409: some changes in progress are a bad request, which only its text tells from a mistake.
_UPDATE_IN_PROGRESS = re.compile(
    r"(being|currently) updat|(update|change|deployment)( is)?( already)? in progress", re.IGNORECASE
)


def build_entity_name(version: str) -> str:
    """The name of a version among the endpoint's served entities, by which routes name it."""
    return f"version-{version}"


def _configure(workspace: WorkspaceClient, action: ConfigureEndpoint) -> None:
    from databricks.sdk.service import serving as api

    serving, spec, name = workspace.serving_endpoints, action.spec, action.spec.endpoint
    traffic = api.TrafficConfig(
        [
            api.Route(item.percent, served_entity_name=build_entity_name(item.version))
            for item in action.served
        ]
    )
    tags = [api.EndpointTag(_OWNER_TAG, _OPERATOR)]
    if spec.provisioned_throughput:
        reserved = api.PtEndpointCoreConfig(
            [_build_provisioned_entity(spec, item) for item in action.served], traffic
        )
        if action.create:
            serving.create_provisioned_throughput_endpoint(name, reserved, tags=tags)
        else:
            serving.update_provisioned_throughput_endpoint_config(name, reserved)
        return
    entities = [_build_entity(spec, item) for item in action.served]
    if action.create:
        config = api.EndpointCoreConfigInput(name, served_entities=entities, traffic_config=traffic)
        serving.create(name, config=config, tags=tags)
    else:
        # NB: this PUT removes whatever it omits from the endpoint.
        serving.update_config(name, served_entities=entities, traffic_config=traffic)


def _build_entity(spec: DatabricksServing, item: ServedVersion) -> api.ServedEntityInput:
    from databricks.sdk.service import serving as api

    machines = resolve_workload(spec)
    return api.ServedEntityInput(
        name=build_entity_name(item.version),
        entity_name=item.model,
        entity_version=item.version,
        workload_size=machines.size,
        min_provisioned_concurrency=machines.concurrency[0] if machines.concurrency else None,
        max_provisioned_concurrency=machines.concurrency[1] if machines.concurrency else None,
        workload_type=api.ServingModelWorkloadType(machines.kind),
        scale_to_zero_enabled=machines.scale_to_zero,
        environment_vars=dict(spec.environment) or None,
    )


def _build_provisioned_entity(spec: DatabricksServing, item: ServedVersion) -> api.PtServedModel:
    from databricks.sdk.service import serving as api

    if spec.provisioned_throughput is None:
        raise ValueError(f"{spec.endpoint} has no provisioned throughput")
    return api.PtServedModel(
        name=build_entity_name(item.version),
        entity_name=item.model,
        entity_version=item.version,
        provisioned_model_units=spec.provisioned_throughput.model_units,
        burst_scaling_enabled=spec.provisioned_throughput.burst_scaling,
    )


def _stop_logging(workspace: WorkspaceClient, action: StopLogging) -> None:
    name = action.spec.endpoint
    gateway = workspace.serving_endpoints.get(name).ai_gateway
    table = gateway.inference_table_config if gateway else None
    if table is not None:
        # NB: Databricks refuses another catalog, schema or prefix in the request that ends the logging.
        _put_table(workspace, name, dataclasses.replace(table, enabled=False))


def _put_table(
    workspace: WorkspaceClient, name: str, table: api.AiGatewayInferenceTableConfig | None
) -> None:
    gateway = workspace.serving_endpoints.get(name).ai_gateway
    # NB: this PUT removes omitted settings, so it repeats the limits and guardrails that exist.
    workspace.serving_endpoints.put_ai_gateway(
        name,
        fallback_config=gateway.fallback_config if gateway else None,
        guardrails=gateway.guardrails if gateway else None,
        rate_limits=gateway.rate_limits if gateway else None,
        usage_tracking_config=gateway.usage_tracking_config if gateway else None,
        inference_table_config=table,
    )


def _build_table(spec: DatabricksServing) -> api.AiGatewayInferenceTableConfig | None:
    from databricks.sdk.service import serving as api

    table = spec.inference_table
    if table is None:
        return None
    return api.AiGatewayInferenceTableConfig(
        catalog_name=table.catalog,
        schema_name=table.schema_,
        table_name_prefix=table.table_prefix,
        enabled=True,
    )


def _parse_endpoint(details: api.ServingEndpointDetailed, spec: DatabricksServing, host: str) -> Endpoint:
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
        matches_spec=_matches_spec(details.config, spec),
        logged_to=_parse_table(details.ai_gateway),
        revision=None if details.last_updated_timestamp is None else str(details.last_updated_timestamp),
        url=url,
    )


def _parse_served_versions(
    config: api.EndpointCoreConfigOutput | api.EndpointPendingConfig | None,
) -> tuple[ServedVersion, ...]:
    entities = (config.served_entities if config else None) or []
    traffic = config.traffic_config if config else None
    routes = (traffic.routes if traffic else None) or []
    shares = {
        (route.served_entity_name or route.served_model_name): route.traffic_percentage for route in routes
    }
    everything = 100 if len(entities) == 1 and not routes else 0
    return tuple(
        # External and foundation models have no name in a registry.
        ServedVersion(item.entity_name or "", item.entity_version or "", shares.get(item.name, everything))
        for item in entities
    )


def _matches_spec(config: api.EndpointCoreConfigOutput | None, spec: DatabricksServing) -> bool:
    """Whether every field that Databricks reports of the served versions is as in the spec; it may omit some."""
    for entity in (config.served_entities if config else None) or []:
        item = ServedVersion(entity.entity_name or "", entity.entity_version or "")
        expected: dict[str, Any] = (
            _build_provisioned_entity(spec, item)
            if spec.provisioned_throughput
            else _build_entity(spec, item)
        ).as_dict()
        reported = entity.as_dict()
        fields = set(expected) - {"name"} | (set() if spec.provisioned_throughput else _OPTIONAL_FIELDS)
        if any(field in reported and reported[field] != expected.get(field) for field in fields):
            return False
    return True


# Fields that are left out of a request when the spec does not set them.
_OPTIONAL_FIELDS = {
    "environment_vars",
    "workload_size",
    "min_provisioned_concurrency",
    "max_provisioned_concurrency",
}


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
    """Databricks' messages about the served entities that it could not deploy."""
    from databricks.sdk.service import serving as api

    failed = (
        api.ServedModelStateDeployment.DEPLOYMENT_FAILED,
        api.ServedModelStateDeployment.DEPLOYMENT_ABORTED,
    )
    for config in (details.pending_config, details.config):
        messages = [
            f"version {item.entity_version}: {item.state.deployment_state_message}"
            for item in (config.served_entities if config else None) or []
            if item.state and item.state.deployment in failed and item.state.deployment_state_message
        ]
        if messages:
            return "; ".join(messages)[:1000]
    cancelled = details.state and details.state.config_update == api.EndpointStateConfigUpdate.UPDATE_CANCELED
    return (
        "the update was cancelled" if cancelled else "Databricks reports no reason: see the endpoint's events"
    )


def _describe_recovery(config: api.EndpointCoreConfigOutput | None) -> str:
    """Databricks' messages about the served versions that it starts again."""
    from databricks.sdk.service import serving as api

    recovering = api.ServedModelStateDeployment.DEPLOYMENT_RECOVERING
    return "; ".join(
        f"version {item.entity_version} is recovering: {item.state.deployment_state_message or 'no reason reported'}"
        for item in (config.served_entities if config else None) or []
        if item.state and item.state.deployment == recovering
    )[:1000]


def _describe_served(served: Sequence[ServedVersion]) -> str:
    return ", ".join(f"{item.model} {item.version} with {item.percent}%" for item in served)
