"""Serving endpoints of the stand-in workspace: changes take a while, one at a time, and can fail."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from databricks.sdk.service.serving import (
    AiGatewayConfig,
    EndpointCoreConfigInput,
    EndpointCoreConfigOutput,
    EndpointPendingConfig,
    EndpointState,
    EndpointStateConfigUpdate,
    EndpointStateReady,
    PtEndpointCoreConfig,
    PutAiGatewayResponse,
    ServedEntityOutput,
    ServedModelState,
    ServedModelStateDeployment,
    ServingEndpointDetailed,
    ServingModelWorkloadType,
)

Json = dict[str, Any]
_Update = EndpointStateConfigUpdate


_GATEWAY_FIXED = ("catalog_name", "schema_name", "table_name_prefix")
_SIZES = ("Small", "Medium", "Large")
BUSY = (
    (
        409,
        "RESOURCE_CONFLICT",
        "Endpoint '{name}' is currently being updated. Wait for the update to complete and retry.",
    ),
    (409, "ABORTED", "The operation was aborted by a concurrent update of endpoint '{name}'."),
    (400, "BAD_REQUEST", "Cannot change endpoint '{name}': a config update is already in progress."),
    (400, "INVALID_STATE", "Endpoint '{name}' is being updated."),
)
"""The ways in which an endpoint says that another change is in progress."""


def exported(
    endpoint: str, counts: dict[str, tuple[int, int, int]], milliseconds: Mapping[str, float] | None = None
) -> str:
    """Metrics as an endpoint exports them: requests, 4xx and 5xx answers of the last minute, by version.

    Args:
        milliseconds: the mean latency of versions, which not every endpoint exports.
    """
    names = ("request_count_total", "request_4xx_count_total", "request_5xx_count_total")
    lines = []
    for position, name in enumerate(names):
        lines.append(f"# TYPE {name} gauge")
        lines += [
            f'{name}{{endpoint_name="{endpoint}",served_entity_name="version-{version}"}} {version_counts[position]} 1790000000000'
            for version, version_counts in counts.items()
        ]
    name = "request_latency_ms"
    lines += [f"# TYPE {name} histogram"] if milliseconds else []
    for version, mean in (milliseconds or {}).items():
        labels, answered = (
            f'endpoint_name="{endpoint}",served_entity_name="version-{version}"',
            counts[version][0],
        )
        lines += [
            f'{name}_bucket{{{labels},le="+Inf"}} {answered} 1790000000000',
            f"{name}_sum{{{labels}}} {mean * answered} 1790000000000",
            f"{name}_count{{{labels}}} {answered} 1790000000000",
        ]
    return "".join(f"{line}\n" for line in lines)


class EndpointRefusal(Exception):  # noqa: N818
    """An endpoint cannot do what is asked: HTTP status, Databricks's error code, message."""


