"""Promotions with an endpoint from beginning to end: the alias and the endpoint go forward, and back, together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from finetune_operator.serving.model import ConfigureEndpoint, ServedVersion
from fixtures.fake_databricks import Fault, Workspace, running
from fixtures.operator_in_memory.promotions import KilledError
from fixtures.operator_in_memory.serving import ALIASES, GATE, MODEL, PATH, STEPS, Databricks


@pytest.fixture
def state() -> Iterator[Workspace]:
    with running() as workspace:
        yield workspace


async def test_a_canary_to_its_end(state: Workspace) -> None:
    simulation = Databricks(state, canary={"steps": STEPS, "gates": [GATE]})
    await simulation.stage(1)
    assert simulation.now == ("Promoted", {"staging": 1, "champion": 1}, {"1": 100})
    await simulation.stage(2)
    assert simulation.now == ("Promoting", {"staging": 2, "champion": 2}, {"2": 10, "1": 90})
    simulation.restart()
    await simulation.later(10)
    assert simulation.now == ("Promoting", {"staging": 2, "champion": 2}, {"2": 50, "1": 50})
    await simulation.later(11)
    assert simulation.now == ("Promoted", {"staging": 2, "champion": 2}, {"2": 100})
    assert simulation.configured() == 4
    writes = simulation.writes.count
    await simulation.later(60)
    assert (simulation.configured(), simulation.writes.count) == (4, writes)


async def test_an_alias_that_unity_catalog_spells_in_capitals(state: Workspace) -> None:
    simulation = Databricks(state)
    state.set_alias(MODEL, "Champion", 1)
    await simulation.stage(2)
    assert simulation.now == ("Promoted", {"Champion": 2, "staging": 2}, {"2": 100})


async def test_a_job_that_spells_its_model_in_capitals_is_a_source(state: Workspace) -> None:
    simulation = Databricks(state)
    simulation.edit(source={"type": "FineTuneJob", "fineTuneJobRef": {"name": "tune"}})
    simulation.kube.keep(
        {
            "kind": "FineTuneJob",
            "metadata": {"name": "tune"},
            "spec": {"tracking": simulation.held["spec"]["tracking"]},
            "status": {"phase": "Succeeded", "model": {"name": MODEL.upper(), "version": "2"}},
        }
    )
    await simulation.settle()
    assert simulation.now == ("Promoted", {"champion": 2}, {"2": 100})


async def test_a_gate_of_the_canary_takes_both_back(state: Workspace) -> None:
    simulation = Databricks(state, canary={"steps": STEPS, "gates": [GATE]})
    await simulation.stage(1)
    await simulation.stage(2)
    state.add_version(MODEL, 2, {"error_rate": 0.2})
    await simulation.later(1)
    assert simulation.now == ("Refused", {"staging": 2, "champion": 1}, {"1": 100})
    assert simulation.moves() == [("Promoted", None, "1"), ("Promoted", "1", "2"), ("Withdrawn", "2", "1")]
    condition = simulation.says("Promoted")
    assert condition
    assert condition[0] == "Withdrawn"
    assert condition[1].startswith(
        "endpoint support cannot serve version 2 as specified: a canary gate failed: few-errors"
    )
    assert simulation.says("Served") == ("EndpointReady", "endpoint support serves version 1 with 100%")
    configured = simulation.configured()
    await simulation.later(60)
    assert simulation.configured() == configured
    # A better one has its own chance.
    await simulation.stage(3)
    assert simulation.now == ("Promoting", {"staging": 3, "champion": 3}, {"3": 10, "1": 90})


async def served_by_hand(state: Workspace, version: str, **spec: Any) -> Databricks:
    """The endpoint serves a version that somebody deployed, and there is no alias yet."""
    simulation = Databricks(state, canary={"steps": STEPS, "gates": [GATE]})
    simulation.edit(**spec)
    client = await simulation.open_endpoint()
    client.act(ConfigureEndpoint((ServedVersion(MODEL, version, 100),), create=True))
    return simulation


async def test_a_canary_that_fails_with_no_version_before_withdraws_the_alias(state: Workspace) -> None:
    simulation = await served_by_hand(state, "1")
    await simulation.stage(2)
    assert simulation.now == ("Promoting", {"staging": 2, "champion": 2}, {"2": 10, "1": 90})
    state.add_version(MODEL, 2, {"error_rate": 0.2})
    for _ in range(3):
        await simulation.later(1)
        assert simulation.now == ("Refused", {"staging": 2}, {"1": 100})
    assert simulation.moves() == [("Promoted", None, "2"), ("Withdrawn", "2", None)]
    condition = simulation.says("Promoted")
    assert condition
    assert condition[0] == "Withdrawn"
    assert condition[1].endswith(
        "the endpoint is restored to version 1 with 100%, and alias champion, which no version had before, is removed"
    )
    # Another version gets its own canary.
    await simulation.stage(3)
    assert simulation.now == ("Promoting", {"staging": 3, "champion": 3}, {"3": 10, "1": 90})


async def test_an_alias_that_a_person_set_is_not_withdrawn(state: Workspace) -> None:
    state.add_version(MODEL, 2, {"error_rate": 0.001})
    state.set_alias(MODEL, "champion", 2)
    simulation = await served_by_hand(state, "1", source={"type": "Version", "version": "2"})
    await simulation.settle()
    assert simulation.now == ("Promoting", {"champion": 2}, {"2": 10, "1": 90})
    state.add_version(MODEL, 2, {"error_rate": 0.2})
    await simulation.later(1)
    assert simulation.now == ("Blocked", {"champion": 2}, {"1": 100})
    assert simulation.moves() == []


async def test_a_failed_version_that_a_person_sets_again_is_adopted(state: Workspace) -> None:
    simulation = Databricks(state, canary={"steps": STEPS, "gates": [GATE]})
    simulation.edit(onDrift="Adopt")
    await simulation.stage(1)
    await simulation.stage(2)
    state.add_version(MODEL, 2, {"error_rate": 0.2})
    await simulation.later(1)
    assert simulation.now == ("Refused", {"staging": 2, "champion": 1}, {"1": 100})
    state.add_version(MODEL, 2, {"error_rate": 0.001})
    state.set_alias(MODEL, "champion", 2)
    await simulation.settle()
    assert simulation.now == ("Promoting", {"staging": 2, "champion": 2}, {"2": 10, "1": 90})
    assert simulation.moves()[2:] == [("Withdrawn", "2", "1"), ("Adopted", "1", "2")]


async def test_neither_alias_nor_endpoint_follows_another_registry(state: Workspace) -> None:
    simulation = Databricks(state, canary={"steps": STEPS, "gates": [GATE]})
    await simulation.stage(1)
    await simulation.stage(2)
    writes = len(state.writes())
    state.models[MODEL].created += 1
    state.add_version(MODEL, 2, {"error_rate": 0.5})
    await simulation.later(20)
    assert simulation.now == ("Blocked", {"staging": 2, "champion": 2}, {"2": 10, "1": 90})
    assert len(state.writes()) == writes
    condition = simulation.says("RegistryReady")
    assert condition
    assert condition[0] == "RegistryChanged"


async def test_alias_and_endpoint_go_back_to_the_version_that_proved_itself(state: Workspace) -> None:
    """Version 2 is overtaken in its canary by 3, which fails: 2 is not what things go back to."""
    simulation = Databricks(state, canary={"steps": STEPS, "gates": [GATE]})
    await simulation.stage(1)
    await simulation.stage(2)
    await simulation.stage(3)
    assert simulation.now == ("Promoting", {"staging": 3, "champion": 3}, {"3": 10, "1": 90})
    for version in (2, 3):
        state.add_version(MODEL, version, {"error_rate": 0.5})
    for _ in range(3):
        await simulation.later(1)
        assert simulation.now == ("Refused", {"staging": 3, "champion": 1}, {"1": 100})
    assert simulation.moves()[2:] == [("Promoted", "2", "3"), ("Withdrawn", "3", "1")]
    withheld = simulation.status().withheld
    assert withheld
    assert (withheld.version, withheld.back) == ("3", "1")


async def test_a_hand_at_the_endpoint_says_nothing_of_the_alias(state: Workspace) -> None:
    """What somebody else had the endpoint serve never had the alias, and does not get it."""
    simulation = Databricks(state, canary={"steps": STEPS, "gates": [GATE]})
    await simulation.stage(1)
    client = await simulation.open_endpoint()
    client.act(ConfigureEndpoint((ServedVersion(MODEL, "3", 100),), create=False))
    state.add_version(MODEL, 2, {"error_rate": 0.5})
    await simulation.stage(2)
    assert simulation.now == ("Refused", {"staging": 2, "champion": 1}, {"1": 100})


async def test_an_endpoint_that_cannot_be_changed_takes_the_alias_back(state: Workspace) -> None:
    simulation = Databricks(state)
    await simulation.stage(1)
    state.endpoints.broken = {"2": "no machine"}
    await simulation.stage(2)
    assert simulation.now == ("Refused", {"staging": 2, "champion": 1}, {"1": 100})
    assert simulation.configured() == 2
    await simulation.later(60)
    assert simulation.configured() == 2


async def test_a_rollback_takes_the_endpoint_along(state: Workspace) -> None:
    simulation = Databricks(state, canary={"steps": STEPS})
    await simulation.stage(1)
    await simulation.stage(2)
    simulation.edit(rollbackTo={"type": "Previous"})
    await simulation.settle()
    assert simulation.now == ("Promoted", {"staging": 2, "champion": 1}, {"1": 100})
    assert simulation.phase_and_reason() == "Promoted: RolledBack"
    await simulation.later(60)
    assert simulation.now == ("Promoted", {"staging": 2, "champion": 1}, {"1": 100})


async def test_a_git_revert_takes_the_endpoint_along_at_once(state: Workspace) -> None:
    simulation = Databricks(state, canary={"steps": STEPS})
    simulation.edit(source={"type": "Version", "version": "1"})
    await simulation.settle()
    simulation.edit(source={"type": "Version", "version": "2"})
    for minutes in (0, 11, 11):
        await simulation.later(minutes)
    assert simulation.now == ("Promoted", {"champion": 2}, {"2": 100})
    simulation.edit(source={"type": "Version", "version": "1"})
    await simulation.settle()
    assert simulation.now == ("Promoted", {"champion": 1}, {"1": 100})
    await simulation.later(60)
    assert simulation.now == ("Promoted", {"champion": 1}, {"1": 100})


async def test_the_revert_of_a_revert_has_its_canary(state: Workspace) -> None:
    simulation = Databricks(state, canary={"steps": STEPS})
    for version, routes in (("1", {"1": 100}), ("2", {"2": 10, "1": 90}), ("1", {"1": 100})):
        simulation.edit(source={"type": "Version", "version": version})
        await simulation.settle()
        assert simulation.now[2] == routes
    simulation.edit(source={"type": "Version", "version": "2"})
    await simulation.settle()
    assert simulation.now == ("Promoting", {"champion": 2}, {"2": 10, "1": 90})


async def test_a_suspended_promotion_leaves_the_endpoint_alone(state: Workspace) -> None:
    simulation = Databricks(state)
    await simulation.stage(1)
    simulation.edit(suspend=True)
    await simulation.settle()
    state.endpoints.delete("support")
    await simulation.later(60)
    assert simulation.status().phase == "Suspended"
    assert "support" not in state.endpoints.held
    simulation.edit(suspend=False)
    await simulation.settle()
    assert simulation.now == ("Promoted", {"staging": 1, "champion": 1}, {"1": 100})


REFUSED: dict[str, list[Fault]] = {
    "the alias alone": [],
    "the endpoint too, for a time": [Fault(403, method="PUT", path=PATH, times=3)],
}


@pytest.mark.parametrize("faults", REFUSED.values(), ids=REFUSED)
async def test_an_endpoint_goes_back_while_the_alias_may_not_be_written(
    state: Workspace, faults: list[Fault]
) -> None:
    simulation = Databricks(state, canary={"steps": STEPS, "gates": [GATE]})
    await simulation.stage(1)
    await simulation.stage(2)
    state.add_version(MODEL, 2, {"error_rate": 0.2})
    state.denied, state.faults = {f"PUT {ALIASES}"}, [replace(item) for item in faults]
    await simulation.look(minutes=10)
    assert simulation.now == ("Promoting", {"staging": 2, "champion": 2}, {"1": 100})
    promoted, served = simulation.says("Promoted"), simulation.says("Served")
    assert promoted
    assert served
    assert (promoted[0], served[0]) == ("MoveRefused", "CanaryFailed")
    configured = simulation.configured()
    await simulation.look(minutes=60)
    assert simulation.configured() == configured
    state.denied = set()
    await simulation.look(minutes=1)
    assert simulation.now == ("Refused", {"staging": 2, "champion": 1}, {"1": 100})
    assert simulation.says("Served") == ("EndpointReady", "endpoint support serves version 1 with 100%")
    assert simulation.configured() == configured


async def test_a_canary_is_judged_while_the_next_version_cannot_have_the_alias(state: Workspace) -> None:
    simulation = Databricks(state, canary={"steps": STEPS, "gates": [GATE]})
    await simulation.stage(1)
    await simulation.stage(2)
    state.denied = {f"PUT {ALIASES}"}
    state.set_alias(MODEL, "staging", 3)
    await simulation.look(minutes=60)
    assert simulation.now == ("Promoting", {"staging": 3, "champion": 2}, {"2": 10, "1": 90})
    assert simulation.says("Served") == (
        "Canary",
        "version 2 gets 10% of the traffic, step 1 of 2; the next step waits while alias champion is moved",
    )
    state.add_version(MODEL, 2, {"error_rate": 0.2})
    await simulation.look(minutes=2)
    assert simulation.now == ("Promoting", {"staging": 3, "champion": 2}, {"1": 100})
    state.denied = set()
    await simulation.look(minutes=2)
    assert simulation.now[1:] == ({"staging": 3, "champion": 3}, {"3": 10, "1": 90})


async def test_a_canary_is_judged_while_the_alias_is_elsewhere(state: Workspace) -> None:
    simulation = Databricks(state, canary={"steps": STEPS, "gates": [GATE]})
    simulation.edit(onDrift="Warn")
    await simulation.stage(1)
    await simulation.stage(2)
    state.set_alias(MODEL, "champion", 3)
    await simulation.later(120)
    assert simulation.now == ("Blocked", {"staging": 2, "champion": 3}, {"2": 10, "1": 90})
    assert simulation.says("Served") == (
        "AliasMoved",
        "version 2 gets 10% of the traffic, step 1 of 2; the step does not change until alias champion is at version 2 again, or the "
        "drift is accepted",
    )
    state.add_version(MODEL, 2, {"error_rate": 0.2})
    await simulation.later(1)
    assert simulation.now == ("Blocked", {"staging": 2, "champion": 3}, {"1": 100})
    assert simulation.says("Served") == (
        "CanaryFailed",
        "endpoint support cannot serve version 2 as specified: a canary gate failed: few-errors: error_rate is 0.2, which does not meet <= 0.01; "
        "the endpoint is restored to version 1 with 100%, and alias champion moves to version 1 after the drift from version 2 is repaired",
    )
    state.set_alias(MODEL, "champion", 2)
    await simulation.later(1)
    assert simulation.now == ("Refused", {"staging": 2, "champion": 1}, {"1": 100})


HANDS: dict[str, tuple[int | None, tuple[str, str]]] = {
    "moved": (
        3,
        (
            "AliasMoved",
            "endpoint support stays as it is until alias champion is at version 1 again, or the drift is accepted",
        ),
    ),
    "removed": (
        None,
        (
            "AliasRemoved",
            "endpoint support stays as it is until alias champion is at version 1 again, or the drift is accepted",
        ),
    ),
}


@pytest.mark.parametrize(("version", "sentence"), HANDS.values(), ids=HANDS)
async def test_an_endpoint_stays_as_it_is_while_the_alias_is_elsewhere(
    state: Workspace, version: int | None, sentence: tuple[str, str]
) -> None:
    simulation = Databricks(state)
    simulation.edit(onDrift="Warn")
    await simulation.stage(1)
    if version is None:
        state.delete_alias(MODEL, "champion")
    else:
        state.set_alias(MODEL, "champion", version)
    await simulation.later(1)
    assert (simulation.status().phase, simulation.now[2], simulation.says("Served")) == (
        "Blocked",
        {"1": 100},
        sentence,
    )
    state.set_alias(MODEL, "champion", 1)
    await simulation.later(1)
    assert (simulation.status().phase, simulation.says("Served")) == (
        "Promoted",
        ("EndpointReady", "endpoint support serves version 1 with 100%"),
    )


async def test_a_workspace_that_does_not_answer_is_asked_for_one_endpoint_only(state: Workspace) -> None:
    simulation = Databricks(state)
    await simulation.stage(1)
    spec = simulation.held["spec"]
    simulation.submit(
        "other", **spec | {"alias": "other", "serving": {**spec["serving"], "endpoint": "other"}}
    )
    await simulation.settle()
    simulation.seconds += simulation.settings.poll_seconds
    outage = Fault(429, {"error_code": "REQUEST_LIMIT_EXCEEDED", "message": "Slow down"}, path=PATH)
    state.faults = [outage]
    await simulation.operator.look("champion")
    times = outage.times
    await simulation.operator.look("other")
    message = (
        f"Databricks at {state.uri} is too busy to read serving endpoints: REQUEST_LIMIT_EXCEEDED, HTTP 429"
    )
    assert outage.times == times
    assert simulation.says("Served", "other") == ("DatabricksUnreachable", message)


async def test_metrics_that_cannot_be_read_keep_no_other_endpoint_from_being_read(state: Workspace) -> None:
    simulation = Databricks(state, canary={"steps": STEPS, "gates": [GATE]})
    await simulation.stage(1)
    spec = simulation.held["spec"]
    simulation.submit(
        "other", **spec | {"alias": "other", "serving": {**spec["serving"], "endpoint": "other"}}
    )
    await simulation.settle()
    said = [simulation.says("Served", name) for name in ("champion", "other")]
    body = {"error_code": "TEMPORARILY_UNAVAILABLE", "message": "no"}
    state.faults = [Fault(503, body, path=f"{PATH}/support/metrics")]
    await simulation.later(1)
    assert [simulation.says("Served", name) for name in ("champion", "other")] == said


@pytest.mark.parametrize(("number", "after"), [(number, bool(number % 2)) for number in range(1, 9)])
async def test_an_operator_that_dies_while_it_takes_both_back(
    state: Workspace, number: int, after: bool
) -> None:
    simulation = Databricks(state, canary={"steps": STEPS, "gates": [GATE]})
    await simulation.stage(1)
    await simulation.stage(2)
    state.add_version(MODEL, 2, {"error_rate": 0.2})
    dies = simulation.writes.count + number
    simulation.writes.kill_before, simulation.writes.kill_after = (None, dies) if after else (dies, None)
    with contextlib.suppress(KilledError):
        await simulation.settle()
    simulation.restart()
    await simulation.later(2)
    assert simulation.now == ("Refused", {"staging": 2, "champion": 1}, {"1": 100})
    assert simulation.moves() == [("Promoted", None, "1"), ("Promoted", "1", "2"), ("Withdrawn", "2", "1")]


async def test_a_version_that_failed_stays_after_a_person_has_given_it_the_alias(
    databricks: Workspace,
) -> None:
    simulation = Databricks(databricks)
    await simulation.stage(1)
    databricks.endpoints.broken = {"2": "no machine"}
    await simulation.stage(2)
    assert simulation.moves()[-1] == ("Withdrawn", "2", "1")
    databricks.endpoints.broken = {}
    simulation.edit(rollbackTo={"type": "Version", "version": "2"})
    await simulation.settle()
    simulation.edit(rollbackTo=None)
    await simulation.settle()
    assert simulation.now == ("Promoted", {"staging": 2, "champion": 2}, {"2": 100})
    assert simulation.moves()[-1] == ("RolledBack", "1", "2")
