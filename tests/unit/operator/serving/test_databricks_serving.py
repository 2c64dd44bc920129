"""The client of serving endpoints, with the real SDK against the stand-in workspace."""

from __future__ import annotations

from typing import Any

import pytest
from databricks.sdk.service.serving import AiGatewayConfig, ServingModelWorkloadType

from finetune_crds.conditions import ConditionReason
from finetune_crds.serving import DatabricksServing, InferenceTable, Serving
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.serving.choose import choose_backend
from finetune_operator.serving.model import (
    ConfigureEndpoint,
    Endpoint,
    EndpointAction,
    EndpointClient,
    LogRequests,
    ServedVersion,
    StopLogging,
)
from finetune_operator.settings import Settings
from fixtures.fake_databricks import Fault, Workspace
from fixtures.fake_databricks.endpoints import BUSY

MODEL = "main.llm.support"
PATH = "/api/2.0/serving-endpoints"
SCHEMA = DatabricksServing.model_json_schema()


def served(**shares: int) -> tuple[ServedVersion, ...]:
    """v3=90 is version 3 with 90%."""
    return tuple(ServedVersion(MODEL, name[1:], percent) for name, percent in shares.items())


def client(state: Workspace, **parts: Any) -> EndpointClient:
    """The client of an endpoint with these settings of Databricks."""
    spec = Serving.model_validate({"type": "Databricks", "endpoint": "support", "databricks": parts})
    return choose_backend(spec).open_client(Settings(), state.secret)


def read(state: Workspace, **parts: Any) -> Endpoint:
    return client(state, **parts).read(with_traffic=False)


def act(state: Workspace, action: EndpointAction, **parts: Any) -> None:
    client(state, **parts).act(action)


def rejection(state: Workspace, action: EndpointAction, **parts: Any) -> tuple[ConditionReason, str]:
    """The reason and the message with which an action is rejected."""
    with pytest.raises(ExternalError) as raised:
        act(state, action, **parts)
    return raised.value.problem.reason, raised.value.problem.message


def bodies(state: Workspace) -> list[dict[str, Any]]:
    """What is in force, as Databricks shows it."""
    config = state.endpoints.held["support"].config
    return [
        {key: value for key, value in item.as_dict().items() if key != "state"}
        for item in (config.served_entities if config else None) or []
    ]


def test_no_endpoint(databricks: Workspace) -> None:
    assert read(databricks) == Endpoint()


def test_create_and_change(databricks: Workspace) -> None:
    databricks.endpoints.polls = None
    url = f"{databricks.uri}/serving-endpoints/support/invocations"
    act(databricks, ConfigureEndpoint(served(v3=100), create=True))
    creating = read(databricks)
    databricks.endpoints.finish("support")
    created = read(databricks)
    act(databricks, ConfigureEndpoint(served(v4=10, v3=90), create=False))
    changing = read(databricks)
    databricks.endpoints.finish("support")
    changed = read(databricks)
    first, second = creating.revision, changing.revision
    assert first != second
    assert [creating, created, changing, changed] == [
        Endpoint(exists=True, updating=True, pending=served(v3=100), revision=first, url=url),
        Endpoint(exists=True, ready=True, served=served(v3=100), revision=first, url=url),
        Endpoint(
            exists=True,
            ready=True,
            updating=True,
            served=served(v3=100),
            pending=served(v4=10, v3=90),
            revision=second,
            url=url,
        ),
        Endpoint(exists=True, ready=True, served=served(v4=10, v3=90), revision=second, url=url),
    ]
    assert databricks.writes() == [("POST", PATH), ("PUT", f"{PATH}/support/config")]


PLAIN = {"name": "version-3", "entity_name": MODEL, "entity_version": "3"}
ENTITIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {"workload_size": "Small", "workload_type": "CPU", "scale_to_zero_enabled": True}),
    "all that can be set": (
        {
            "workloadSize": "Large",
            "workloadType": "GPUMedium",
            "scaleToZero": False,
            "environment": {"A": "b", "KEY": "{{secrets/scope/key}}"},
        },
        {
            "workload_size": "Large",
            "workload_type": "GPU_MEDIUM",
            "scale_to_zero_enabled": False,
            "environment_vars": {"A": "b", "KEY": "{{secrets/scope/key}}"},
        },
    ),
    "concurrency": (
        {"concurrency": {"min": 4, "max": 32}, "workloadType": "GPUXLarge"},
        {
            "min_provisioned_concurrency": 4,
            "max_provisioned_concurrency": 32,
            "workload_type": "GPU_XLARGE",
            "scale_to_zero_enabled": True,
        },
    ),
    "provisioned throughput": (
        {"provisionedThroughput": {"modelUnits": 50, "burstScaling": True}},
        {"provisioned_model_units": 50, "burst_scaling_enabled": True},
    ),
}


@pytest.mark.parametrize(("parts", "fields"), ENTITIES.values(), ids=ENTITIES)
def test_entities(databricks: Workspace, parts: dict[str, Any], fields: dict[str, Any]) -> None:
    act(databricks, ConfigureEndpoint(served(v3=100), create=True), **parts)
    assert read(databricks, **parts).matches_spec
    assert bodies(databricks) == [PLAIN | fields]


