"""The policy of the endpoint, pass by pass, against the stand-in workspace through the real SDK."""

from __future__ import annotations

from typing import Any

import pytest

from fixtures.fake_databricks import Fault, Workspace
from fixtures.fake_databricks.endpoints import exported
from unit.operator.modelpromotion.decide.rollout import CANARY, MODEL, Rollout, changed, served, serving

Json = dict[str, Any]
PATH = "/api/2.0/serving-endpoints"
CHANGE = ("PUT", f"{PATH}/support/config")
CREATE = ("POST", PATH)
GATEWAY = ("PUT", f"{PATH}/support/ai-gateway")
TABLE = {"catalog": "main", "schema": "logs"}


def test_created_then_at_rest(databricks: Workspace) -> None:
    databricks.endpoints.polls = 2
    rollout = Rollout(databricks)
    rollout.promote("1")
    assert rollout.settle() == ["EndpointUpdating", "EndpointReady"]
    assert rollout.requeue is None
    assert rollout.message == "endpoint support serves version 1 with 100%"
    assert changed(rollout.status) == {
        "endpoint": "support",
        "state": "Ready",
        "version": "1",
        "routes": [{"version": "1", "percent": 100}],
    }
    rollout.steps(3)
    assert databricks.writes() == [CREATE]


def test_an_endpoint_that_is_right_is_never_written_to(databricks: Workspace) -> None:
    rollout = Rollout(databricks)
    rollout.by_hand(("1", 100))
    databricks.asked.clear()
    rollout.promote("1")
    assert rollout.settle() == ["EndpointReady"]
    assert databricks.writes() == []


def test_the_next_version_at_once(databricks: Workspace) -> None:
    rollout = served(databricks)
    rollout.promote("2")
    rollout.settle()
    assert rollout.routes == {"2": 100}
    assert databricks.writes() == [CHANGE]


@pytest.mark.parametrize("keeps_failed", [True, False])
def test_an_update_that_fails_takes_everything_back(databricks: Workspace, keeps_failed: bool) -> None:
    rollout = served(databricks)
    databricks.endpoints.broken = {"2": "no machine"}
    databricks.endpoints.keeps_failed = keeps_failed
    rollout.promote("2")
    why = (
        "version 2: no machine" if keeps_failed else "Databricks reports no reason: see the endpoint's events"
    )
    assert rollout.settle() == ["EndpointUpdating", "EndpointFailed"]
    assert rollout.message == (
        f"endpoint support cannot serve version 2 as specified: its deployment failed: {why}; the endpoint is restored to version 1 with "
        "100%, and alias champion moves to version 1"
    )
    rollout.withdraw()
    assert rollout.settle() == ["EndpointReady"]
    assert rollout.routes == {"1": 100}
    # What failed was never in force: there was nothing to write back.
    assert databricks.writes() == [CHANGE]


def test_a_later_step_that_fails_goes_back_to_what_was_saved(databricks: Workspace) -> None:
    rollout = served(databricks, serving=serving(canary=CANARY))
    rollout.promote("2")
    rollout.settle()
    rollout.wait(10)
    databricks.endpoints.polls = None
    rollout.steps(2)
    databricks.endpoints.fail("support", "no machine")
    databricks.endpoints.polls = 0
    assert rollout.settle()[-1] == "EndpointFailed"
    assert rollout.routes == {"1": 100}
    assert databricks.writes() == [CHANGE] * 3


def test_the_first_version_that_fails(databricks: Workspace) -> None:
    databricks.endpoints.broken = {"1": "no machine"}
    rollout = Rollout(databricks)
    rollout.promote("1")
    assert rollout.settle() == ["EndpointUpdating", "EndpointFailed"]
    assert rollout.message == (
        "endpoint support cannot serve version 1 as specified: its deployment failed: version 1: no machine; there "
        "are no routes to restore: correct spec.serving or point the alias at another version; the operator "
        "does not retry until the spec changes"
    )
    assert rollout.requeue is None
    assert rollout.status.withheld is None
    rollout.wait(600)
    assert rollout.settle() == ["EndpointFailed"]
    assert databricks.writes() == [CREATE]
    databricks.endpoints.broken = {}
    rollout.edit()
    rollout.settle()
    assert rollout.routes == {"1": 100}


def test_a_rollback_goes_at_once_and_is_not_withdrawn(databricks: Workspace) -> None:
    rollout = served(databricks, serving=serving(canary=CANARY))
    rollout.promote("2")
    for minutes in (0, 10, 20):
        rollout.wait(minutes)
        rollout.settle()
    rollout.edit(rollbackTo={"type": "Previous"})
    databricks.endpoints.broken = {"1": "no machine"}
    rollout.promote("1", "RolledBack")
    assert rollout.settle() == ["EndpointUpdating", "EndpointFailed"]
    assert rollout.status.withheld is None
    assert rollout.routes == {"2": 100}
    rollout.wait(600)
    writes = len(databricks.writes())
    assert rollout.settle() == ["EndpointFailed"]
    assert len(databricks.writes()) == writes
    databricks.endpoints.broken = {}
    rollout.edit()
    rollout.settle()
    assert rollout.routes == {"1": 100}