@dataclass
class Endpoints:
    """The endpoints by name.

    Attributes:
        polls: how often an endpoint is asked for before a change of it ends; None: `finish` and `fail` end it.
        broken: versions that cannot be deployed, with what Databricks says of them.
        keeps_failed: whether the configuration that failed is still shown as pending.
        recovering: versions that are deployed and do not answer, with what Databricks says of them.
        busy: status, error code and message of a refusal while another change is in progress; the message may name {name}.
        metrics: what an endpoint's metrics are, as OpenMetrics text, by its name.
        shares: the share of each version in every configuration that came into force, in percent, by the endpoint's name.
    """

    polls: int | None = 0
    broken: dict[str, str] = field(default_factory=dict)
    keeps_failed: bool = True
    recovering: dict[str, str] = field(default_factory=dict)
    busy: tuple[int, str, str] = BUSY[0]
    metrics: dict[str, str] = field(default_factory=dict)
    shares: dict[str, list[dict[str, int]]] = field(default_factory=dict)
    held: dict[str, ServingEndpointDetailed] = field(default_factory=dict)
    _left: dict[str, int] = field(default_factory=dict)
    _revision: int = 1_790_000_000_000
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def get(self, name: str) -> Json:
        """One endpoint; every time it is asked for, a change of it comes nearer to its end."""
        with self._lock:
            endpoint = self._find(name)
            if (
                self.polls is not None
                and endpoint.state
                and endpoint.state.config_update == _Update.IN_PROGRESS
            ):
                polls_left = self._left.get(name, 0)
                self._left[name] = polls_left - 1
                if polls_left <= 0:
                    self.end(name)
            return endpoint.as_dict()

    def create(self, body: Json) -> Json:
        """POST of an endpoint with a configuration."""
        _check_machines(body["config"])
        return self._create(body["name"], EndpointCoreConfigInput.from_dict(body["config"]))

    def create_reserved(self, body: Json) -> Json:
        """POST of an endpoint with provisioned throughput."""
        return self._create(body["name"], PtEndpointCoreConfig.from_dict(body["config"]))

    def configure(self, name: str, body: Json) -> Json:
        """PUT of a configuration."""
        _check_machines(body)
        return self._configure(name, EndpointCoreConfigInput.from_dict({"name": name} | body))

    def configure_reserved(self, name: str, body: Json) -> Json:
        """PUT of a configuration with provisioned throughput, which is in force at once."""
        with self._lock:
            self._configure(name, PtEndpointCoreConfig.from_dict(body["config"]))
            self.end(name)
            return self._find(name).as_dict()

    def export(self, name: str) -> str:
        """GET of the metrics, as OpenMetrics text."""
        with self._lock:
            self._find(name)
            return self.metrics.get(name, "")

    def put_gateway(self, name: str, body: Json) -> Json:
        """PUT of the AI gateway's configuration: all of it. It moves the endpoint's time stamp."""
        with self._lock:
            endpoint = self._find(name)
            table = endpoint.ai_gateway.inference_table_config if endpoint.ai_gateway else None
            _check_table(table.as_dict() if table else {}, body.get("inference_table_config") or {})
            endpoint.ai_gateway = AiGatewayConfig.from_dict(body)
            self._revision += 1
            endpoint.last_updated_timestamp = self._revision
            return PutAiGatewayResponse.from_dict(body).as_dict()

    def delete(self, name: str) -> Json:
        """DELETE, by hand."""
        with self._lock:
            self._find(name)
            del self.held[name]
            return {}

    def end(self, name: str) -> None:
        """End a change: it fails if it has a broken version, else it is in force."""
        with self._lock:
            pending = self._find(name).pending_config
            versions = [
                str(item.entity_version) for item in (pending.served_entities if pending else None) or []
            ]
            wrong = next((version for version in versions if version in self.broken), None)
            if wrong is None:
                self.finish(name)
            else:
                self.fail(name, self.broken[wrong], wrong)

    def finish(self, name: str) -> None:
        """What is pending is in force."""
        with self._lock:
            endpoint = self._find(name)
            pending = endpoint.pending_config or EndpointPendingConfig()
            states = [self._deployed(item) for item in pending.served_entities or []]
            answers = all(_is_ready(item) for item in states)
            before = (endpoint.config.config_version or 0) if endpoint.config else 0
            endpoint.config = EndpointCoreConfigOutput(
                config_version=before + 1,
                served_entities=states,
                traffic_config=pending.traffic_config,
            )
            endpoint.pending_config = None
            self.shares.setdefault(name, []).append(self.routes(name))
            ready = EndpointStateReady.READY if answers else EndpointStateReady.NOT_READY
            endpoint.state = EndpointState(_Update.NOT_UPDATING, ready)

    def recover(self, name: str) -> None:
        """Every version answers again."""
        with self._lock:
            endpoint, self.recovering = self._find(name), {}
            if endpoint.config:
                endpoint.config.served_entities = [
                    self._deployed(item) for item in endpoint.config.served_entities or []
                ]
            endpoint.state = EndpointState(_Update.NOT_UPDATING, EndpointStateReady.READY)

    def _deployed(self, item: ServedEntityOutput) -> ServedEntityOutput:
        message = self.recovering.get(str(item.entity_version))
        if message is None:
            return _deployed(item, ServedModelStateDeployment.DEPLOYMENT_READY)
        return _deployed(item, ServedModelStateDeployment.DEPLOYMENT_RECOVERING, message)

    def fail(self, name: str, message: str, version: str | None = None) -> None:
        """What is pending cannot be deployed: what was in force stays so."""
        with self._lock:
            endpoint = self._find(name)
            pending = endpoint.pending_config or EndpointPendingConfig()
            pending.served_entities = [
                _deployed(item, ServedModelStateDeployment.DEPLOYMENT_FAILED, message)
                if version in (None, item.entity_version)
                else item
                for item in pending.served_entities or []
            ]
            endpoint.pending_config = pending if self.keeps_failed else None
            endpoint.state = EndpointState(
                _Update.UPDATE_FAILED, endpoint.state.ready if endpoint.state else None
            )

    def routes(self, name: str) -> dict[str, int]:
        """The share of each version in what is in force."""
        config = self._find(name).config
        names = {
            item.name: str(item.entity_version) for item in (config.served_entities if config else None) or []
        }
        traffic = (config.traffic_config.routes if config and config.traffic_config else None) or []
        return {names[route.served_entity_name]: route.traffic_percentage for route in traffic}

    def _find(self, name: str) -> ServingEndpointDetailed:
        if name not in self.held:
            raise EndpointRefusal(
                404, "RESOURCE_DOES_NOT_EXIST", f"Endpoint with name '{name}' does not exist."
            )
        return self.held[name]

    def _create(self, name: str, config: EndpointCoreConfigInput | PtEndpointCoreConfig) -> Json:
        with self._lock:
            if name in self.held:
                raise EndpointRefusal(
                    409, "RESOURCE_ALREADY_EXISTS", f"Endpoint with name '{name}' already exists."
                )
            _check(config)
            self.held[name] = ServingEndpointDetailed(
                name=name,
                creator="operator",
                state=EndpointState(_Update.NOT_UPDATING, EndpointStateReady.NOT_READY),
            )
            return self._begin(name, config)

    def _configure(self, name: str, config: EndpointCoreConfigInput | PtEndpointCoreConfig) -> Json:
        with self._lock:
            endpoint = self._find(name)
            if endpoint.state and endpoint.state.config_update == _Update.IN_PROGRESS:
                status, code, message = self.busy
                raise EndpointRefusal(status, code, message.format(name=name))
            _check(config)
            return self._begin(name, config)

    def _begin(self, name: str, config: EndpointCoreConfigInput | PtEndpointCoreConfig) -> Json:
        endpoint = self._find(name)
        self._revision += 1
        endpoint.last_updated_timestamp = self._revision
        creating = ServedModelStateDeployment.DEPLOYMENT_CREATING
        endpoint.pending_config = EndpointPendingConfig(
            served_entities=[
                _deployed(ServedEntityOutput.from_dict(item.as_dict()), creating)
                for item in config.served_entities or []
            ],
            traffic_config=config.traffic_config,
            start_time=self._revision,
        )
        ready = endpoint.state.ready if endpoint.state else None
        endpoint.state = EndpointState(_Update.IN_PROGRESS, ready)
        self._left[name] = self.polls or 0
        return endpoint.as_dict()


