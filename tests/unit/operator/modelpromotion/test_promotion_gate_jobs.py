"""Gates that run a Job: once for each version and digest, whatever happens to the operator, to the promotion and to the Job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.errors import Problem
from finetune_operator.kube import KubeError
from finetune_operator.modelpromotion.observe import read_promotion
from fixtures.operator_in_memory.kills import assert_one_job, promote_with_kills
from fixtures.operator_in_memory.promotions import World
from unit.operator.modelpromotion.champion import world

Json = dict[str, Any]
TESTS: Json = {"name": "tests", "type": "Job", "job": {"image": "tests:1"}}
ACCURATE: Json = {"name": "accurate", "type": "Metric", "metric": {"name": "acc", "min": 0.8, "job": "tests"}}
AS_GOOD: Json = {
    "name": "as-good",
    "type": "Comparison",
    "comparison": {
        "metric": "acc",
        "goal": "Maximize",
        "notWorseThan": {"absolute": 0.01},
        "job": "tests",
    },
}


def gated(*gates: Json, **spec: Any) -> World:
    """A promotion with these gates, whose candidate is version 2."""
    simulation = world(gates=list(gates), **spec)
    simulation.registry.aliases["staging"] = "2"
    return simulation


def verdicts(simulation: World) -> dict[str, tuple[str, str]]:
    """Verdict and message of each gate, by its name."""
    gates = simulation.status().gates
    return {item.name: (item.verdict, item.message) for item in gates.verdicts} if gates else {}


async def test_the_job_runs_once_and_its_numbers_decide() -> None:
    simulation = gated(TESTS, ACCURATE)
    await simulation.settle()
    job = simulation.jobs()["2"]
    name = job["metadata"]["name"]
    assert simulation.phase_and_reason() == "Pending: GateRunning"
    assert verdicts(simulation)["tests"] == ("Inconclusive", f"Job {name} for version 2 starts")
    assert verdicts(simulation)["accurate"] == verdicts(simulation)["tests"]

    simulation.add_pod("2", phase="Running")
    await simulation.settle()
    assert verdicts(simulation)["tests"][1] == (
        f"Job {name} for version 2 runs: see kubectl logs -n team job/{name}"
    )

    simulation.end_job("2", message='{"acc": 0.85}')
    await simulation.settle()
    assert simulation.phase_and_reason() == "Promoted: Promoted"
    [result] = simulation.status().gate_results
    assert (result.version, result.job, result.outcome, result.metrics, result.run_id) == (
        "2",
        name,
        "Succeeded",
        {"acc": "0.85"},
        "run-1",
    )
    assert simulation.runs.runs["run-1"].status == "FINISHED"
    assert simulation.jobs()["2"]["spec"]["ttlSecondsAfterFinished"] == 24 * 3600

    # Kubernetes deletes the Job later, and somebody moves the alias back and forth.
    del simulation.kube.objects["Job", "team", name]
    simulation.edit(source={"type": "Version", "version": "1"}, gates=[])
    await simulation.settle()
    simulation.edit(source={"type": "Version", "version": "2"}, gates=[TESTS, ACCURATE])
    simulation.restart()
    await simulation.settle()
    assert simulation.phase_and_reason() == "Promoted: Reverted"
    assert simulation.kube.done("create").count(f"Job/{name}") == 1


async def test_numbers_of_the_mlflow_run_count_too() -> None:
    simulation = gated(TESTS, ACCURATE)
    await simulation.settle()
    simulation.runs.log("run-1", acc=0.7, other=1.0)
    simulation.end_job("2", message='{"loss": 2}')
    await simulation.settle()
    assert simulation.phase_and_reason() == "Refused: GateFailed"
    [result] = simulation.status().gate_results
    assert result.metrics == {"acc": "0.7", "loss": "2.0", "other": "1.0"}
    assert verdicts(simulation)["accurate"] == ("Failed", "acc is 0.7, which does not meet >= 0.8")


async def test_a_failed_job_refuses_the_version_and_its_log_is_named() -> None:
    simulation = gated(TESTS, ACCURATE)
    await simulation.settle()
    name = simulation.jobs()["2"]["metadata"]["name"]
    simulation.end_job("2", code=1, message="two answers are wrong\nAssertionError")
    await simulation.settle()
    assert simulation.phase_and_reason() == "Refused: GateFailed"
    failure = f"Job {name} failed (exit code 1), see kubectl logs -n team job/{name}: two answers are wrong\nAssertionError"
    assert verdicts(simulation) == {"tests": ("Failed", failure), "accurate": ("Inconclusive", failure)}
    assert simulation.runs.runs["run-1"].status == "FAILED"
    # A result is final for the version and the gate.
    simulation.restart()
    await simulation.settle()
    assert simulation.kube.done("create").count(f"Job/{name}") == 1


async def test_another_gate_and_another_version_run_anew_and_stop_what_runs() -> None:
    simulation = gated(TESTS)
    await simulation.settle()
    first = simulation.jobs()["2"]["metadata"]["name"]
    simulation.edit(gates=[{**TESTS, "job": {"image": "tests:2"}}])
    await simulation.settle()
    second = simulation.jobs()["2"]["metadata"]["name"]
    assert first != second
    assert simulation.kube.done("delete") == [f"Job/{first}"]
    # Another limit is no other Job.
    simulation.edit(gates=[{**TESTS, "job": {"image": "tests:2"}}, ACCURATE])
    await simulation.settle()
    assert simulation.jobs()["2"]["metadata"]["name"] == second
    simulation.registry.aliases["staging"] = "3"
    await simulation.settle()
    assert list(simulation.jobs()) == ["3"]


async def test_a_comparison_measures_the_version_with_the_alias_too() -> None:
    simulation = gated(TESTS, AS_GOOD)
    simulation.registry.aliases["champion"] = "1"
    await simulation.settle()
    assert sorted(simulation.jobs()) == ["1", "2"]
    simulation.end_job("2", message='{"acc": 0.8}')
    await simulation.settle()
    assert verdicts(simulation)["as-good"][0] == "Inconclusive"
    simulation.end_job("1", message='{"acc": 0.9}')
    await simulation.settle()
    assert verdicts(simulation)["as-good"] == (
        "Failed",
        "acc is 0.8, which does not meet >= 0.89, since version 1, which has the alias, has 0.9",
    )
    # The next candidate is compared with the recorded number.
    del simulation.kube.objects["Job", "team", simulation.jobs()["1"]["metadata"]["name"]]
    simulation.registry.aliases["staging"] = "3"
    await simulation.settle()
    assert "1" not in simulation.jobs()
    simulation.end_job("3", message='{"acc": 0.895}')
    await simulation.settle()
    assert simulation.phase_and_reason() == "Promoted: Promoted"


async def test_no_job_starts_for_a_version_that_another_gate_refuses() -> None:
    loss = {"name": "loss", "type": "Metric", "metric": {"name": "eval_loss", "max": 1.0}}
    simulation = gated(loss, TESTS)
    await simulation.settle()
    assert simulation.phase_and_reason() == "Refused: GateFailed"
    assert simulation.jobs() == {}


@pytest.mark.parametrize(
    "spec",
    [{"suspend": True}, {"rollbackTo": {"type": "Version", "version": "1"}}],
    ids=["suspended", "rolled back"],
)
async def test_what_runs_is_stopped_and_runs_again_afterwards(spec: Json) -> None:
    simulation = gated(TESTS)
    await simulation.settle()
    simulation.edit(**spec)
    await simulation.settle()
    assert simulation.jobs() == {}
    assert simulation.runs.runs["run-1"].status == "KILLED"
    undo: Json = dict.fromkeys(spec)
    simulation.edit(**undo)
    await simulation.settle()
    assert list(simulation.jobs()) == ["2"]
    # The MLflow run is that of the first Job.
    assert list(simulation.runs.runs) == ["run-1"]


async def test_a_promotion_that_is_deleted_stops_its_job_at_once() -> None:
    simulation = gated(TESTS, onDelete="RemoveAlias")
    await simulation.settle()
    simulation.registry.problem = Problem(ConditionReason.MLFLOW_UNREACHABLE, "MLflow is away")
    simulation.remove()
    await simulation.settle()
    assert simulation.jobs() == {}
    assert simulation.runs.runs["run-1"].status == "KILLED"


async def test_the_runs_of_a_deleted_promotion_are_closed_unless_their_jobs_have_ended() -> None:
    simulation = gated(TESTS, AS_GOOD)
    simulation.registry.aliases["champion"] = "1"
    await simulation.settle()
    simulation.end_job("1")
    await simulation.settle()
    promotion = read_promotion(simulation.kube.objects["ModelPromotion", "team", "champion"])
    await simulation.operator.reconciler.applier.child_jobs.close_runs_of_deleted(promotion)
    statuses = {run.tags["finetune.dev/version"]: run.status for run in simulation.runs.runs.values()}
    assert statuses == {"1": "FINISHED", "2": "KILLED"}


async def test_a_job_that_its_queue_suspends_is_named() -> None:
    simulation = gated(TESTS)
    await simulation.settle()
    job = simulation.jobs()["2"]
    simulation.kube.keep({**job, "spec": {**job["spec"], "suspend": True}})
    await simulation.settle()
    message = f"Job {job['metadata']['name']} for version 2 was suspended, for example by Kueue: resume it"
    assert verdicts(simulation)["tests"] == ("Inconclusive", message)


async def test_a_job_goes_on_while_the_registry_is_away() -> None:
    simulation = gated(TESTS)
    await simulation.settle()
    simulation.registry.problem = Problem(ConditionReason.MLFLOW_UNREACHABLE, "MLflow is away")
    await simulation.settle()
    assert list(simulation.jobs()) == ["2"]


async def test_the_failure_of_a_job_that_somebody_deletes_counts_for_nothing() -> None:
    simulation = gated(TESTS)
    await simulation.settle()
    simulation.end_job("2", code=143)
    job = simulation.jobs()["2"]
    name = job["metadata"]["name"]
    deleted = {**job["metadata"], "deletionTimestamp": "2026-08-01T12:00:00Z"}
    simulation.kube.keep({**job, "metadata": deleted})
    await simulation.settle()
    assert simulation.phase_and_reason() == "Pending: GateRunning"
    assert simulation.status().gate_results == []
    for key in [key for key in simulation.kube.objects if key[0] in ("Job", "Pod")]:
        del simulation.kube.objects[key]
    await simulation.settle()
    assert simulation.jobs()["2"]["metadata"]["name"] == name
    assert "deletionTimestamp" not in simulation.jobs()["2"]["metadata"]


async def test_a_version_of_another_registry_has_no_result_although_its_number_is_the_same() -> None:
    simulation = gated(TESTS)
    await simulation.settle()
    simulation.end_job("2")
    await simulation.settle()
    assert simulation.phase_and_reason() == "Promoted: Promoted"
    simulation.registry.number = 2
    simulation.registry.aliases = {"staging": "2"}
    for version in ("1", "2", "3"):
        simulation.registry.add(version, eval_loss=2.0)
    await simulation.settle()
    assert simulation.phase_and_reason() == "Blocked: RegistryChanged"
    first = simulation.jobs()["2"]["metadata"]["name"]
    simulation.edit(onDrift="Adopt")
    await simulation.settle()
    assert simulation.phase_and_reason() == "Pending: GateRunning"
    started = [item for item in simulation.kube.done("create") if item.startswith("Job/")]
    assert len(started) == 2
    assert started[0] == f"Job/{first}"


async def test_a_version_that_was_restored_under_its_number_has_no_result() -> None:
    simulation = gated(TESTS)
    await simulation.settle()
    simulation.end_job("2", code=1)
    await simulation.settle()
    simulation.registry.aliases["staging"] = "3"
    await simulation.settle()
    simulation.end_job("3")
    await simulation.settle()
    # The database was restored, and another job has registered version 2.
    simulation.registry.versions["2"] = replace(simulation.registry.versions["2"], run_id="other")
    simulation.registry.aliases["staging"] = "2"
    await simulation.settle()
    assert simulation.phase_and_reason() == "Blocked: RegistryChanged"


async def test_a_gate_that_is_changed_after_its_result_runs_anew() -> None:
    simulation = gated(TESTS)
    await simulation.settle()
    simulation.end_job("2", code=1)
    await simulation.settle()
    assert simulation.phase_and_reason() == "Refused: GateFailed"
    simulation.edit(gates=[{**TESTS, "job": {"image": "tests:2"}}])
    await simulation.settle()
    assert simulation.phase_and_reason() == "Pending: GateRunning"
    # The first gate has its result still.
    simulation.edit(gates=[TESTS])
    await simulation.settle()
    assert simulation.phase_and_reason() == "Refused: GateFailed"


async def test_results_are_bounded_and_needed_ones_are_kept() -> None:
    simulation = gated(TESTS, AS_GOOD)
    simulation.registry.aliases["champion"] = "1"
    await simulation.settle()
    simulation.end_job("1", message='{"acc": 0.9}')
    simulation.end_job("2", message='{"acc": 0.1}')
    await simulation.settle()
    for number in range(4, 24):
        simulation.registry.add(str(number))
        simulation.registry.aliases["staging"] = str(number)
        await simulation.settle()
        simulation.end_job(str(number), message='{"acc": 0.1}')
        await simulation.settle()
    versions = [result.version for result in simulation.status().gate_results]
    assert versions == [*(str(number) for number in range(23, 8, -1)), "1"]
    assert (
        list(simulation.kube.done("create")).count(f"Job/{simulation.jobs()['1']['metadata']['name']}") == 1
    )


async def test_drift_does_not_stop_a_job() -> None:
    simulation = gated(TESTS, AS_GOOD)
    simulation.registry.aliases["champion"] = "1"
    await simulation.settle()
    simulation.registry.aliases["champion"] = "3"
    await simulation.settle()
    assert simulation.registry.aliases["champion"] == "1"
    assert [item for item in simulation.kube.done("delete") if item.startswith("Job/")] == []


OBSTACLES: dict[str, tuple[Json, str]] = {
    "an image that cannot be pulled": (
        {
            "phase": "Pending",
            "containerStatuses": [
                {
                    "name": "main",
                    "image": "tests:1",
                    "state": {"waiting": {"reason": "ErrImagePull", "message": "not found"}},
                }
            ],
        },
        "pod {name}-0 cannot pull tests:1: ErrImagePull: not found",
    ),
    "a configuration that is wrong": (
        {
            "phase": "Pending",
            "containerStatuses": [
                {
                    "name": "main",
                    "state": {"waiting": {"reason": "CreateContainerConfigError", "message": "no Secret"}},
                }
            ],
        },
        "pod {name}-0 cannot start main: no Secret",
    ),
    "no node": (
        {
            "phase": "Pending",
            "conditions": [{"type": "PodScheduled", "reason": "Unschedulable", "message": "0/2 nodes"}],
        },
        "pod {name}-0 cannot be scheduled: 0/2 nodes",
    ),
}


@pytest.mark.parametrize(("status", "expected"), OBSTACLES.values(), ids=OBSTACLES)
async def test_what_keeps_the_pod_from_running_is_named(status: Json, expected: str) -> None:
    simulation = gated(TESTS)
    await simulation.settle()
    name = simulation.jobs()["2"]["metadata"]["name"]
    simulation.add_pod("2", **status)
    await simulation.settle()
    assert simulation.phase_and_reason() == "Pending: GateInconclusive"
    message = f"Job {name} for version 2 cannot run: {expected.format(name=name)}"
    assert verdicts(simulation)["tests"] == ("Inconclusive", message)


async def test_a_quota_that_refuses_pods_is_named() -> None:
    simulation = gated(TESTS)
    await simulation.settle()
    meta = simulation.jobs()["2"]["metadata"]
    about = {"uid": meta["uid"]}
    simulation.kube.keep(
        {
            "kind": "Event",
            "metadata": {"name": "refused"},
            "involvedObject": about,
            "reason": "FailedCreate",
            "message": "exceeded quota: pods",
        }
    )
    await simulation.settle()
    assert verdicts(simulation)["tests"] == (
        "Inconclusive",
        f"Job {meta['name']} for version 2 cannot run: pods of Job {meta['name']} cannot be created: exceeded quota: pods",
    )


async def test_a_job_that_the_api_server_refuses_is_reported_once_until_it_is_corrected() -> None:
    simulation = gated(TESTS)
    simulation.kube.refuse["create", "Job"] = KubeError(422, 'unknown field "spec.template.spec.foo"')
    await simulation.operator.look("champion")
    reason, message = simulation.says("GatesPassed") or ("", "")
    name = message.split()[7]
    assert (reason, message) == (
        "GateNotStarted",
        f'version 2 cannot be judged yet: Job {name} cannot be created: unknown field "spec.template.spec.foo"',
    )
    assert simulation.phase_and_reason() == "Pending: GateNotStarted"
    written = simulation.kube.objects["ModelPromotion", "team", "champion"]["metadata"]["resourceVersion"]
    await simulation.operator.look("champion")
    after = simulation.kube.objects["ModelPromotion", "team", "champion"]["metadata"]["resourceVersion"]
    assert written == after
    del simulation.kube.refuse["create", "Job"]
    await simulation.settle()
    assert simulation.phase_and_reason() == "Pending: GateRunning"


async def test_the_job_of_somebody_else_is_not_taken() -> None:
    simulation = gated(TESTS)
    await simulation.settle()
    job = simulation.jobs()["2"]
    meta = {**job["metadata"], "ownerReferences": []}
    simulation.kube.keep({**job, "metadata": meta})
    await simulation.operator.look("champion")
    assert simulation.phase_and_reason() == "Pending: GateNotStarted"
    assert (simulation.says("GatesPassed") or ("", ""))[1].endswith(
        "exists and does not belong to this promotion: delete the Job"
    )


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
async def test_an_operator_that_dies_at_any_write_runs_one_job(before: bool) -> None:
    async for simulation in promote_with_kills(
        lambda: gated(TESTS, ACCURATE),
        lambda world: world.end_job("2", message='{"acc": 0.9}'),
        before=before,
    ):
        assert_one_job(simulation)
        assert "ttlSecondsAfterFinished" in simulation.jobs()["2"]["spec"]