def test_another_version_during_an_update(databricks: Workspace) -> None:
    rollout = served(databricks)
    databricks.endpoints.polls = None
    rollout.promote("2")
    rollout.steps(3)
    rollout.promote("3")
    assert rollout.steps(2) == ["EndpointBusy"] * 2
    databricks.endpoints.finish("support")
    databricks.endpoints.polls = 0
    rollout.settle()
    assert rollout.routes == {"3": 100}
    assert databricks.writes() == [CHANGE] * 2


def test_an_update_by_another_client_delays_ours(databricks: Workspace) -> None:
    rollout = served(databricks)
    databricks.endpoints.polls = None
    rollout.by_hand(("1", 50), ("7", 50))
    rollout.promote("2")
    assert rollout.steps(3) == ["EndpointBusy"] * 3
    assert rollout.requeue == 5.0
    databricks.endpoints.finish("support")
    databricks.endpoints.polls = 0
    rollout.settle()
    assert rollout.routes == {"2": 100}


def test_an_update_by_another_client_that_fails_is_not_ours(databricks: Workspace) -> None:
    rollout = served(databricks)
    databricks.endpoints.polls = None
    rollout.by_hand(("7", 100))
    databricks.endpoints.fail("support", "no machine")
    databricks.endpoints.polls = 0
    assert rollout.settle() == ["EndpointReady"]
    rollout.promote("2")
    assert rollout.settle() == ["EndpointUpdating", "EndpointReady"]
    assert rollout.routes == {"2": 100}


def test_an_update_that_begins_under_our_hands(databricks: Workspace) -> None:
    rollout = served(databricks)
    rollout.promote("2")
    rollout.step()
    busy = {"error_code": "RESOURCE_CONFLICT", "message": "currently being updated"}
    databricks.faults = [Fault(409, busy, method="PUT", times=3)]
    assert rollout.step() == "EndpointBusy"
    # Asked again and refused again, the status stays as it is.
    status = rollout.status
    assert rollout.steps(2) == ["EndpointBusy"] * 2
    assert rollout.status == status
    rollout.step()
    assert rollout.settle() == ["EndpointReady"]
    assert rollout.refused == ["EndpointBusy"] * 3
    assert rollout.routes == {"2": 100}


def test_a_change_that_is_refused(databricks: Workspace) -> None:
    rollout = served(databricks)
    rollout.promote("2")
    databricks.denied = {f"PUT {PATH}"}
    assert rollout.steps(4) == ["EndpointUpdating"] + ["DatabricksForbidden"] * 3
    databricks.denied = set()
    rollout.step()
    assert rollout.settle() == ["EndpointReady"]
    assert rollout.routes == {"2": 100}


def test_logging_that_is_refused(databricks: Workspace) -> None:
    rollout = served(databricks)
    rollout.edit(serving=serving(inferenceTable=TABLE))
    databricks.denied = {f"PUT {PATH}/support/ai-gateway"}
    assert rollout.steps(4) == ["EndpointUpdating", *["DatabricksForbidden"] * 3]
    databricks.denied = set()
    rollout.step()
    assert rollout.settle() == ["EndpointReady"]


def test_changed_by_hand(databricks: Workspace) -> None:
    rollout = served(databricks)
    rollout.by_hand(("1", 50), ("7", 50))
    databricks.asked.clear()
    rollout.settle()
    assert rollout.routes == {"1": 100}
    rollout.by_hand(("1", 100), workloadSize="Large")
    rollout.settle()
    assert rollout.observe().matches_spec
    assert rollout.reason == "EndpointReady"


def test_deleted_by_hand(databricks: Workspace) -> None:
    rollout = served(databricks)
    databricks.endpoints.delete("support")
    assert rollout.settle() == ["EndpointUpdating", "EndpointReady"]
    assert databricks.writes() == [CREATE]


def test_another_size(databricks: Workspace) -> None:
    rollout = served(databricks)
    rollout.edit(serving=serving(workloadSize="Medium"))
    assert rollout.settle() == ["EndpointUpdating", "EndpointReady"]
    assert databricks.writes() == [CHANGE]
    assert rollout.observe().matches_spec


def test_another_size_that_fails_is_not_the_versions_fault(databricks: Workspace) -> None:
    rollout = served(databricks)
    rollout.promote("2")
    rollout.settle()
    databricks.endpoints.broken = {"2": "no such machine"}
    rollout.edit(serving=serving(workloadType="GPULarge"))
    assert rollout.settle() == ["EndpointUpdating", "EndpointFailed"]
    assert rollout.status.withheld is None
    assert "the endpoint stays as it is" in rollout.message
    assert databricks.writes() == [CHANGE] * 2