def _deployed(
    item: ServedEntityOutput, deployment: ServedModelStateDeployment, message: str = ""
) -> ServedEntityOutput:
    return dataclasses.replace(item, state=ServedModelState(deployment, message or None))


def _is_ready(item: ServedEntityOutput) -> bool:
    return bool(item.state and item.state.deployment == ServedModelStateDeployment.DEPLOYMENT_READY)


def _check_table(current: Json, requested: Json) -> None:
    """An inference table changes only after it was disabled, and is enabled with its whole name."""
    if (
        current.get("enabled")
        and requested
        and any(requested.get(key) != current.get(key) for key in _GATEWAY_FIXED)
    ):
        message = "Disable the inference table before you change its catalog, schema or table name prefix."
        raise EndpointRefusal(400, "INVALID_PARAMETER_VALUE", message)
    if requested.get("enabled") and not (requested.get("catalog_name") and requested.get("schema_name")):
        message = "Enabling an inference table requires catalog_name and schema_name."
        raise EndpointRefusal(400, "INVALID_PARAMETER_VALUE", message)


def _check_machines(config: Json) -> None:
    """The machines of each served entity, as they were sent: the SDK's classes drop what they do not know."""
    for item in config.get("served_entities") or []:
        if item.get("external_model"):
            continue
        size = item.get("workload_size")
        least, most = item.get("min_provisioned_concurrency"), item.get("max_provisioned_concurrency")
        wrong = ""
        kind = item.get("workload_type", "CPU")
        if kind not in {workload_type.value for workload_type in ServingModelWorkloadType}:
            wrong = f"Workload type {kind} is not supported."
        elif (size is None) == (least is None and most is None):
            wrong = "Specify either workload_size or min_ and max_provisioned_concurrency."
        elif size is not None and size not in _SIZES:
            wrong = f"Workload size {size} is not supported."
        elif size is None and (least is None or most is None or least > most or least % 4 or most % 4):
            wrong = "Provisioned concurrency must be a range of multiples of 4."
        elif item.get("scale_to_zero_enabled") is None:
            wrong = "scaleToZeroEnabled is undefined. Please set it to either true or false."
        if wrong:
            raise EndpointRefusal(400, "INVALID_PARAMETER_VALUE", wrong)


def _check(config: EndpointCoreConfigInput | PtEndpointCoreConfig) -> None:
    names = [item.name for item in config.served_entities or []]
    routes = (config.traffic_config.routes if config.traffic_config else None) or []
    routed = [route.served_entity_name for route in routes]
    if not names or len(set(names)) != len(names):
        raise EndpointRefusal(400, "INVALID_PARAMETER_VALUE", "Served entities must have unique names.")
    if sorted(map(str, routed)) != sorted(map(str, names)):
        raise EndpointRefusal(400, "INVALID_PARAMETER_VALUE", "Routes must name every served entity once.")
    if sum(route.traffic_percentage for route in routes) != 100:
        raise EndpointRefusal(400, "INVALID_PARAMETER_VALUE", "Traffic percentages must add up to 100.")
