"""The canary, pass by pass, against the stand-in workspace through the real SDK."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from finetune_crds.serving import Route
from finetune_operator.registry.base import ModelVersion
from fixtures.fake_databricks import Workspace
from unit.operator.modelpromotion.decide.rollout import CANARY, Rollout, changed, served, serving

Json = dict[str, Any]
PATH = "/api/2.0/serving-endpoints"
CHANGE = ("PUT", f"{PATH}/support/config")


def test_a_canary_goes_forward_on_its_own(databricks: Workspace) -> None:
    rollout = served(databricks, serving=serving(canary=CANARY))
    rollout.promote("2")
    steps_seen: list[tuple[float, str, dict[str, int]]] = []
    for minutes in (0, 9, 1, 19, 1, 60):
        rollout.wait(minutes)
        rollout.settle()
        steps_seen.append((minutes, rollout.message, dict(rollout.routes)))
    first = (
        "version 2 gets 10% of the traffic, step 1 of 2; the next step is due at 2026-08-01T12:10:00Z",
        {"2": 10, "1": 90},
    )
    second = (
        "version 2 gets 50% of the traffic, step 2 of 2; the next step is due at 2026-08-01T12:30:00Z",
        {"2": 50, "1": 50},
    )
    third = ("endpoint support serves version 2 with 100%", {"2": 100})
    assert steps_seen == [(0, *first), (9, *first), (1, *second), (19, *second), (1, *third), (60, *third)]
    assert databricks.writes() == [CHANGE] * 3


def test_what_a_canary_shows(databricks: Workspace) -> None:
    rollout = served(databricks, serving=serving(canary=CANARY))
    rollout.promote("2")
    rollout.settle()
    assert changed(rollout.status) == {
        "endpoint": "support",
        "state": "Ready",
        "version": "2",
        "routes": [{"version": "1", "percent": 90}, {"version": "2", "percent": 10}],
        "step": 1,
        "steps": 2,
        "stepStartTime": "2026-08-01T12:00:00Z",
        "nextStepTime": "2026-08-01T12:10:00Z",
        "saved": [{"version": "1", "percent": 100}],
    }
    assert rollout.requeue == 5.0


def test_a_step_lasts_from_when_it_is_in_force(databricks: Workspace) -> None:
    rollout = served(databricks, serving=serving(canary=CANARY))
    databricks.endpoints.polls = None
    rollout.promote("2")
    rollout.steps(3)
    rollout.wait(30)
    assert rollout.steps(2) == ["EndpointUpdating"] * 2
    databricks.endpoints.finish("support")
    assert rollout.step() == "Canary"
    assert rollout.status.serving
    assert rollout.status.serving.next_step_time == datetime(2026, 8, 1, 12, 40, tzinfo=UTC)


def test_the_first_version_has_no_canary(databricks: Workspace) -> None:
    rollout = served(databricks, serving=serving(canary=CANARY))
    assert rollout.routes == {"1": 100}


def test_a_gate_that_fails_takes_everything_back(databricks: Workspace) -> None:
    rollout = served(databricks, serving=serving(canary=CANARY))
    rollout.promote("2")
    rollout.settle()
    rollout.judged("2", latency=250.0)
    assert rollout.step() == "CanaryFailed"
    assert rollout.message == (
        f"endpoint support cannot serve version 2 as specified: a canary gate failed: latency: {gate_said(rollout)}; the endpoint is "
        "restored to version 1 with 100%, and alias champion moves to version 1"
    )
    assert rollout.requeue == 0
    assert rollout.status.withheld
    assert rollout.status.withheld.version == "2"
    rollout.steps(4)
    assert rollout.routes == {"1": 100}
    assert rollout.reason == "CanaryFailed"
    rollout.withdraw()
    assert rollout.settle() == ["EndpointReady"]
    assert databricks.writes() == [CHANGE] * 2
    assert rollout.status.serving
    assert rollout.status.serving.failure is None


def gate_said(rollout: Rollout) -> str:
    """The verdict's own words."""
    return rollout.message.split("failed: latency: ")[1].split("; the endpoint is restored")[0]


def test_a_gate_that_fails_before_the_endpoint_was_touched(databricks: Workspace) -> None:
    rollout = served(databricks, serving=serving(canary=CANARY))
    rollout.judged("2", latency=250.0)
    rollout.promote("2")
    assert rollout.steps(3) == ["CanaryFailed"] * 3
    rollout.withdraw()
    assert rollout.settle() == ["EndpointReady"]
    assert databricks.writes() == []


def test_a_gate_that_cannot_be_judged_holds_the_step(databricks: Workspace) -> None:
    rollout = served(databricks, serving=serving(canary=CANARY))
    rollout.promote("2")
    rollout.judged("2")
    rollout.settle()
    rollout.wait(60)
    assert rollout.settle() == ["CanaryInconclusive"]
    assert rollout.requeue == 5.0
    assert rollout.message.startswith(
        "version 2 gets 10% of the traffic, step 1 of 2; the next step waits until this one can be judged: latency: "
    )
    rollout.judged("2", latency=50.0)
    rollout.settle()
    assert rollout.routes == {"2": 50, "1": 50}


def test_a_version_that_is_gone_holds_the_step(databricks: Workspace) -> None:
    rollout = served(databricks, serving=serving(canary=CANARY))
    rollout.promote("2")
    rollout.versions["2"] = None
    rollout.settle()
    assert rollout.message.endswith("until this one can be judged: the registry has no version 2")