def test_what_databricks_words_otherwise_is_not_sent_again(databricks: Workspace) -> None:
    rollout = served(databricks)
    configuration = databricks.endpoints.held["support"].config
    assert configuration
    assert configuration.served_entities
    rollout.edit(serving=serving(workloadSize="Medium"))
    rollout.steps(2)
    databricks.endpoints.finish("support")
    config = databricks.endpoints.held["support"].config
    assert config
    assert config.served_entities
    config.served_entities[0].workload_size = "MEDIUM_4_16"
    assert not rollout.observe().matches_spec
    rollout.settle()
    rollout.steps(3)
    assert rollout.reason == "EndpointReady"
    assert databricks.writes() == [CHANGE]


def test_requests_are_logged(databricks: Workspace) -> None:
    rollout = Rollout(databricks, {"serving": serving(inferenceTable=TABLE)})
    rollout.promote("1")
    assert rollout.settle() == ["EndpointUpdating", "EndpointReady"]
    assert databricks.writes() == [CREATE, GATEWAY]


def logged_to(databricks: Workspace) -> str | None:
    """The schema that requests are logged to in truth."""
    gateway = databricks.endpoints.held["support"].ai_gateway
    table = gateway.inference_table_config if gateway else None
    return table.schema_name if table and table.enabled else None


def test_no_more_logging_once_the_spec_says_so(databricks: Workspace) -> None:
    rollout = served(databricks, serving=serving(inferenceTable=TABLE))
    assert logged_to(databricks) == "logs"
    rollout.edit(serving=serving())
    assert rollout.settle() == ["EndpointUpdating", "EndpointReady"]
    assert (logged_to(databricks), databricks.writes()) == (None, [GATEWAY])


def test_another_table(databricks: Workspace) -> None:
    rollout = served(databricks, serving=serving(inferenceTable=TABLE))
    rollout.edit(serving=serving(inferenceTable=TABLE | {"schema": "other"}))
    assert rollout.settle() == ["EndpointUpdating", "EndpointReady"]
    assert (logged_to(databricks), databricks.writes()) == ("other", [GATEWAY] * 2)


def test_the_logging_of_another_client_is_left_alone(databricks: Workspace) -> None:
    rollout = served(databricks)
    table = {"catalog_name": "main", "schema_name": "audit", "enabled": True}
    databricks.endpoints.put_gateway("support", {"inference_table_config": table})
    assert rollout.settle() == ["EndpointReady"]
    assert (logged_to(databricks), databricks.writes()) == ("audit", [])


def test_logging_ends_in_the_middle_of_a_rollout(databricks: Workspace) -> None:
    databricks.endpoints.polls = None
    rollout = Rollout(databricks, {"serving": serving(inferenceTable=TABLE)})
    rollout.promote("1")
    rollout.steps(2)
    databricks.endpoints.finish("support")
    rollout.settle()
    rollout.promote("2")
    rollout.steps(2)
    rollout.edit(serving=serving())
    rollout.step()
    assert (logged_to(databricks), rollout.updating()) == (None, True)
    databricks.endpoints.finish("support")
    rollout.settle()
    assert (rollout.routes, rollout.reason) == ({"2": 100}, "EndpointReady")


ERRORS = {"name": "few-errors", "type": "Metric", "metric": {"name": "error_rate", "max": 0.01}}


def test_gates_judge_the_traffic_of_the_new_version(databricks: Workspace) -> None:
    rollout = served(databricks, serving=serving(canary=CANARY | {"gates": [ERRORS]}))
    rollout.promote("2")
    rollout.settle()
    assert (rollout.routes, rollout.reason) == ({"2": 10, "1": 90}, "CanaryInconclusive")
    databricks.endpoints.metrics["support"] = exported("support", {"1": (900, 0, 90), "2": (100, 0, 1)})
    rollout.wait(10)
    rollout.settle()
    assert (rollout.routes, rollout.reason) == ({"2": 50, "1": 50}, "Canary")
    databricks.endpoints.metrics["support"] = exported("support", {"1": (500, 0, 0), "2": (500, 4, 2)})
    rollout.settle()
    assert (rollout.routes, rollout.reason) == ({"1": 100}, "CanaryFailed")
    assert "error_rate is 0.012, which does not meet <= 0.01" in rollout.message


QUICK = {"name": "quick", "type": "Metric", "metric": {"name": "latency_ms", "max": 100}}


