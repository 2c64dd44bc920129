"""The alias moves once the canary of its version is over: whoever loads the alias has no version that is still on trial."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_operator.serving.model import ConfigureEndpoint, ServedVersion
from fixtures.fake_databricks import Workspace
from fixtures.operator_in_memory.serving import ALIASES, GATE, MODEL, PATH, STEPS, Databricks

CANARY = {"steps": STEPS, "gates": [GATE]}
REFUSING_GATE = {"name": "no-errors", "type": "Metric", "metric": {"name": "error_rate", "max": 0.0}}


async def test_the_alias_moves_after_the_last_step(databricks: Workspace) -> None:
    simulation = Databricks(databricks, canary=CANARY, alias_moves=None)
    await simulation.stage(1)
    assert simulation.now == ("Promoted", {"staging": 1, "champion": 1}, {"1": 100})
    await simulation.stage(2)
    before = {"staging": 2, "champion": 1}
    assert simulation.now == ("Promoting", before, {"2": 10, "1": 90})
    assert simulation.says("Promoted") == (
        "Canary",
        "version 2 meets every requirement; alias champion moves to it after the canary at endpoint support",
    )
    simulation.restart()
    await simulation.later(10)
    assert simulation.now == ("Promoting", before, {"2": 50, "1": 50})
    await simulation.later(11)
    assert simulation.now == ("Promoted", {"staging": 2, "champion": 2}, {"2": 100})
    assert simulation.moves() == [("Promoted", None, "1"), ("Promoted", "1", "2")]
    assert simulation.configured() == 4
    writes = simulation.writes.count
    await simulation.later(60)
    assert (simulation.configured(), simulation.writes.count) == (4, writes)


async def test_a_canary_that_fails_moves_no_alias(databricks: Workspace) -> None:
    simulation = Databricks(databricks, canary=CANARY, alias_moves=None)
    await simulation.stage(1)
    await simulation.stage(2)
    databricks.add_version(MODEL, 2, {"error_rate": 0.2})
    for _ in range(3):
        await simulation.later(1)
        assert simulation.now == ("Refused", {"staging": 2, "champion": 1}, {"1": 100})
    assert simulation.moves() == [("Promoted", None, "1")]
    reason, message = simulation.says("Promoted") or ("", "")
    assert reason == "Withdrawn"
    assert message.startswith("endpoint support cannot serve version 2 as specified: a canary gate failed: ")
    assert message.endswith(
        "the endpoint is restored to version 1 with 100%, and alias champion stays at version 1"
    )
    assert simulation.says("Served") == ("EndpointReady", "endpoint support serves version 1 with 100%")
    # Another version gets its own canary, and the one that failed is not tried again after it.
    await simulation.stage(3)
    assert simulation.now == ("Promoting", {"staging": 3, "champion": 1}, {"3": 10, "1": 90})
    await simulation.stage(2)
    assert simulation.now == ("Refused", {"staging": 2, "champion": 1}, {"1": 100})


async def test_a_version_that_cannot_be_deployed_never_has_the_alias(databricks: Workspace) -> None:
    simulation = Databricks(databricks, canary=CANARY, alias_moves=None)
    await simulation.stage(1)
    databricks.endpoints.broken = {"2": "no machine"}
    await simulation.stage(2)
    assert simulation.now == ("Refused", {"staging": 2, "champion": 1}, {"1": 100})
    assert simulation.moves() == [("Promoted", None, "1")]


async def test_another_candidate_takes_the_place_of_the_one_in_the_canary(databricks: Workspace) -> None:
    simulation = Databricks(databricks, canary=CANARY, alias_moves=None)
    await simulation.stage(1)
    await simulation.stage(2)
    await simulation.stage(3)
    assert simulation.now == ("Promoting", {"staging": 3, "champion": 1}, {"3": 10, "1": 90})
    simulation.edit(approval={})
    await simulation.settle()
    assert simulation.now == ("AwaitingApproval", {"staging": 3, "champion": 1}, {"1": 100})


async def test_a_failed_canary_goes_back_also_while_the_alias_has_drifted(databricks: Workspace) -> None:
    simulation = Databricks(databricks, canary=CANARY, alias_moves=None)
    simulation.edit(onDrift="Warn")
    await simulation.stage(1)
    await simulation.stage(2)
    databricks.set_alias(MODEL, "champion", 3)
    await simulation.later(1)
    assert simulation.now == ("Blocked", {"staging": 2, "champion": 3}, {"2": 10, "1": 90})
    databricks.add_version(MODEL, 2, {"error_rate": 0.2})
    await simulation.later(1)
    assert simulation.now == ("Blocked", {"staging": 2, "champion": 3}, {"1": 100})


async def test_the_first_alias_waits_for_a_canary_beside_the_version_that_is_served(
    databricks: Workspace,
) -> None:
    simulation = Databricks(databricks, canary=CANARY, alias_moves=None)
    client = await simulation.open_endpoint()
    client.act(ConfigureEndpoint((ServedVersion(MODEL, "1", 100),), create=True))
    await simulation.stage(2)
    assert simulation.now == ("Promoting", {"staging": 2}, {"2": 10, "1": 90})
    databricks.add_version(MODEL, 2, {"error_rate": 0.2})
    for _ in range(3):
        await simulation.later(1)
        assert simulation.now == ("Refused", {"staging": 2}, {"1": 100})
    assert simulation.moves() == []
    await simulation.stage(3)
    await simulation.later(10)
    await simulation.later(11)
    assert simulation.now == ("Promoted", {"staging": 3, "champion": 3}, {"3": 100})


async def test_the_alias_waits_while_the_endpoint_cannot_be_read(databricks: Workspace) -> None:
    simulation = Databricks(databricks, canary=CANARY, alias_moves=None)
    await simulation.stage(1)
    databricks.denied = {f"GET {PATH}"}
    databricks.set_alias(MODEL, "staging", 2)
    await simulation.look(minutes=1)
    assert (simulation.status().phase, databricks.models[MODEL].aliases["champion"]) == ("Promoting", 1)
    databricks.denied = set()
    for _ in STEPS:
        await simulation.later(30)
    await simulation.later(30)
    assert simulation.now == ("Promoted", {"staging": 2, "champion": 2}, {"2": 100})


async def test_a_rollback_does_not_wait_for_a_canary(databricks: Workspace) -> None:
    simulation = Databricks(databricks, canary=CANARY, alias_moves=None)
    await simulation.stage(1)
    await simulation.stage(2)
    await simulation.later(10)
    await simulation.later(11)
    await simulation.stage(3)
    simulation.edit(rollbackTo={"type": "Version", "version": "1"})
    await simulation.settle()
    assert simulation.now == ("Promoted", {"staging": 3, "champion": 1}, {"1": 100})


async def test_a_move_that_is_refused_after_the_canary_is_tried_again(databricks: Workspace) -> None:
    simulation = Databricks(databricks, canary=CANARY, alias_moves=None)
    await simulation.stage(1)
    await simulation.stage(2)
    databricks.denied = {f"PUT {ALIASES}"}
    await simulation.look(minutes=30)
    assert (simulation.status().phase, databricks.models[MODEL].aliases["champion"]) == ("Promoting", 1)
    assert databricks.endpoints.routes("support") == {"2": 100}
    databricks.denied = set()
    await simulation.later(30)
    assert simulation.now == ("Promoted", {"staging": 2, "champion": 2}, {"2": 100})


async def open_trial(databricks: Workspace) -> Databricks:
    """A promotion whose alias points at no version yet, while version 2 is on trial beside version 1."""
    simulation = Databricks(databricks, canary=CANARY, alias_moves=None)
    client = await simulation.open_endpoint()
    client.act(ConfigureEndpoint((ServedVersion(MODEL, "1", 100),), create=True))
    await simulation.stage(2)
    assert simulation.now == ("Promoting", {"staging": 2}, {"2": 10, "1": 90})
    return simulation


@pytest.mark.parametrize(
    ("edit", "phase"),
    [
        ({"approval": {}}, "AwaitingApproval"),
        ({"gates": [REFUSING_GATE]}, "Refused"),
        (None, "Pending"),
    ],
)
@pytest.mark.parametrize("minutes", [0, 10])
async def test_a_trial_that_ends_without_an_alias_restores_the_endpoint(
    databricks: Workspace, edit: dict[str, Any] | None, phase: str, minutes: int
) -> None:
    simulation = await open_trial(databricks)
    await simulation.later(minutes)
    if edit is None:
        del databricks.models[MODEL].aliases["staging"]
    else:
        simulation.edit(**edit)
    await simulation.settle()
    staging = {"staging": 2} if edit else {}
    assert simulation.now == (phase, staging, {"1": 100})
    assert simulation.says("Served") == (
        "WaitingForVersion",
        "champion does not point to a version yet: the endpoint has nothing to serve",
    )
    serving = simulation.status().serving
    assert serving
    assert (serving.version, serving.step, serving.saved, serving.change) == (None, None, None, None)
    configured = simulation.configured()
    await simulation.later(60)
    assert (simulation.now, simulation.configured()) == ((phase, staging, {"1": 100}), configured)
    # The same candidate starts its canary again.
    simulation.edit(approval=None, gates=None)
    await simulation.stage(2)
    assert simulation.now == ("Promoting", {"staging": 2}, {"2": 10, "1": 90})


async def test_a_restoration_that_fails_is_reported(
    databricks: Workspace,
) -> None:
    simulation = await open_trial(databricks)
    databricks.endpoints.broken = {"1": "no machine"}
    simulation.edit(approval={})
    await simulation.later(1)
    assert simulation.says("Served") == (
        "EndpointFailed",
        "endpoint support cannot be restored to version 1 with 100% after a canary that ended: version 1: no machine",
    )
    assert simulation.status().phase == "AwaitingApproval"


async def complete_trial(databricks: Workspace) -> Databricks:
    """A promotion at version 1 (before: 3), whose version 2 completed its canary, and whose alias cannot be moved."""
    simulation = Databricks(databricks, canary=CANARY, alias_moves=None)
    await simulation.stage(3)
    await simulation.stage(1)
    await simulation.later(11)
    await simulation.later(11)
    assert simulation.now == ("Promoted", {"staging": 1, "champion": 1}, {"1": 100})
    databricks.denied = {f"PUT {ALIASES}"}
    await simulation.stage(2)
    await simulation.look(minutes=30)
    assert simulation.now == ("Promoting", {"staging": 2, "champion": 1}, {"2": 100})
    serving = simulation.status().serving
    assert serving
    assert (serving.version, serving.canary_complete) == ("2", True)
    assert [(route.version, route.percent) for route in serving.saved or []] == [("1", 100)]
    # Version 1 would fail a canary now.
    databricks.add_version(MODEL, 1, {"error_rate": 0.2})
    return simulation


LOSSES: dict[str, dict[str, Any]] = {
    "the source goes back": {},
    "the gates refuse it": {"gates": [REFUSING_GATE]},
    "it waits for an approval": {"approval": {}},
}


@pytest.mark.parametrize("edit", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("is_denied", [True, False])
async def test_a_complete_trial_that_gets_no_alias_leaves_the_endpoint_without_a_canary(
    databricks: Workspace, edit: dict[str, Any], *, is_denied: bool
) -> None:
    simulation = await complete_trial(databricks)
    if not is_denied:
        databricks.denied = set()
    if edit:
        simulation.edit(**edit)
    else:
        databricks.set_alias(MODEL, "staging", 1)
    aliases = {"staging": 2 if edit else 1, "champion": 1}
    moves = simulation.moves()
    for minutes in (0, 11, 60):
        await simulation.later(minutes)
        assert simulation.now[1:] == (aliases, {"1": 100})
    assert simulation.says("Served") == ("EndpointReady", "endpoint support serves version 1 with 100%")
    assert simulation.moves() == moves
    serving = simulation.status().serving
    assert serving
    assert (serving.version, serving.saved, serving.canary_complete) == ("1", None, None)


async def test_a_version_that_cannot_be_deployed_again_after_a_trial_keeps_the_alias(
    databricks: Workspace,
) -> None:
    simulation = await complete_trial(databricks)
    databricks.denied = set()
    databricks.endpoints.broken = {"1": "no machine"}
    simulation.edit(gates=[REFUSING_GATE])
    await simulation.later(60)
    assert simulation.now == ("Refused", {"staging": 2, "champion": 1}, {"2": 100})
    reason, message = simulation.says("Served") or ("", "")
    assert (reason, "no machine" in message) == ("EndpointFailed", True)


async def test_another_candidate_after_a_complete_trial_has_its_canary_beside_the_alias(
    databricks: Workspace,
) -> None:
    simulation = await complete_trial(databricks)
    databricks.denied = set()
    await simulation.stage(3)
    assert simulation.now == ("Promoting", {"staging": 3, "champion": 1}, {"3": 10, "1": 90})


async def test_the_alias_waits_while_the_endpoint_serves_another_model(databricks: Workspace) -> None:
    simulation = Databricks(databricks, canary=CANARY, alias_moves=None)
    databricks.add_version("main.llm.other", 2, {})
    client = await simulation.open_endpoint()
    client.act(ConfigureEndpoint((ServedVersion("main.llm.other", "2", 100),), create=True))
    await simulation.stage(2)
    assert simulation.now == ("Blocked", {"staging": 2}, {"2": 100})
    reason, message = simulation.says("Served") or ("", "")
    assert (reason, "serves the model main.llm.other" in message) == ("EndpointFailed", True)


async def test_a_version_that_a_rollback_chose_before_has_a_canary_again(databricks: Workspace) -> None:
    simulation = Databricks(databricks, canary=CANARY, alias_moves=None)
    await simulation.stage(1)
    await simulation.stage(2)
    for _ in STEPS:
        await simulation.later(30)
    simulation.edit(rollbackTo={"type": "Version", "version": "1"})
    await simulation.settle()
    simulation.edit(rollbackTo=None)
    await simulation.stage(3)
    for _ in STEPS:
        await simulation.later(30)
    assert simulation.now == ("Promoted", {"staging": 3, "champion": 3}, {"3": 100})
    await simulation.stage(1)
    assert simulation.now == ("Promoting", {"staging": 1, "champion": 3}, {"1": 10, "3": 90})
