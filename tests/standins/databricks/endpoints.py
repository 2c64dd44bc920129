"""Serving endpoints of the stand-in workspace: changes take a while, one at a time, and can fail."""

from __future__ import annotations

import dataclasses
import threading
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
)

Json = dict[str, Any]
_Update = EndpointStateConfigUpdate


class EndpointRefusal(Exception):  # noqa: N818
    """An endpoint cannot do what is asked: HTTP status, Databricks's error code, message."""


@dataclass
class Endpoints:
    """The endpoints by name.

    Attributes:
        polls: how often an endpoint is asked for before a change of it ends; None: `finish` and `fail` end it.
        broken: versions that cannot be deployed, with what Databricks says of them.
        keeps_failed: whether the configuration that failed is still shown as pending.
    """

    polls: int | None = 0
    broken: dict[str, str] = field(default_factory=dict)
    keeps_failed: bool = True
    held: dict[str, ServingEndpointDetailed] = field(default_factory=dict)
    _left: dict[str, int] = field(default_factory=dict)
    _revision: int = 1_790_000_000_000
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def get(self, name: str) -> Json:
        """One endpoint; every time it is asked for, a change of it comes nearer to its end."""
        with self._lock:
            found = self._find(name)
            if self.polls is not None and found.state and found.state.config_update == _Update.IN_PROGRESS:
                left = self._left.get(name, 0)
                self._left[name] = left - 1
                if left <= 0:
                    self.end(name)
            return found.as_dict()

    def create(self, body: Json) -> Json:
        """POST of an endpoint with a configuration."""
        return self._create(body["name"], EndpointCoreConfigInput.from_dict(body["config"]))

    def create_reserved(self, body: Json) -> Json:
        """POST of an endpoint with provisioned throughput."""
        return self._create(body["name"], PtEndpointCoreConfig.from_dict(body["config"]))

    def configure(self, name: str, body: Json) -> Json:
        """PUT of a configuration."""
        return self._configure(name, EndpointCoreConfigInput.from_dict({"name": name} | body))

    def configure_reserved(self, name: str, body: Json) -> Json:
        """PUT of a configuration with provisioned throughput, which is in force at once."""
        with self._lock:
            self._configure(name, PtEndpointCoreConfig.from_dict(body["config"]))
            self.end(name)
            return self._find(name).as_dict()

    def put_gateway(self, name: str, body: Json) -> Json:
        """PUT of the AI gateway's configuration: all of it."""
        with self._lock:
            self._find(name).ai_gateway = AiGatewayConfig.from_dict(body)
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
            found = self._find(name)
            pending = found.pending_config or EndpointPendingConfig()
            before = (found.config.config_version or 0) if found.config else 0
            found.config = EndpointCoreConfigOutput(
                config_version=before + 1,
                served_entities=[
                    _deployed(item, ServedModelStateDeployment.DEPLOYMENT_READY)
                    for item in pending.served_entities or []
                ],
                traffic_config=pending.traffic_config,
            )
            found.pending_config = None
            found.state = EndpointState(_Update.NOT_UPDATING, EndpointStateReady.READY)

    def fail(self, name: str, message: str, version: str | None = None) -> None:
        """What is pending cannot be deployed: what was in force stays so."""
        with self._lock:
            found = self._find(name)
            pending = found.pending_config or EndpointPendingConfig()
            pending.served_entities = [
                _deployed(item, ServedModelStateDeployment.DEPLOYMENT_FAILED, message)
                if version in (None, item.entity_version)
                else item
                for item in pending.served_entities or []
            ]
            found.pending_config = pending if self.keeps_failed else None
            found.state = EndpointState(_Update.UPDATE_FAILED, found.state.ready if found.state else None)

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
            found = self._find(name)
            if found.state and found.state.config_update == _Update.IN_PROGRESS:
                message = f"Endpoint '{name}' is currently being updated. Wait for the update to complete and retry."
                raise EndpointRefusal(409, "RESOURCE_CONFLICT", message)
            _check(config)
            return self._begin(name, config)

    def _begin(self, name: str, config: EndpointCoreConfigInput | PtEndpointCoreConfig) -> Json:
        found = self._find(name)
        self._revision += 1
        found.last_updated_timestamp = self._revision
        creating = ServedModelStateDeployment.DEPLOYMENT_CREATING
        found.pending_config = EndpointPendingConfig(
            served_entities=[
                _deployed(ServedEntityOutput.from_dict(item.as_dict()), creating)
                for item in config.served_entities or []
            ],
            traffic_config=config.traffic_config,
            start_time=self._revision,
        )
        ready = found.state.ready if found.state else None
        found.state = EndpointState(_Update.IN_PROGRESS, ready)
        self._left[name] = self.polls or 0
        return found.as_dict()


def _deployed(
    item: ServedEntityOutput, deployment: ServedModelStateDeployment, message: str = ""
) -> ServedEntityOutput:
    return dataclasses.replace(item, state=ServedModelState(deployment, message or None))


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