KINDS = {
    "CPU": "CPU",
    "CPUMedium": "CPU_MEDIUM",
    "CPULarge": "CPU_LARGE",
    "GPUSmall": "GPU_SMALL",
    "GPUMedium": "GPU_MEDIUM",
    "GPULarge": "GPU_LARGE",
    "GPUXLarge": "GPU_XLARGE",
    "GPUXLarge8": "GPU_XLARGE_8",
    "MultiGPUMedium": "MULTIGPU_MEDIUM",
}


@pytest.mark.parametrize(("kind", "name"), KINDS.items())
def test_machines(databricks: Workspace, kind: str, name: str) -> None:
    act(databricks, ConfigureEndpoint(served(v3=100), create=True), workloadType=kind)
    assert read(databricks, workloadType=kind).matches_spec
    assert [entity["workload_type"] for entity in bodies(databricks)] == [name]


def test_the_machines_are_all_that_the_schema_and_databricks_have() -> None:
    (workload_types,) = (
        option for option in SCHEMA["properties"]["workloadType"]["anyOf"] if "enum" in option
    )
    assert workload_types["enum"] == [*KINDS]
    assert {*KINDS.values()} == {kind.value for kind in ServingModelWorkloadType}


def test_provisioned_throughput_has_its_own_paths(databricks: Workspace) -> None:
    reserved = {"provisionedThroughput": {"modelUnits": 50}}
    act(databricks, ConfigureEndpoint(served(v3=100), create=True), **reserved)
    assert read(databricks, **reserved).ready
    act(databricks, ConfigureEndpoint(served(v4=50, v3=50), create=False), **reserved)
    assert read(databricks, **reserved).served == served(v4=50, v3=50)
    assert databricks.writes() == [("POST", f"{PATH}/pt"), ("PUT", f"{PATH}/pt/support/config")]


OTHERWISE: dict[str, dict[str, Any]] = {
    "size": {"workloadSize": "Medium"},
    "concurrency": {"concurrency": {"min": 4, "max": 4}},
    "machine": {"workloadType": "GPUSmall"},
    "scale to zero": {"scaleToZero": False},
    "throughput": {"provisionedThroughput": {"modelUnits": 1}},
}


@pytest.mark.parametrize("parts", OTHERWISE.values(), ids=OTHERWISE)
def test_another_configuration_is_seen(databricks: Workspace, parts: dict[str, Any]) -> None:
    environment = {"environment": {"A": "b"}}
    act(databricks, ConfigureEndpoint(served(v3=100), create=True), **environment)
    assert read(databricks, **environment).matches_spec
    if "provisionedThroughput" not in parts:
        assert not read(databricks, **environment, **parts).matches_spec
    assert not read(databricks, environment={"A": "c"}).matches_spec
    assert not read(databricks).matches_spec


def test_what_databricks_does_not_say_does_not_differ(databricks: Workspace) -> None:
    act(databricks, ConfigureEndpoint(served(v3=100), create=True))
    read(databricks)
    config = databricks.endpoints.held["support"].config
    assert config
    assert config.served_entities
    config.served_entities[0].workload_size = None
    assert read(databricks, workloadSize="Medium").matches_spec


def test_a_change_that_fails(databricks: Workspace) -> None:
    databricks.endpoints.broken = {"4": "no machine of this kind"}
    act(databricks, ConfigureEndpoint(served(v3=100), create=True))
    read(databricks)
    act(databricks, ConfigureEndpoint(served(v4=100), create=False))
    failed = read(databricks)
    assert failed == Endpoint(
        exists=True,
        ready=True,
        failed=True,
        message="version 4: no machine of this kind",
        served=served(v3=100),
        pending=served(v4=100),
        revision=failed.revision,
        url=failed.url,
    )


def test_a_change_that_fails_without_a_word(databricks: Workspace) -> None:
    databricks.endpoints.broken = {"4": "no machine of this kind"}
    databricks.endpoints.keeps_failed = False
    act(databricks, ConfigureEndpoint(served(v4=100), create=True))
    assert read(databricks).message == "Databricks reports no reason: see the endpoint's events"


@pytest.mark.parametrize("answer", BUSY, ids=[f"{status} {code}" for status, code, _ in BUSY])
def test_another_change_under_way_is_no_error(databricks: Workspace, answer: tuple[int, str, str]) -> None:
    databricks.endpoints.polls, databricks.endpoints.busy = None, answer
    busy = (
        ConditionReason.ENDPOINT_BUSY,
        "another change of the serving endpoint support is in progress: waiting until it is complete",
    )
    act(databricks, ConfigureEndpoint(served(v3=100), create=True))
    assert rejection(databricks, ConfigureEndpoint(served(v3=100), create=True)) == busy
    assert rejection(databricks, ConfigureEndpoint(served(v4=100), create=False)) == busy


