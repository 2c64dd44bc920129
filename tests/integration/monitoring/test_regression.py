"""A number of a real Prometheus gets out of bounds after a move: the operator moves the alias back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from fixtures.operator_processes.registry import GATES, Registry
from fixtures.operator_processes.world import World
from integration.monitoring.prometheus import Prometheus
from support.http_server import Answer, Request, serving
from support.waiting import wait_for

FOR_SECONDS = 2
# From the breach to the alias, besides the time for which the breach must last.
LIMIT_SECONDS = 60


class Service:
    """A service that exports the share of its errors.

    Attributes:
        error_rate: the share.
    """

    def __init__(self) -> None:
        self.error_rate = 0.01

    def respond(self, request: Request) -> Answer:
        """The metrics in the text format of Prometheus."""
        text = f"error_rate {self.error_rate}\n"
        return Answer(200, text, {"Content-Type": "text/plain; version=0.0.4"})


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def prometheus(service: Service, tmp_path: Path) -> Iterator[Prometheus]:
    with serving(service.respond) as url:
        server = Prometheus(tmp_path, urlsplit(url).port or 0, tmp_path / "no-rules.yaml")
        server.start()
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture
def registry(world: World) -> Registry:
    return Registry(world.api, world.mlflow, world.namespace, f"model-{world.namespace}")


def wait_reason(registry: Registry, reason: str) -> str:
    """Wait until the condition Regressed has a reason; its message."""

    def read() -> str | None:
        condition = registry.condition("Regressed")
        return str(condition["message"]) if condition.get("reason") == reason else None

    return wait_for(f"Regressed has the reason {reason}", read, instead=registry.status)


def promote(registry: Registry, prometheus: Prometheus) -> tuple[str, str]:
    """Move the alias from a version to another one, which is watched; both."""
    first, second = registry.version(2.0), registry.version(1.9)
    registry.point("staging", first)
    registry.apply(
        gates=GATES,
        onRegression={
            "action": "Rollback",
            "prometheus": {"url": prometheus.url, "query": "error_rate", "name": "error-rate"},
            "max": 0.05,
            "forSeconds": FOR_SECONDS,
            "watchSeconds": 3600,
        },
    )
    registry.wait("Promoted", first)
    registry.point("staging", second)
    registry.wait("Promoted", second)
    return first, second


def test_a_breach_moves_the_alias_back_and_marks_the_version(
    registry: Registry, service: Service, prometheus: Prometheus, world: World
) -> None:
    first, second = promote(registry, prometheus)
    wait_reason(registry, "Watching")
    breach = time.monotonic()
    service.error_rate = 0.25
    wait_for("the alias is back", lambda: registry.alias("champion") == first, LIMIT_SECONDS + FOR_SECONDS)
    assert time.monotonic() - breach < LIMIT_SECONDS + FOR_SECONDS
    status = registry.wait("Refused", first)
    assert registry.moves() == [
        ("Promoted", None, first),
        ("Promoted", first, second),
        ("Regressed", second, first),
    ]
    message = (
        f"version {second} regressed: error-rate is 0.25, which is not <= 0.05, for {FOR_SECONDS} s; alias champion moves back to version "
        f"{first}"
    )
    assert (status["history"][0]["message"], wait_reason(registry, "Regressed")) == (message, message)
    bad = {item["version"]: item.get("bad") for item in status["registry"]["versions"]}
    assert bad[second] == "Regressed"
    assert message in {item["message"] for item in world.events("Regressed")}
    # The number is good again, and another version was promoted in between: this one does not return by itself.
    service.error_rate = 0.01
    third = registry.version(1.8)
    registry.point("staging", third)
    registry.wait("Promoted", third)
    registry.point("staging", second)
    registry.wait("Refused", third)


# Queries that have no number, with the reason and a part of the message.
NO_NUMBERS: dict[str, tuple[str, str]] = {
    "absent_metric": ("MetricInconclusive", "no series matches the query"),
    'label_replace(up, "kind", "up", "", "") or error_rate': ("MetricInconclusive", "has 2 values"),
    "0 * error_rate / 0": ("MetricInconclusive", "is NaN"),
    "error_rate[1m]": ("MetricInconclusive", "is no number but a range"),
    "sum(": ("PrometheusError", "(HTTP 400)"),
}


def wait_unknown(registry: Registry, reason: str, part: str) -> None:
    """Wait until the condition Regressed is Unknown for a reason, with this part of its message."""

    def is_unknown() -> bool:
        condition = registry.condition("Regressed")
        return (condition["status"], condition["reason"]) == ("Unknown", reason) and part in condition[
            "message"
        ]

    wait_for(f"{reason}: {part}", is_unknown, instead=registry.status)


def test_a_number_that_cannot_be_read_moves_nothing(registry: Registry, prometheus: Prometheus) -> None:
    _, second = promote(registry, prometheus)
    wait_reason(registry, "Watching")
    for query, (reason, part) in NO_NUMBERS.items():
        registry.patch(onRegression={"prometheus": {"query": query}})
        wait_unknown(registry, reason, part)
    prometheus.stop()
    wait_unknown(registry, "PrometheusUnreachable", "the connection failed")
    assert registry.alias("champion") == second
    assert [reason for reason, *_ in registry.moves()] == ["Promoted", "Promoted"]
    registry.patch(onRegression={"prometheus": {"query": "error_rate"}})
    prometheus.start()
    wait_reason(registry, "Watching")