def test_a_rollback_during_a_canary(databricks: Workspace) -> None:
    rollout = served(databricks, serving=serving(canary=CANARY))
    rollout.promote("2")
    rollout.settle()
    rollout.edit(rollbackTo={"type": "Previous"})
    rollout.promote("1", "RolledBack")
    assert rollout.settle() == ["EndpointUpdating", "EndpointReady"]
    assert rollout.routes == {"1": 100}


def test_another_version_during_a_canary(databricks: Workspace) -> None:
    rollout = served(databricks, serving=serving(canary=CANARY))
    rollout.promote("2")
    rollout.settle()
    rollout.promote("3")
    rollout.settle()
    assert rollout.routes == {"3": 10, "1": 90}
    assert rollout.status.serving
    assert rollout.status.serving.saved == [Route(version="1", percent=100)]
    rollout.judged("3", latency=250.0)
    rollout.settle()
    assert rollout.routes == {"1": 100}


def test_what_is_put_back_has_no_canary(databricks: Workspace) -> None:
    rollout = served(databricks, serving=serving(canary=CANARY))
    rollout.promote("2", "Repaired")
    assert rollout.settle() == ["EndpointUpdating", "EndpointReady"]
    assert rollout.routes == {"2": 100}


def test_a_canary_taken_out_of_the_spec(databricks: Workspace) -> None:
    rollout = served(databricks, serving=serving(canary=CANARY))
    rollout.promote("2")
    rollout.settle()
    rollout.edit(serving=serving())
    rollout.settle()
    assert rollout.routes == {"2": 100}


SLOWER: dict[str, tuple[list[Json], Json, Json, str]] = {
    "fewer steps, and a smaller share": (
        [{"percent": 5, "durationSeconds": 36000}],
        {"2": 5, "1": 95},
        {"step": 1, "steps": 1, "stepStartTime": "2026-08-01T12:15:00Z"},
        "2026-08-01T22:15:00Z",
    ),
    "fewer steps": (
        [{"percent": 10, "durationSeconds": 600}],
        {"2": 10, "1": 90},
        {"step": 1, "steps": 1, "stepStartTime": "2026-08-01T12:15:00Z"},
        "2026-08-01T12:25:00Z",
    ),
    "a smaller share": (
        [{"percent": 10, "durationSeconds": 600}, {"percent": 20, "durationSeconds": 1200}],
        {"2": 20, "1": 80},
        {"step": 2, "steps": 2, "stepStartTime": "2026-08-01T12:15:00Z"},
        "2026-08-01T12:35:00Z",
    ),
    "more time": (
        [{"percent": 10, "durationSeconds": 600}, {"percent": 50, "durationSeconds": 36000}],
        {"2": 50, "1": 50},
        {"step": 2, "steps": 2, "stepStartTime": "2026-08-01T12:10:00Z"},
        "2026-08-01T22:10:00Z",
    ),
    "less time": (
        [{"percent": 10, "durationSeconds": 600}, {"percent": 50, "durationSeconds": 360}],
        {"2": 50, "1": 50},
        {"step": 2, "steps": 2, "stepStartTime": "2026-08-01T12:10:00Z"},
        "2026-08-01T12:16:00Z",
    ),
    "one more step": (
        [
            {"percent": 10, "durationSeconds": 600},
            {"percent": 50, "durationSeconds": 1200},
            {"percent": 75, "durationSeconds": 300},
        ],
        {"2": 50, "1": 50},
        {"step": 2, "steps": 3, "stepStartTime": "2026-08-01T12:10:00Z"},
        "2026-08-01T12:30:00Z",
    ),
}


@pytest.mark.parametrize(("steps", "routes", "step", "due"), SLOWER.values(), ids=SLOWER)
def test_other_steps_during_a_canary(
    databricks: Workspace, steps: list[Json], routes: Json, step: Json, due: str
) -> None:
    rollout = served(databricks, serving=serving(canary=CANARY))
    rollout.promote("2")
    for minutes in (0, 10, 5):
        rollout.wait(minutes)
        rollout.settle()
    rollout.edit(serving=serving(canary={"steps": steps}))
    rollout.settle()
    steps_seen = changed(rollout.status)
    assert (rollout.routes, {name: steps_seen[name] for name in step}, steps_seen["nextStepTime"]) == (
        routes,
        step,
        due,
    )
    assert rollout.message.endswith(f"the next step is due at {due}")


def test_steps_without_time(databricks: Workspace) -> None:
    steps = {"steps": [{"percent": 10, "durationSeconds": 0}, {"percent": 50, "durationSeconds": 0}]}
    rollout = served(databricks, serving=serving(canary=steps))
    rollout.promote("2")
    rollout.settle()
    assert rollout.routes == {"2": 100}
    assert databricks.writes() == [CHANGE] * 3


def test_a_gate_that_compares_with_the_previous_version(databricks: Workspace) -> None:
    gate = {
        "name": "better",
        "type": "Comparison",
        "comparison": {"metric": "loss", "goal": "Minimize", "notWorseThan": {"absolute": 0.1}},
    }
    steps = {"steps": [{"percent": 10, "durationSeconds": 600}], "gates": [gate]}
    rollout = served(databricks, serving=serving(canary=steps))
    rollout.versions["1"] = ModelVersion("1", metrics={"loss": 1.0}, evaluated_on="d")
    rollout.versions["2"] = ModelVersion("2", metrics={"loss": 1.05}, evaluated_on="d")
    rollout.promote("2")
    assert rollout.settle()[-1] == "Canary"
    rollout.versions["2"] = ModelVersion("2", metrics={"loss": 1.5}, evaluated_on="d")
    assert rollout.settle()[-1] == "CanaryFailed"