def test_a_version_that_recovers(databricks: Workspace) -> None:
    databricks.endpoints.recovering = {"3": "the node was lost"}
    act(databricks, ConfigureEndpoint(served(v3=100), create=True))
    read(databricks)
    recovering = read(databricks)
    databricks.endpoints.recover("support")
    answering = read(databricks)
    assert [
        (endpoint.ready, endpoint.updating, endpoint.message) for endpoint in (recovering, answering)
    ] == [
        (False, False, "version 3 is recovering: the node was lost"),
        (True, False, ""),
    ]


def test_what_databricks_refuses(databricks: Workspace) -> None:
    wrong = ConfigureEndpoint(served(v3=50, v4=10), create=True)
    assert rejection(databricks, wrong) == (
        ConditionReason.DATABRICKS_ERROR,
        f"Databricks at {databricks.uri} failed to change the serving endpoint support (INVALID_PARAMETER_VALUE, HTTP 400): "
        "see the log of the operator for the reason",
    )
    databricks.denied = {f"POST {PATH}"}
    assert rejection(databricks, wrong)[0] == ConditionReason.DATABRICKS_FORBIDDEN


def test_problems_are_told(databricks: Workspace) -> None:
    body = {"error_code": "REQUEST_LIMIT_EXCEEDED", "message": "Slow down"}
    databricks.faults = [Fault(429, body, path=PATH, headers={"Retry-After": "60"})]
    problem = Problem(
        ConditionReason.DATABRICKS_UNREACHABLE,
        f"Databricks at {databricks.uri} is too busy to read serving endpoints: REQUEST_LIMIT_EXCEEDED, HTTP 429",
    )
    with pytest.raises(ExternalError) as raised:
        read(databricks)
    assert raised.value.problem == problem


TABLE = {"inferenceTable": {"catalog": "main", "schema": "logs", "tablePrefix": "support"}}


def test_requests_are_logged(databricks: Workspace) -> None:
    act(databricks, ConfigureEndpoint(served(v3=100), create=True))
    assert read(databricks).logged_to is None
    act(databricks, LogRequests(), **TABLE)
    assert read(databricks).logged_to == InferenceTable.model_validate(TABLE["inferenceTable"])
    act(databricks, StopLogging())
    assert read(databricks).logged_to is None
    act(databricks, StopLogging())
    assert databricks.writes() == [("POST", PATH), *[("PUT", f"{PATH}/support/ai-gateway")] * 3]


def test_nothing_was_ever_logged(databricks: Workspace) -> None:
    act(databricks, ConfigureEndpoint(served(v3=100), create=True))
    act(databricks, StopLogging())
    assert databricks.writes() == [("POST", PATH)]


def test_another_table_before_the_first_was_disabled(
    databricks: Workspace, caplog: pytest.LogCaptureFixture
) -> None:
    act(databricks, ConfigureEndpoint(served(v3=100), create=True))
    act(databricks, LogRequests(), **TABLE)
    elsewhere = {"inferenceTable": {"catalog": "main", "schema": "other"}}
    reason, _ = rejection(databricks, LogRequests(), **elsewhere)
    assert (reason, caplog.records[-1].getMessage().rpartition(": ")[2]) == (
        ConditionReason.DATABRICKS_ERROR,
        "Disable the inference table before you change its catalog, schema or table name prefix.",
    )
    act(databricks, StopLogging())
    act(databricks, LogRequests(), **elsewhere)
    assert read(databricks).logged_to == InferenceTable.model_validate({"catalog": "main", "schema": "other"})


def test_logging_moves_the_revision(databricks: Workspace) -> None:
    act(databricks, ConfigureEndpoint(served(v3=100), create=True))
    before = read(databricks).revision
    act(databricks, LogRequests(), **TABLE)
    assert read(databricks).revision != before


def test_logging_keeps_limits_that_exist(databricks: Workspace) -> None:
    act(databricks, ConfigureEndpoint(served(v3=100), create=True))
    limits = {
        "rate_limits": [{"calls": 5, "key": "user", "renewal_period": "minute"}],
        "usage_tracking_config": {"enabled": True},
    }
    databricks.endpoints.held["support"].ai_gateway = AiGatewayConfig.from_dict(limits)
    act(databricks, LogRequests(), **TABLE)
    gateway = databricks.endpoints.held["support"].ai_gateway
    assert gateway
    table = {
        "catalog_name": "main",
        "schema_name": "logs",
        "table_name_prefix": "support",
        "enabled": True,
    }
    assert gateway.as_dict() == limits | {"inference_table_config": table}


def test_another_providers_model_has_no_name(databricks: Workspace) -> None:
    config = {
        "served_entities": [{"name": "outside", "external_model": _EXTERNAL}],
        "traffic_config": {"routes": [{"served_entity_name": "outside", "traffic_percentage": 100}]},
    }
    databricks.endpoints.create({"name": "support", "config": config})
    assert read(databricks).served == (ServedVersion("", "", 100),)


_EXTERNAL = {"name": "gpt", "provider": "openai", "task": "llm/v1/chat"}
