"""Which version the number of spec.onRegression is about: it covers all traffic, and a breach counts only against the version that has it."""

from __future__ import annotations

from typing import Any

import pytest

from fixtures.fake_databricks import Workspace
from fixtures.fake_databricks.endpoints import exported
from fixtures.operator_in_memory.promotions import World
from fixtures.operator_in_memory.serving import STEPS, Databricks
from unit.operator.modelpromotion.champion import GATES, world
from unit.operator.modelpromotion.test_promotion_regression import WATCH, promote, wait

LONG_WATCH = {**WATCH, "watchSeconds": 7000}


async def wait_mixed(simulation: Databricks, seconds: int, rates: dict[str, float]) -> list[int]:
    """Passes while the number is the mean of the versions, weighted by their traffic; the traffic of version 3 in each."""
    shares: list[int] = []
    for _ in range(seconds // 5):
        routes = simulation.now[2]
        simulation.numbers.value = sum(rates[version] * share / 100 for version, share in routes.items())
        shares.append(routes.get("3", 0))
        await wait(simulation, 5)
    return shares


async def serve_second(databricks: Workspace) -> Databricks:
    """An endpoint that serves version 2 alone, which is watched, after the canary that comes before each move."""
    simulation = Databricks(databricks, canary={"steps": STEPS}, alias_moves=None)
    await simulation.stage(1)
    simulation.edit(onRegression=LONG_WATCH)
    await simulation.stage(2)
    for _ in range(2):
        await simulation.later(11)
    assert simulation.now == ("Promoted", {"staging": 2, "champion": 2}, {"2": 100})
    return simulation


def read_condition(simulation: World) -> tuple[str, str]:
    """Reason and message of the condition Regressed; empty without it."""
    return simulation.says("Regressed") or ("", "")


def find_bad(simulation: World) -> dict[str, str | None]:
    """The versions that are marked as bad, and why."""
    registry = simulation.status().registry
    return {record.version: record.bad for record in registry.versions if record.bad} if registry else {}


async def test_the_endpoint_moves_back_with_the_alias_at_once(databricks: Workspace) -> None:
    simulation = Databricks(databricks, canary={"steps": STEPS})
    simulation.edit(onRegression=WATCH)
    await simulation.stage(1)
    await simulation.stage(2)
    aliases = {"staging": 2, "champion": 2}
    assert simulation.now == ("Promoting", aliases, {"2": 10, "1": 90})
    # The time of the watch starts when the endpoint serves the version alone.
    for _ in range(2):
        await simulation.later(11)
    assert simulation.now == ("Promoted", aliases, {"2": 100})
    assert (simulation.says("Regressed") or ("", ""))[0] == "Watching"
    simulation.numbers.value = 0.25
    await wait(simulation, 60)
    await simulation.settle()
    assert simulation.now == ("Refused", {"staging": 2, "champion": 1}, {"1": 100})
    assert simulation.moves()[-1] == ("Regressed", "2", "1")


async def test_the_fix_of_a_broken_version_is_not_blamed_before_it_has_traffic(databricks: Workspace) -> None:
    simulation = Databricks(databricks)
    await simulation.stage(1)
    simulation.edit(onRegression=WATCH)
    simulation.numbers.value = 0.9
    databricks.endpoints.polls = None
    await simulation.stage(2)
    await wait(simulation, 100)
    assert simulation.now[1:] == ({"staging": 2, "champion": 2}, {"1": 100})
    assert simulation.says("Regressed") == (
        "Watching",
        "version 2 is watched until 600 s after the endpoint serves it alone: error-rate must be <= 0.05",
    )
    databricks.endpoints.finish("support")
    databricks.endpoints.polls = 0
    # The number covers the last minute, so it lags behind the traffic.
    await wait(simulation, 60)
    assert simulation.says("Regressed") == (
        "Breached",
        "error-rate has not been <= 0.05 since before version 2 had traffic, so alias champion stays; a breach counts once the number has "
        "been good",
    )
    simulation.numbers.value = 0.0
    await wait(simulation, 10)
    assert simulation.now == ("Promoted", {"staging": 2, "champion": 2}, {"2": 100})
    assert ((simulation.says("Regressed") or ("",))[0], find_bad(simulation)) == ("Watching", {})
    simulation.numbers.value = 0.9
    await wait(simulation, 60)
    assert simulation.moves()[-1] == ("Regressed", "2", "1")


async def test_the_fix_of_a_broken_version_is_not_blamed_during_its_canary(databricks: Workspace) -> None:
    simulation = Databricks(databricks, canary={"steps": STEPS})
    await simulation.stage(1)
    simulation.edit(onRegression=WATCH)
    simulation.numbers.value = 0.9
    await simulation.stage(2)
    await wait_mixed(simulation, 1300, {"1": 0.9, "2": 0.0})
    assert simulation.now == ("Promoted", {"staging": 2, "champion": 2}, {"2": 100})
    assert (simulation.moves(), find_bad(simulation)) == (
        [("Promoted", None, "1"), ("Promoted", "1", "2")],
        {},
    )


async def test_a_breach_during_a_canary_after_the_move_counts_once_it_is_over(databricks: Workspace) -> None:
    simulation = Databricks(databricks, canary={"steps": STEPS})
    simulation.edit(onRegression=WATCH)
    await simulation.stage(1)
    await simulation.stage(2)
    simulation.numbers.value = 0.25
    await wait(simulation, 60)
    assert simulation.now == ("Promoting", {"staging": 2, "champion": 2}, {"2": 10, "1": 90})
    await wait(simulation, 1300)
    await simulation.settle()
    assert simulation.now == ("Refused", {"staging": 2, "champion": 1}, {"1": 100})
    assert simulation.moves()[-1] == ("Regressed", "2", "1")


@pytest.mark.parametrize("rates", [{"2": 0.0, "3": 0.9}, {"2": 0.9, "3": 0.9}], ids=["canary", "both"])
async def test_no_breach_counts_during_the_canary_of_another_version(
    databricks: Workspace, rates: dict[str, float]
) -> None:
    simulation = await serve_second(databricks)
    await simulation.stage(3)
    shares = await wait_mixed(simulation, 1000, rates)
    # The canary neither ends nor starts again.
    assert shares == sorted(shares)
    assert (set(shares), simulation.now[1], find_bad(simulation)) == (
        {10, 50},
        {"staging": 3, "champion": 2},
        {},
    )
    # The version that passes its canary with a bad number is watched like any other.
    await wait_mixed(simulation, 400, rates | {"1": 0.0})
    assert (simulation.moves()[-1], find_bad(simulation)) == (("Regressed", "3", "2"), {"3": "Regressed"})


async def test_the_watch_starts_again_after_the_canary_of_another_version(databricks: Workspace) -> None:
    simulation = await serve_second(databricks)
    before = simulation.status().watch
    await simulation.stage(3)
    simulation.numbers.value = 0.9
    await wait(simulation, 60)
    watch = simulation.status().watch
    assert watch
    assert (watch.version, watch.start_time, watch.inherited, watch.breach_time) == ("2", None, True, None)
    await simulation.stage(2)
    assert simulation.now == ("Promoted", {"staging": 2, "champion": 2}, {"2": 100})
    simulation.numbers.value = 0.0
    await wait(simulation, 10)
    watch = simulation.status().watch
    assert before
    assert before.start_time
    assert watch
    assert watch.start_time
    assert watch.start_time > before.start_time
    simulation.numbers.value = 0.9
    await wait(simulation, 60)
    assert simulation.moves()[-1] == ("Regressed", "2", "1")


async def test_a_canary_waits_while_its_base_is_out_of_bounds(databricks: Workspace) -> None:
    simulation = await serve_second(databricks)
    simulation.numbers.value = 0.25
    await wait(simulation, 10)
    databricks.set_alias("main.llm.support", "staging", 3)
    await wait(simulation, 10)
    assert simulation.now == ("Pending", {"staging": 3, "champion": 2}, {"2": 100})
    await wait(simulation, 60)
    simulation.numbers.value = 0.0
    await simulation.settle()
    assert simulation.now == ("Promoting", {"staging": 3, "champion": 1}, {"3": 10, "1": 90})


async def begin_broken(**spec: Any) -> World:
    """A promotion without an endpoint, whose number was out of bounds before the move to version 2."""
    simulation = world(onRegression=WATCH, gates=GATES[:1], **spec)
    simulation.registry.aliases |= {"staging": "1", "champion": "1"}
    simulation.numbers.value = 0.9
    await simulation.settle()
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    return simulation


async def test_without_an_endpoint_a_number_that_was_bad_at_the_move_must_be_good_first() -> None:
    simulation = await begin_broken()
    writes = simulation.writes.count
    await wait(simulation, 300)
    assert (simulation.registry.aliases["champion"], simulation.writes.count) == ("2", writes)
    simulation.numbers.value = 0.0
    await wait(simulation, 10)
    simulation.numbers.value = 0.9
    await wait(simulation, 60)
    assert simulation.moves()[-1] == ("Regressed", "2", "1")


async def test_a_number_that_is_never_good_ends_the_watch_and_moves_nothing() -> None:
    simulation = await begin_broken()
    await wait(simulation, 620)
    assert (simulation.registry.aliases["champion"], simulation.status().watch) == ("2", None)
    assert simulation.says("Regressed") == (
        "Breached",
        "error-rate has not been <= 0.05 since before version 2 had traffic, so alias champion stays; the watch is over",
    )


async def test_a_candidate_does_not_wait_for_a_number_that_was_bad_before() -> None:
    simulation = await begin_broken()
    simulation.registry.aliases["staging"] = "3"
    await simulation.settle()
    assert simulation.moves()[-1] == ("Promoted", "2", "3")


async def test_a_number_that_is_read_during_the_move_is_no_reason_to_watch_a_repair() -> None:
    simulation = await promote()
    await wait(simulation, 700)
    simulation.registry.aliases["champion"] = "3"
    queries = len(simulation.numbers.queries)
    await simulation.settle()
    assert (simulation.moves()[-1], len(simulation.numbers.queries)) == (("Repaired", "3", "2"), queries)


OWN_METRIC = {name: value for name, value in WATCH.items() if name != "prometheus"} | {
    "endpointMetric": "error_rate"
}


async def test_a_version_moves_back_by_its_own_metric_at_the_endpoint(databricks: Workspace) -> None:
    simulation = Databricks(databricks, canary={"steps": STEPS}, alias_moves=None)
    await simulation.stage(1)
    simulation.edit(onRegression=OWN_METRIC)
    await simulation.stage(2)
    for _ in range(2):
        await simulation.later(11)
    await wait(simulation, 10)
    assert read_condition(simulation) == (
        "MetricInconclusive",
        "error_rate of version 2 is unknown, and no alias moves: endpoint support had no error_rate of version 2 in the last minute; the "
        "operator asks again",
    )
    # Errors of another version do not count.
    databricks.endpoints.metrics["support"] = exported("support", {"1": (100, 90, 0), "2": (100, 0, 1)})
    await wait(simulation, 60)
    assert read_condition(simulation)[0] == "Watching"
    databricks.endpoints.metrics["support"] = exported("support", {"2": (100, 20, 5)})
    await wait(simulation, 20)
    assert simulation.now == ("Promoted", {"staging": 2, "champion": 2}, {"2": 100})
    await wait(simulation, 40)
    assert simulation.now[1:] == ({"staging": 2, "champion": 1}, {"1": 100})
    assert read_condition(simulation) == (
        "Regressed",
        "version 2 regressed: error_rate is 0.25, which is not <= 0.05, for 30 s; alias champion moves back to version 1",
    )
    assert find_bad(simulation) == {"2": "Regressed"}
    # Without a watch, the metrics are not read.
    reads = count_metric_reads(databricks)
    await wait(simulation, 60)
    assert (reads > 0, count_metric_reads(databricks) - reads) == (True, 0)


def count_metric_reads(databricks: Workspace) -> int:
    return sum(path.endswith("/metrics") for _, path in databricks.asked)
