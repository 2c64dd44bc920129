"""Gates that run a Job, on a real API server and a real MLflow: kube-controller-manager runs the Jobs, and the tests play their pods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from fixtures.operator_processes.registry import Registry
from fixtures.operator_processes.servers import Plane
from fixtures.operator_processes.world import OwnWorld, World
from support.waiting import wait_for

Json = dict[str, Any]
TESTS: Json = {"name": "tests", "type": "Job", "job": {"image": "tests:1"}}
ACCURATE: Json = {"name": "accurate", "type": "Metric", "metric": {"name": "acc", "min": 0.8, "job": "tests"}}
AS_GOOD: Json = {
    "name": "as-good",
    "type": "Comparison",
    "comparison": {"metric": "acc", "goal": "Maximize", "notWorseThan": {"absolute": 0.01}, "job": "tests"},
}


@dataclass
class Gated:
    """A promotion whose gates run Jobs, and the world around it."""

    world: World
    registry: Registry

    def jobs(self) -> list[Json]:
        """The Jobs of gates that are not being deleted."""
        jobs = self.world.api.list("Job", self.world.namespace, "finetune.dev/component=gate")
        return [job for job in jobs if "deletionTimestamp" not in job["metadata"]]

    def wait_job(self, version: str) -> str:
        """The name of the Job that judges a version."""

        def find() -> str | None:
            for job in self.jobs():
                if job["metadata"]["annotations"]["finetune.dev/version"] == version:
                    return str(job["metadata"]["name"])
            return None

        return wait_for(f"a Job judges version {version}", find, instead=self.registry.status)

    def wait_reason(self, reason: str) -> Json:
        def seen() -> Json | None:
            condition = self.registry.condition("GatesPassed")
            return condition if condition.get("reason") == reason else None

        return wait_for(f"the reason is {reason}", seen, instead=self.registry.status)

    def run_of(self, job: str) -> Json:
        """The MLflow run of a Job."""
        body = self.world.api.get("Job", self.world.namespace, job)
        assert body
        run_id = body["metadata"]["annotations"]["finetune.dev/mlflow-run"]
        return dict(self.world.mlflow.get("runs/get", run_id=run_id)["run"])

    def remove_pods(self) -> None:
        """Play the kubelet: pods that are to be deleted stop."""
        wait_for("the pods are gone", lambda: not self.world.remaining_pods())


@pytest.fixture
def gated(world: World) -> Gated:
    return Gated(world, Registry(world.api, world.mlflow, world.namespace, f"model-{world.namespace}"))


@pytest.fixture
def own_gated(own_world: OwnWorld) -> Gated:
    registry = Registry(own_world.api, own_world.mlflow, own_world.namespace, f"model-{own_world.namespace}")
    return Gated(own_world, registry)


def test_a_version_is_promoted_by_the_numbers_of_a_job_that_runs_once(gated: Gated, plane: Plane) -> None:
    world, registry = gated.world, gated.registry
    first = registry.version(2.0)
    registry.point("staging", first)
    registry.apply(gates=[TESTS, ACCURATE, AS_GOOD])
    job = gated.wait_job(first)
    [pod] = world.run_pods(job, 1)
    message = gated.wait_reason("GateRunning")["message"]
    assert f"Job {job} for version {first} " in message
    spec = pod["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["activeDeadlineSeconds"] == 3600
    variables = {item["name"]: item["value"] for item in spec["containers"][0]["env"]}
    run = gated.run_of(job)["info"]
    assert variables["MODEL_URI"] == f"models:/{registry.model}/{first}"
    assert (variables["MLFLOW_TRACKING_URI"], variables["MLFLOW_RUN_ID"]) == (world.mlflow.uri, run["run_id"])

    # Of both, the number in the message counts.
    world.mlflow.log_metrics(run["run_id"], acc=0.1, extra=7.0)
    world.end_pods(job, [0], ['{"acc": 0.9}'])
    status = registry.wait("Promoted", first)
    [result] = status["gateResults"]
    assert (result["version"], result["job"], result["outcome"]) == (first, job, "Succeeded")
    assert result["metrics"] == {"acc": "0.9", "extra": "7.0"}
    assert gated.run_of(job)["info"]["status"] == "FINISHED"

    def is_released() -> bool:
        body = world.api.get("Job", world.namespace, job)
        return body is not None and body["spec"].get("ttlSecondsAfterFinished") == 24 * 3600

    wait_for("the Job may be deleted", is_released)
    # Kubernetes deletes it later. The next version is compared with the number in the status.
    world.api.delete("Job", world.namespace, job)
    second = registry.version(1.0)
    registry.point("staging", second)
    second_job = gated.wait_job(second)
    world.end_pods(second_job, [0], ['{"acc": 0.85}'])
    status = registry.wait("Refused", first)
    assert [item["verdict"] for item in status["gates"]["verdicts"]] == ["Passed", "Passed", "Failed"]
    assert [item["metadata"]["name"] for item in gated.jobs()] == [second_job]
    shown = plane.run_kubectl(world.namespace, "get", "mprom", "champion")
    assert "Refused GateFailed" in shown


def test_a_job_that_fails_refuses_the_version(gated: Gated) -> None:
    world, registry = gated.world, gated.registry
    version = registry.version(2.0)
    registry.point("staging", version)
    registry.apply(gates=[TESTS])
    job = gated.wait_job(version)
    world.end_pods(job, [1], ["an answer is wrong"])
    status = registry.wait("Refused", None)
    [verdict] = status["gates"]["verdicts"]
    assert verdict["message"] == (
        f"Job {job} failed (exit code 1), see kubectl logs -n {world.namespace} job/{job}: an answer is wrong"
    )
    assert gated.run_of(job)["info"]["status"] == "FAILED"


def test_a_changed_gate_runs_anew_and_suspend_stops_what_runs(gated: Gated) -> None:
    world, registry = gated.world, gated.registry
    version = registry.version(2.0)
    registry.point("staging", version)
    registry.apply(gates=[TESTS])
    first = gated.wait_job(version)
    world.run_pods(first, 1)
    registry.patch(gates=[{**TESTS, "job": {"image": "tests:2"}}])
    wait_for(
        "the first Job is deleted", lambda: first not in [item["metadata"]["name"] for item in gated.jobs()]
    )
    second = gated.wait_job(version)
    assert second != first
    registry.patch(suspend=True)
    registry.wait("Suspended", None)
    wait_for("no Job is left", lambda: gated.jobs() == [])
    gated.remove_pods()
    registry.patch(suspend=None)
    assert gated.wait_job(version) == second
    world.end_pods(second, [0], [""])
    registry.wait("Promoted", version)


def test_a_template_that_the_api_server_refuses_is_named_and_can_be_corrected(gated: Gated) -> None:
    registry = gated.registry
    version = registry.version(2.0)
    registry.point("staging", version)
    template = {"spec": {"nodeSelectr": {"gpu": "yes"}}}
    registry.apply(gates=[{**TESTS, "job": {"image": "tests:1", "template": template}}])
    message = gated.wait_reason("GateNotStarted")["message"]
    assert 'unknown field "spec.template.spec.nodeSelectr"' in message
    assert registry.status()["phase"] == "Pending"
    registry.patch(gates=[TESTS])
    job = gated.wait_job(version)
    gated.world.end_pods(job, [0], [""])
    registry.wait("Promoted", version)


def test_an_operator_that_is_killed_runs_one_job_and_reads_its_end(own_gated: Gated) -> None:
    world, registry = own_gated.world, own_gated.registry
    assert isinstance(world, OwnWorld)
    version = registry.version(2.0)
    registry.point("staging", version)
    registry.apply(gates=[TESTS, ACCURATE])
    job = own_gated.wait_job(version)
    uid = own_gated.jobs()[0]["metadata"]["uid"]
    run_id = own_gated.run_of(job)["info"]["run_id"]
    # Between the Job and the status that knows of it, and while its pod runs and ends.
    world.operator.kill()
    world.end_pods(job, [0], ['{"acc": 0.9}'])
    world.operator.start()
    registry.wait("Promoted", version)
    world.restart()
    world.operator.kill()
    world.operator.start()
    [only] = own_gated.jobs()
    assert only["metadata"]["uid"] == uid
    assert own_gated.run_of(job)["info"]["run_id"] == run_id
    tag = f"tags.`finetune.dev/version` = '{version}' and tags.`finetune.dev/model` = '{registry.model}'"
    experiment = own_gated.run_of(job)["info"]["experiment_id"]
    found = world.mlflow.post("runs/search", {"experiment_ids": [experiment], "filter": tag})
    assert len(found["runs"]) == 1


def test_a_promotion_that_is_deleted_takes_its_job_with_it_and_closes_the_run(gated: Gated) -> None:
    world, registry = gated.world, gated.registry
    version = registry.version(2.0)
    registry.point("staging", version)
    registry.apply(gates=[TESTS])
    job = gated.wait_job(version)
    world.run_pods(job, 1)
    run_id = gated.run_of(job)["info"]["run_id"]
    world.api.delete("ModelPromotion", world.namespace, "champion")
    wait_for("no Job is left", lambda: gated.jobs() == [])

    def status() -> str:
        return str(world.mlflow.get("runs/get", run_id=run_id)["run"]["info"]["status"])

    wait_for("the run is closed", lambda: status() == "KILLED", instead=status)
