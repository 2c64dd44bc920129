"""A promotion whose endpoint another backend has than Databricks: the policies work on the protocol alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_crds.serving import Serving
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.serving import choose
from finetune_operator.serving.model import ConfigureEndpoint, Endpoint, EndpointAction
from finetune_operator.settings import Settings
from fixtures.operator_in_memory.promotions import World

CANARY = {"steps": [{"percent": 10, "durationSeconds": 600}]}


@dataclass
class Server:
    """A server with one endpoint, which is the client of it too."""

    endpoint: Endpoint = field(default_factory=Endpoint)
    shares: list[dict[str, int]] = field(default_factory=list)
    is_full: bool = False

    def read(self, *, with_traffic: bool) -> Endpoint:
        return self.endpoint

    def act(self, action: EndpointAction) -> None:
        assert isinstance(action, ConfigureEndpoint)
        if self.is_full:
            raise ExternalError(Problem(ConditionReason.QUOTA_EXCEEDED, "no accelerator is free"))
        self.shares.append({item.version: item.percent for item in action.served})
        self.endpoint = Endpoint(
            exists=True, ready=True, served=action.served, revision=str(len(self.shares))
        )


@dataclass(frozen=True)
class Backend:
    """A backend without a login, a setting or a table."""

    spec: Serving
    server: Server
    secret_ref: ClassVar[None] = None
    secret_field: ClassVar[str] = ""
    configuration: ClassVar[object] = {}
    inference_table: ClassVar[None] = None
    rejection_reasons: ClassVar[tuple[ConditionReason, ...]] = (ConditionReason.QUOTA_EXCEEDED,)

    def find_mistakes(self, registry: str) -> Iterator[str]:
        if not registry.startswith("http://"):
            yield f"the server takes no models of {registry}"

    def find_address(self, settings: Settings, secret: Mapping[str, str] | None) -> str:
        return "memory"

    def open_client(self, settings: Settings, secret: Mapping[str, str] | None) -> Server:
        return self.server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server of all endpoints."""
    server = Server()
    monkeypatch.setitem(choose._BACKENDS, "Databricks", lambda spec: Backend(spec, server))
    return server


async def promoted(**spec: Any) -> World:
    """Version 1 is promoted and served, from a registry of MLflow."""
    simulation = World()
    for version in ("1", "2"):
        simulation.registry.add(version)
    simulation.registry.aliases["staging"] = "1"
    serving = {"type": "Databricks", "endpoint": "support", "canary": CANARY}
    simulation.submit(serving=serving, **spec)
    await simulation.settle()
    return simulation


async def test_a_version_goes_through_its_canary(server: Server) -> None:
    simulation = await promoted()
    assert simulation.phase_and_reason() == "Promoted: Promoted"
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    assert simulation.phase_and_reason() == "Promoting: Canary"
    simulation.seconds += 600
    await simulation.settle()
    assert simulation.phase_and_reason() == "Promoted: Promoted"
    assert server.shares == [{"1": 100}, {"2": 10, "1": 90}, {"2": 100}]


async def test_a_request_that_is_rejected_is_reported_until_it_is_accepted(server: Server) -> None:
    simulation = await promoted()
    simulation.registry.aliases["staging"] = "2"
    server.is_full = True
    writes = []
    for _ in range(8):
        simulation.seconds += 5
        await simulation.operator.look("champion")
        writes.append(simulation.writes.count)
    assert simulation.says("Served") == ("QuotaExceeded", "no accelerator is free")
    assert simulation.phase_and_reason() == "Promoting: QuotaExceeded"
    # The condition does not alternate between the request and its rejection.
    assert writes[-3] == writes[-1]
    server.is_full = False
    await simulation.settle()
    assert simulation.phase_and_reason() == "Promoting: Canary"


async def test_the_older_of_two_keeps_the_endpoint(server: Server) -> None:
    simulation = await promoted()
    simulation.submit("other", alias="other", serving={"type": "Databricks", "endpoint": "support"})
    simulation.kube.objects["ModelPromotion", "team", "other"]["metadata"]["creationTimestamp"] = (
        "2026-08-01T12:00:01Z"
    )
    await simulation.settle()
    assert simulation.phase_and_reason("other") == "Blocked: Conflict"
    assert simulation.says("Served", "other") == (
        "Conflict",
        "ModelPromotion team/champion is older and manages endpoint support on the same server: set spec.serving.endpoint to another name",
    )
    assert server.shares == [{"1": 100}]


async def test_what_the_schema_cannot_see_is_the_backends_to_say(server: Server) -> None:
    simulation = await promoted(tracking={"registryUri": "https://registry"})
    assert simulation.says("Accepted") == ("InvalidSpec", "the server takes no models of https://registry")
    assert (simulation.phase_and_reason(), server.shares) == ("Blocked: InvalidSpec", [])