def test_a_gate_of_the_latency_judges_what_the_endpoint_exports(databricks: Workspace) -> None:
    rollout = served(databricks, serving=serving(canary=CANARY | {"gates": [QUICK]}))
    counts = {"1": (900, 0, 0), "2": (100, 0, 0)}
    databricks.endpoints.metrics["support"] = exported("support", counts)
    rollout.promote("2")
    rollout.settle()
    assert (rollout.routes, rollout.reason) == ({"2": 10, "1": 90}, "CanaryInconclusive")
    assert "version 2 has no latency_ms" in rollout.message
    databricks.endpoints.metrics["support"] = exported("support", counts, {"1": 300, "2": 80.5})
    rollout.wait(10)
    rollout.settle()
    assert (rollout.routes, rollout.reason) == ({"2": 50, "1": 50}, "Canary")
    databricks.endpoints.metrics["support"] = exported("support", counts, {"1": 40, "2": 120})
    rollout.settle()
    assert (rollout.routes, rollout.reason) == ({"1": 100}, "CanaryFailed")
    assert "latency_ms is 120, which does not meet <= 100" in rollout.message


def test_what_databricks_shows_otherwise_is_not_configured_again_for_the_logging(
    databricks: Workspace,
) -> None:
    rollout = served(databricks, serving=serving(inferenceTable=TABLE))
    config = databricks.endpoints.held["support"].config
    assert config
    assert config.served_entities
    config.served_entities[0].workload_size = "Small (4 concurrent)"
    rollout.edit(serving=serving())
    rollout.settle()
    assert databricks.writes() == [GATEWAY]


def test_provisioned_throughput(databricks: Workspace) -> None:
    rollout = Rollout(
        databricks, {"serving": serving(provisionedThroughput={"modelUnits": 50}, canary=CANARY)}
    )
    rollout.promote("1")
    rollout.settle()
    rollout.promote("2")
    rollout.settle()
    assert rollout.routes == {"2": 10, "1": 90}
    assert databricks.writes() == [("POST", f"{PATH}/pt"), ("PUT", f"{PATH}/pt/support/config")]


CRASHES = {"after the status was written": 1, "in the middle": 2, "again and again": 3}


@pytest.mark.parametrize("crashes", CRASHES.values(), ids=CRASHES)
def test_the_operator_ends_before_it_asks(databricks: Workspace, crashes: int) -> None:
    rollout = served(databricks, serving=serving(canary=CANARY))
    databricks.endpoints.broken = {"7": "no machine"}
    rollout.by_hand(("7", 100))
    rollout.observe()
    rollout.promote("2")
    for _ in range(crashes):
        rollout.step(crash=True)
    # An old failure is not taken for ours.
    rollout.settle()
    assert rollout.routes == {"2": 10, "1": 90}
    assert rollout.status.withheld is None


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault(429, {"error_code": "REQUEST_LIMIT_EXCEEDED", "message": "slow"}), "DatabricksUnreachable"),
        (Fault(403, {"error_code": "PERMISSION_DENIED", "message": "no"}), "DatabricksForbidden"),
        (Fault(500, {"error_code": "INTERNAL_ERROR", "message": "oops"}), "DatabricksError"),
    ],
    ids=["too many requests", "no permission", "it broke"],
)
def test_databricks_does_not_answer(databricks: Workspace, fault: Fault, reason: str) -> None:
    rollout = served(databricks, serving=serving(canary=CANARY))
    rollout.promote("2")
    rollout.settle()
    before = changed(rollout.status)
    fault.path = PATH
    databricks.faults = [fault]
    rollout.wait(30)
    assert rollout.steps(2) == [reason] * 2
    assert rollout.requeue == 5.0
    assert changed(rollout.status) == before
    databricks.faults = []
    rollout.settle()
    assert rollout.routes == {"2": 50, "1": 50}


def test_an_endpoint_of_another_model(databricks: Workspace) -> None:
    second_rollout = Rollout(databricks, {"model": "main.llm.other"})
    second_rollout.promote("1")
    second_rollout.by_hand(("1", 100))
    databricks.asked.clear()
    entities = databricks.endpoints.held["support"]
    assert entities.pending_config
    assert entities.pending_config.served_entities
    entities.pending_config.served_entities[0].entity_name = "main.llm.other"
    rollout = Rollout(databricks)
    rollout.promote("1")
    assert rollout.settle() == ["EndpointFailed"]
    assert rollout.message == (
        "endpoint support serves the model main.llm.other, so the operator does not change the endpoint: set spec.serving.endpoint to "
        "another name, or delete the endpoint"
    )
    assert databricks.writes() == []


def test_another_endpoint(databricks: Workspace) -> None:
    rollout = served(databricks)
    rollout.edit(serving=serving() | {"endpoint": "second"})
    rollout.settle()
    assert rollout.status.serving
    assert rollout.status.serving.endpoint == "second"
    assert databricks.endpoints.routes("second") == {"1": 100}
    assert MODEL in str(databricks.endpoints.held["second"].as_dict())
