"""Every panel of the dashboard shows data that a real Prometheus scraped from a real operator, while jobs go through their phases."""

from __future__ import annotations

import json
import math
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from finetune_crds.contract import TerminationMessage, TrainResult
from fixtures.operator_processes.jobs import PREPARED, job, splits_given
from fixtures.operator_processes.world import OwnWorld
from integration.chart import CHART
from integration.monitoring.prometheus import Prometheus
from support.operator_process import metric
from support.process import running
from support.waiting import wait_for

Json = dict[str, Any]
MONITORING = CHART / "monitoring"
DASHBOARD: Json = json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))
GPUS: Json = {"nodes": 2, "gpusPerNode": 1}
HOUR = 3600
TRAINED = TerminationMessage(train=TrainResult(step=100, eval_loss=2.0, goodput=0.9, productive_seconds=1800))
P = "finetune_operator_"


def start_pods(world: OwnWorld, job_name: str, count: int) -> None:
    """Play the scheduler and the kubelet: the pods have a node, which started them an hour ago."""
    started = (datetime.now(UTC) - timedelta(seconds=HOUR)).strftime("%Y-%m-%dT%H:%M:%SZ")
    for pod in world.wait_pods(job_name, count):
        world.bind_pod(pod, "node-1")
        meta = pod["metadata"]
        status = {"status": {"startTime": started}}
        world.api.patch("Pod", meta["namespace"], meta["name"], status, status=True)


def count(world: OwnWorld, name: str, **labels: str) -> float:
    return metric(world.operator, f"{P}{name}", **labels)


def wait_count(world: OwnWorld, name: str, **labels: str) -> float:
    return wait_for(f"{name} {labels}", lambda: count(world, name, **labels))


def wait_scraped(prometheus: Prometheus, expression: str) -> None:
    """Wait until Prometheus has the value of a gauge that does not stay."""
    wait_for(expression, lambda: prometheus.query_range(f"{P}{expression} > 0", time.time() - 5))


def train(world: OwnWorld, prometheus: Prometheus) -> None:
    """Take a job with GPUs through all phases, with a restart after which the next failure would be final."""
    world.submit(job(distributed=GPUS, runPolicy={"maxRestarts": 1}))
    world.run_pods("tune-prep", 1)
    world.wait_phase("tune", "Preparing")
    world.end_pods("tune-prep", [0], [PREPARED])
    start_pods(world, "tune-train-1", 2)
    wait_scraped(prometheus, "idle_gpus_oldest_seconds")
    world.run_pods("tune-train-1", 2)
    world.wait_phase("tune", "Training")
    wait_scraped(prometheus, 'gpus{phase="Training"}')
    world.end_pods("tune-train-1", [1, 1], [None, None])
    start_pods(world, "tune-train-2", 2)
    world.run_pods("tune-train-2", 2)
    run_id = world.wait_phase("tune", "Training")["mlflow"]["runId"]
    wait_scraped(prometheus, "jobs_at_restart_limit")
    world.end_pods("tune-train-2", [0, 0], [TRAINED, None])
    world.wait_phase("tune", "Registering")
    world.mlflow.register(world.model, run_id)
    world.wait_phase("tune", "Succeeded")


def fail(world: OwnWorld) -> None:
    """Fail one job, let another one and a promotion wait for an MLflow that is away and for a version, and block a schedule."""
    world.submit(splits_given("wrong"))
    world.run_pods("wrong-train-1", 2)
    world.end_pods("wrong-train-1", [64, 64], [None, None])
    world.wait_phase("wrong", "Failed")
    world.submit(splits_given("away", tracking={"uri": "http://127.0.0.1:9"}))
    world.wait_condition("away", "Tracked", "MlflowUnreachable")
    promotion = {"model": "other", "alias": "champion", "source": {"type": "Version", "version": "7"}}
    schedule = {"schedule": "@daily", "timeZone": "No/Where", "jobTemplate": {"spec": {}}}
    for kind, spec in (("ModelPromotion", promotion), ("FineTuneSchedule", schedule)):
        meta = {"name": "champion", "namespace": world.namespace}
        world.api.create(
            {"apiVersion": "finetune.dev/v1alpha1", "kind": kind, "metadata": meta, "spec": spec}
        )
    wait_count(world, "promotions_ready", status="False")
    wait_count(world, "schedules_ready", status="False")


def shows_data(prometheus: Prometheus, expression: str, start: float, namespace: str) -> bool:
    """Whether a query of a panel has a number at any time of the test."""
    variables = {"$__rate_interval": "30s", "$__range": "10m", "$namespace": namespace}
    for name, value in variables.items():
        expression = expression.replace(name, value)
    samples = prometheus.query_range(expression, start)
    return any(math.isfinite(float(value)) for series in samples for _, value in series["values"])


def test_every_panel_shows_data_and_a_restart_counts_nothing_twice(
    own_world: OwnWorld, tmp_path: Any
) -> None:
    port = int(own_world.operator.environment["FINETUNE_METRICS_PORT"])
    start = time.time()
    with running(Prometheus(tmp_path, port, MONITORING / "rules.yaml")) as prometheus:
        train(own_world, prometheus)
        fail(own_world)
        queries = {
            (panel["title"], target["expr"])
            for panel in DASHBOARD["panels"]
            for target in panel.get("targets", ())
        }

        def list_empty() -> list[str]:
            return [
                title
                for title, expression in sorted(queries)
                if not shows_data(prometheus, expression, start, own_world.namespace)
            ]

        wait_for("every panel shows data", lambda: not list_empty(), 60, instead=list_empty, pause=1)
        variable = prometheus.label_values("job_namespace", f"{P}pod_seconds_total")
        assert variable == [own_world.namespace]
        assert {*prometheus.rules_health().values()} == {"ok"}
        wait_for("an alert", lambda: "FineTuneJobFailed" in prometheus.alerts(), instead=prometheus.alerts)

    check_counts(own_world)
    own_world.restart()
    own_world.settle(own_world.operator)
    zero = ("pod_seconds_total", "useful_pod_seconds_total", "job_restarts_total", "jobs_finished_total")
    assert {name: count(own_world, name) for name in zero} == dict.fromkeys(zero, 0)
    assert count(own_world, "jobs", phase="Succeeded") == 1


def check_counts(world: OwnWorld) -> None:
    """The counters are what the statuses say."""
    statuses = {name: world.status(name) for name in ("tune", "wrong", "away")}
    entries = [item for status in statuses.values() for item in status.get("usage", {}).get("jobs", ())]
    assert count(world, "pod_seconds_total") == sum(item["podSeconds"] for item in entries) > 2 * HOUR
    assert count(world, "gpu_seconds_total") == sum(item["gpuSeconds"] for item in entries) > 2 * HOUR
    usage = sum(item["podSeconds"] for item in statuses["tune"]["usage"]["jobs"])
    assert count(world, "finished_pod_seconds_total") == usage
    assert count(world, "useful_pod_seconds_total") == 2 * statuses["tune"]["productiveSeconds"] == 3600
    assert count(world, "job_restarts_total", cause="Failed") == 1
    assert count(world, "job_restarts_total") == 1
    assert [count(world, "jobs_finished_total", phase=phase) for phase in ("Succeeded", "Failed")] == [1, 1]
    assert count(world, "job_phase_seconds_count", phase="Training") >= 2
