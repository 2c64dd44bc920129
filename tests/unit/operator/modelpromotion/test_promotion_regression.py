"""spec.onRegression: a number that is watched after a move, and the move back if the number gets out of bounds for too long."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.errors import Problem
from fixtures.operator_in_memory.promotions import PREVIOUS, KilledError, World, back_to
from unit.operator.modelpromotion.champion import GATES, world

QUERY = {"url": "http://prometheus:9090", "query": "sum(rate(errors[1m]))", "name": "error-rate"}
WATCH: dict[str, Any] = {
    "action": "Rollback",
    "prometheus": QUERY,
    "max": 0.05,
    "forSeconds": 30,
    "watchSeconds": 600,
}
AWAY = Problem(
    ConditionReason.PROMETHEUS_UNREACHABLE,
    "Prometheus at http://prometheus:9090 cannot be reached: the connection failed",
)


async def promote(watch: dict[str, Any] = WATCH, **spec: Any) -> World:
    """A promotion that has moved the alias from version 1 to version 2, which is watched since the last few seconds."""
    simulation = world(onRegression=watch, gates=GATES[:1], **spec)
    simulation.registry.aliases |= {"staging": "1", "champion": "1"}
    await simulation.settle()
    assert simulation.says("Regressed") is None
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    assert simulation.registry.aliases["champion"] == "2"
    return simulation


async def wait(simulation: World, seconds: float) -> None:
    """Passes at the poll interval for a time."""
    end = simulation.seconds + seconds
    while simulation.seconds < end:
        simulation.seconds += 5
        await simulation.operator.look("champion")


async def test_a_number_that_stays_good_ends_the_watch() -> None:
    simulation = await promote()
    assert (simulation.says("Regressed") or ("", ""))[0] == "Watching"
    assert simulation.numbers.queries[0] == ("http://prometheus:9090", "", "sum(rate(errors[1m]))")
    watch = simulation.status().watch
    assert watch
    assert watch.start_time
    writes = simulation.writes.count
    await wait(simulation, 500)
    assert simulation.writes.count == writes
    await wait(simulation, 110)
    assert simulation.says("Regressed") == (
        "Watched",
        "version 2 was watched for 600 s, and error-rate is <= 0.05",
    )
    assert (simulation.status().watch, simulation.phase_and_reason()) == (None, "Promoted: Promoted")
    queries = len(simulation.numbers.queries)
    simulation.numbers.value = 1.0
    await wait(simulation, 100)
    assert (len(simulation.numbers.queries), simulation.registry.aliases["champion"]) == (queries, "2")


async def test_a_breach_that_lasts_moves_the_alias_back_and_marks_the_version() -> None:
    simulation = await promote()
    simulation.numbers.value = 0.25
    begun = simulation.seconds
    await wait(simulation, 20)
    reason, message = simulation.says("Regressed") or ("", "")
    assert reason == "Breached"
    assert message.startswith("version 2: error-rate is 0.25, which is not <= 0.05 since 2026-08-01T12:")
    assert message.endswith("; if it stays so for 30 s, alias champion moves back")
    assert simulation.registry.aliases["champion"] == "2"
    while simulation.registry.aliases["champion"] != "1":
        await wait(simulation, 5)
    assert simulation.seconds - begun <= 30 + 60
    await simulation.settle()
    regressed = "version 2 regressed: error-rate is 0.25, which is not <= 0.05, for 30 s; alias champion moves back to version 1"
    status = simulation.status()
    assert simulation.moves()[-1] == ("Regressed", "2", "1")
    assert status.history[0].message == regressed
    assert simulation.says("Regressed") == ("Regressed", regressed)
    assert simulation.phase_and_reason() == "Refused: Regressed"
    assert simulation.holds("Ready")
    record = status.find_record("2")
    assert record
    assert (record.bad, record.held, record.gates) == ("Regressed", None, None)
    assert simulation.events().count("Regressed") >= 1
    assert (status.promoted, status.previous, status.watch) == ("1", None, None)


async def test_a_version_that_regressed_is_not_promoted_again_by_itself() -> None:
    simulation = await promote()
    simulation.numbers.value = 0.25
    await wait(simulation, 60)
    simulation.numbers.value = 0.0
    simulation.registry.aliases["staging"] = "3"
    await simulation.settle()
    assert simulation.moves()[-1] == ("Promoted", "1", "3")
    simulation.registry.aliases["staging"] = "2"
    # Other than after a failure at the endpoint, other gates do not give it another chance.
    simulation.edit(gates=GATES[1:])
    await simulation.settle()
    assert simulation.registry.aliases["champion"] == "3"
    assert simulation.says("Promoted") == (
        "Regressed",
        "version 2 regressed after its move before: promote another version, or set spec.rollbackTo to it",
    )
    simulation.edit(source=back_to("2"))
    await simulation.settle()
    assert simulation.phase_and_reason() == "Refused: Regressed"
    simulation.edit(rollbackTo=back_to("2"))
    await simulation.settle()
    assert simulation.registry.aliases["champion"] == "2"
    simulation.edit(rollbackTo=None)
    await simulation.settle()
    assert (simulation.phase_and_reason(), simulation.registry.aliases["champion"]) == (
        "Promoted: InPlace",
        "2",
    )
    record = simulation.status().find_record("2")
    assert record
    assert record.bad is None


UNREADABLE: dict[str, Problem] = {
    "away": AWAY,
    "no value": Problem(ConditionReason.METRIC_INCONCLUSIVE, "the result of the query has no value"),
}


@pytest.mark.parametrize("problem", UNREADABLE.values(), ids=UNREADABLE)
async def test_a_number_that_cannot_be_read_moves_nothing(problem: Problem) -> None:
    simulation = await promote()
    simulation.numbers.value = 0.25
    await wait(simulation, 20)
    simulation.numbers.value = problem
    await wait(simulation, 100)
    assert simulation.says("Regressed") == (
        problem.reason,
        f"error-rate of version 2 is unknown, and no alias moves: {problem.message}; the operator asks again",
    )
    assert (simulation.phase_and_reason(), simulation.registry.aliases["champion"]) == (
        "Promoted: Promoted",
        "2",
    )
    # The time starts again.
    simulation.numbers.value = 0.25
    await wait(simulation, 25)
    assert simulation.registry.aliases["champion"] == "2"
    await wait(simulation, 30)
    assert simulation.registry.aliases["champion"] == "1"


async def test_a_watch_without_a_last_number_says_so() -> None:
    simulation = await promote()
    simulation.numbers.value = AWAY
    await wait(simulation, 620)
    reason, message = simulation.says("Regressed") or ("", "")
    assert (reason, message.endswith("; the watch is over")) == ("PrometheusUnreachable", True)
    assert simulation.status().watch is None


async def test_a_breach_that_ends_in_time_moves_nothing() -> None:
    simulation = await promote()
    for _ in range(3):
        simulation.numbers.value = 0.25
        await wait(simulation, 25)
        simulation.numbers.value = 0.0
        await wait(simulation, 10)
    assert (simulation.says("Regressed") or ("", ""))[0] == "Watching"
    assert simulation.registry.aliases["champion"] == "2"


async def test_a_breach_of_another_query_or_bound_starts_the_time_again() -> None:
    simulation = await promote()
    simulation.numbers.value = 0.25
    await wait(simulation, 25)
    simulation.edit(onRegression={**WATCH, "max": 0.1})
    await wait(simulation, 25)
    assert simulation.registry.aliases["champion"] == "2"
    assert "which is not <= 0.1 since" in (simulation.says("Regressed") or ("", ""))[1]
    # A change of another field does not.
    simulation.edit(soakSeconds=1)
    await wait(simulation, 20)
    assert simulation.registry.aliases["champion"] == "1"


async def test_a_breach_near_the_end_counts_beyond_it() -> None:
    simulation = await promote()
    await wait(simulation, 580)
    simulation.numbers.value = 0.25
    await wait(simulation, 60)
    assert simulation.moves()[-1] == ("Regressed", "2", "1")


async def test_no_seconds_and_a_minimum() -> None:
    simulation = await promote({**WATCH, "max": None, "min": -1, "forSeconds": 0})
    simulation.numbers.value = -1.5
    await wait(simulation, 20)
    assert simulation.moves()[-1] == ("Regressed", "2", "1")
    assert (simulation.says("Regressed") or ("", ""))[1].startswith(
        "version 2 regressed: error-rate is -1.5, which is not >= -1, for 0 s;"
    )


async def test_the_first_version_has_nothing_to_go_back_to() -> None:
    simulation = world(onRegression=WATCH, gates=None)
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    simulation.numbers.value = 0.25
    await wait(simulation, 60)
    reason, message = simulation.says("Regressed") or ("", "")
    assert (reason, simulation.registry.aliases["champion"]) == ("Regressed", "2")
    assert message.endswith(
        "alias champion stays, because no version had it before: set spec.rollbackTo or register another version"
    )
    record = simulation.status().find_record("2")
    assert record
    assert record.bad is None


async def test_a_previous_version_that_was_deleted_is_no_target() -> None:
    simulation = await promote()
    simulation.registry.delete("1")
    simulation.numbers.value = 0.25
    await wait(simulation, 60)
    assert simulation.registry.aliases["champion"] == "2"
    assert "because version 1 no longer exists" in (simulation.says("Regressed") or ("", ""))[1]


async def test_a_candidate_that_is_judged_meanwhile_does_not_hide_a_breach() -> None:
    simulation = await promote(soakSeconds=0)
    simulation.edit(approval={})
    simulation.registry.aliases["staging"] = "3"
    simulation.numbers.value = 0.25
    await wait(simulation, 60)
    await simulation.settle()
    assert simulation.moves()[-1] == ("Regressed", "2", "1")
    assert simulation.phase_and_reason() == "AwaitingApproval: AwaitingApproval"
    assert (simulation.says("Regressed") or ("", ""))[0] == "Regressed"


async def test_no_candidate_is_promoted_over_a_version_that_is_out_of_bounds() -> None:
    """Else, the alias could only move back to that version later, which nobody watches any more."""
    simulation = await promote()
    simulation.numbers.value = 0.25
    await wait(simulation, 5)
    simulation.registry.aliases["staging"] = "3"
    await wait(simulation, 10)
    assert simulation.phase_and_reason() == "Pending: Breached"
    assert simulation.says("Promoted") == (
        "Breached",
        "version 3 meets every requirement; alias champion moves to it once error-rate of version 2 is <= 0.05 again, or the alias has "
        "moved back",
    )
    simulation.numbers.value = 0.0
    await simulation.settle()
    assert simulation.moves()[-1] == ("Promoted", "2", "3")
    simulation.numbers.value = 0.25
    await wait(simulation, 60)
    assert simulation.moves()[-1] == ("Regressed", "3", "2")


async def test_the_version_before_is_never_one_that_failed() -> None:
    """Version 2 regressed, and a person gave it the alias again before versions 3 and 4. When 4 regresses, nothing leads from 3 back to 2."""
    simulation = await promote()
    simulation.numbers.value = 0.25
    await wait(simulation, 60)
    simulation.numbers.value = 0.0
    simulation.edit(rollbackTo=back_to("2"))
    await simulation.settle()
    simulation.edit(rollbackTo=None)
    await simulation.settle()
    simulation.registry.aliases["staging"] = "3"
    await simulation.settle()
    simulation.registry.add("4", eval_loss=1.9)
    simulation.registry.aliases["staging"] = "4"
    await simulation.settle()
    simulation.numbers.value = 0.25
    await wait(simulation, 60)
    assert simulation.moves()[2:] == [
        ("RolledBack", "1", "2"),
        ("Promoted", "2", "3"),
        ("Promoted", "3", "4"),
        ("Regressed", "4", "3"),
    ]
    assert simulation.status().previous is None


async def test_a_window_does_not_hold_the_move_back() -> None:
    simulation = await promote()
    simulation.edit(windows=[{"name": "never", "schedule": "0 0 29 2 *", "durationSeconds": 60}])
    simulation.numbers.value = 0.25
    await wait(simulation, 60)
    assert simulation.registry.aliases["champion"] == "1"


async def test_what_a_person_chose_is_not_watched() -> None:
    simulation = await promote()
    simulation.numbers.value = 0.25
    await wait(simulation, 10)
    simulation.edit(rollbackTo=back_to("3"))
    await wait(simulation, 100)
    assert (simulation.registry.aliases["champion"], simulation.says("Regressed")) == ("3", None)
    simulation.edit(rollbackTo=PREVIOUS)
    await wait(simulation, 100)
    assert simulation.registry.aliases["champion"] == "2"
    assert (simulation.status().watch, simulation.says("Regressed")) == (None, None)


async def test_a_person_can_keep_a_version_that_is_out_of_bounds() -> None:
    simulation = await promote()
    simulation.numbers.value = 0.25
    await wait(simulation, 10)
    simulation.edit(rollbackTo=back_to("2"))
    await wait(simulation, 100)
    simulation.edit(rollbackTo=None)
    await wait(simulation, 100)
    assert (simulation.registry.aliases["champion"], simulation.says("Regressed")) == ("2", None)
    assert simulation.moves() == [("Promoted", "1", "2")]


async def test_a_git_revert_to_a_newer_version_is_watched_and_one_to_an_older_version_is_not() -> None:
    simulation = world(onRegression=WATCH, gates=None, source=back_to("1"))
    await simulation.settle()
    for version, watched in (("2", "2"), ("1", None), ("2", "2")):
        simulation.edit(source=back_to(version))
        await simulation.settle()
        watch = simulation.status().watch
        assert (simulation.registry.aliases["champion"], watch and watch.version) == (version, watched)
    assert [reason for reason, *_ in simulation.moves()] == ["Promoted", "Promoted", "Reverted", "Reverted"]


async def test_a_repair_goes_on_with_the_watch_and_an_adoption_ends_it() -> None:
    simulation = await promote()
    simulation.registry.aliases["champion"] = "3"
    await simulation.settle()
    assert simulation.moves()[-1] == ("Repaired", "3", "2")
    assert (simulation.says("Regressed") or ("", ""))[0] == "Watching"
    simulation.edit(onDrift="Adopt")
    simulation.registry.aliases["champion"] = "3"
    await simulation.settle()
    assert (simulation.status().promoted, simulation.status().watch) == ("3", None)
    assert simulation.says("Regressed") is None


MLFLOW_AWAY = Problem(ConditionReason.MLFLOW_UNREACHABLE, "away")


@pytest.mark.parametrize("is_suspended", [True, False], ids=["suspended", "the registry is away"])
async def test_while_nothing_can_move_a_breach_does_not_last(is_suspended: bool) -> None:
    simulation = await promote()
    simulation.numbers.value = 0.25
    await wait(simulation, 10)
    simulation.edit(suspend=is_suspended)
    simulation.registry.problem = None if is_suspended else MLFLOW_AWAY
    await wait(simulation, 100)
    assert (simulation.registry.aliases["champion"], simulation.says("Regressed")) == ("2", None)
    simulation.edit(suspend=None)
    simulation.registry.problem = None
    await wait(simulation, 25)
    assert (simulation.registry.aliases["champion"], (simulation.says("Regressed") or ("",))[0]) == (
        "2",
        "Breached",
    )
    await wait(simulation, 30)
    assert simulation.registry.aliases["champion"] == "1"


async def test_a_git_revert_to_a_newer_version_waits_for_the_number_of_the_version_with_the_alias() -> None:
    simulation = world(onRegression=WATCH, gates=None, source=back_to("1"))
    for version in ("1", "2", "3", "1", "2"):
        simulation.edit(source=back_to(version))
        await simulation.settle()
    simulation.numbers.value = 0.25
    await wait(simulation, 10)
    simulation.edit(source=back_to("3"))
    await wait(simulation, 10)
    assert (simulation.phase_and_reason(), simulation.registry.aliases["champion"]) == (
        "Pending: Breached",
        "2",
    )
    simulation.numbers.value = 0.0
    await simulation.settle()
    assert simulation.moves()[-1] == ("Reverted", "2", "3")


async def test_a_clock_that_is_set_back_does_not_delay_the_move() -> None:
    simulation = await promote()
    simulation.numbers.value = 0.25
    await wait(simulation, 10)
    simulation.seconds -= 3600
    await wait(simulation, 40)
    assert simulation.moves()[-1] == ("Regressed", "2", "1")


async def test_a_clock_that_jumps_forward_does_not_decide() -> None:
    simulation = await promote()
    simulation.numbers.value = 0.25
    await wait(simulation, 5)
    simulation.seconds += 3600
    await wait(simulation, 10)
    assert (simulation.registry.aliases["champion"], (simulation.says("Regressed") or ("",))[0]) == (
        "2",
        "Breached",
    )
    await wait(simulation, 20)
    assert simulation.moves()[-1] == ("Regressed", "2", "1")


async def test_passes_in_quick_succession_do_not_write_the_status_again() -> None:
    simulation = await promote()
    simulation.numbers.value = 0.25
    await wait(simulation, 10)
    writes = simulation.writes.count
    for _ in range(2):
        simulation.seconds += 1
        await simulation.operator.look("champion")
    assert simulation.writes.count == writes


async def test_without_the_field_the_condition_goes() -> None:
    simulation = await promote()
    simulation.edit(onRegression=None)
    await simulation.settle()
    assert (simulation.status().watch, simulation.says("Regressed")) == (None, None)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("writes", range(1, 9))
async def test_an_operator_that_dies_at_any_write_goes_back_once(writes: int, before: bool) -> None:
    simulation = await promote()
    simulation.numbers.value = 0.25
    simulation.writes.kill_soon(writes, before=before)
    try:
        await wait(simulation, 120)
    except KilledError:
        simulation.writes.spare()
        simulation.seconds += 120  # the Lease expires
        simulation.restart()
        await wait(simulation, 120)
    await simulation.settle()
    assert simulation.moves()[-1] == ("Regressed", "2", "1")
    assert [version for alias, version in simulation.registry.moves if alias == "champion"] == ["2", "1"]
    record = simulation.status().find_record("2")
    assert record
    assert record.bad == "Regressed"


async def test_the_token_of_the_secret_is_sent() -> None:
    simulation = world(
        onRegression={**WATCH, "prometheus": {**QUERY, "secretRef": {"name": "metrics"}}}, gates=None
    )
    token = base64.b64encode(b"t0ken\n").decode()
    simulation.registry.aliases |= {"staging": "2", "champion": "1"}
    await simulation.settle()
    assert simulation.says("Regressed") == (
        "CredentialsMissing",
        "error-rate of version 2 is unknown, and no alias moves: Secret metrics of spec.onRegression.prometheus.secretRef does not exist "
        "in namespace team: create the Secret; the operator asks again",
    )
    simulation.kube.keep(
        {"kind": "Secret", "metadata": {"name": "metrics"}, "data": {"PROMETHEUS_TOKEN": token}}
    )
    await simulation.settle()
    assert {token for _, token, _ in simulation.numbers.queries} == {"t0ken"}
    assert (simulation.says("Regressed") or ("", ""))[0] == "Watching"
