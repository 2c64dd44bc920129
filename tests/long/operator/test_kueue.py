"""Two jobs in a queue of the real Kueue, which preempts one for the other. The tests play the scheduler and the kubelet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import binaries
from cluster.controlplane import ControlPlane
from finetune_crds.contract import PodError, TerminationMessage
from fixtures.operator_processes.jobs import TRAINED, splits_given
from fixtures.operator_processes.operators import new_namespace
from fixtures.operator_processes.servers import create_crds, list_our_crds
from fixtures.operator_processes.world import World
from support.api import Api
from support.documents import Page
from support.manifests import parse
from support.mlflow_server import Mlflow
from support.operator_process import operator_process, watching
from support.process import Process, running
from support.waiting import wait_for

Json = dict[str, Any]
SAVED = TerminationMessage(
    checkpoint_step=40, error=PodError(reason="Preempted", message="stopped by SIGTERM")
)


@pytest.fixture
def world(mlflow_server: Mlflow, tmp_path: Path) -> Iterator[World]:
    """A namespace with the queue of the documentation, on a control plane with Kueue and the operator."""
    program = binaries.path("kueue")
    with running(ControlPlane(tmp_path / "plane")) as plane:
        api = Api(plane.kubeconfig)
        kueue_crds = sorted((program.parent / "config/components/crd/bases").glob("*.yaml"))
        create_crds(api, [*list_our_crds(), *kueue_crds])
        namespace = new_namespace(api)
        create_queue(api, namespace)
        kueue = Process(
            "kueue", [str(program)], tmp_path / "kueue.log", {"KUBECONFIG": str(plane.kubeconfig)}
        )
        environment = watching(namespace, mlflow_server.uri, resync_seconds=1)
        operator = operator_process(plane.kubeconfig, tmp_path / "operator.log", environment)
        with running(kueue), running(operator):
            yield World(api, mlflow_server, namespace)
        print(operator.log.read_text(encoding="utf-8"))


def create_queue(api: Api, namespace: str) -> None:
    """Create the queue of the documentation, which preempts jobs with a lower priority."""
    (block,) = (item for item in Page("docs/getting-started-gpu.md").blocks("yaml") if item.title == "Kueue")
    for body in parse(block.text):
        if body["kind"] == "ClusterQueue":
            body["spec"]["preemption"] = {"withinClusterQueue": "LowerPriority"}
        if body["kind"] == "LocalQueue":
            body["metadata"]["namespace"] = namespace
        api.create(body, strict=True)
    priority = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "urgent"}}
    api.create({**priority, "value": 1000})


def submit(world: World, name: str, priority: str = "") -> None:
    """Submit a job that takes the whole quota."""
    template: Json = {"spec": {"priorityClassName": priority}} if priority else {}
    world.submit(
        splits_given(
            name,
            distributed={"nodes": 2, "gpusPerNode": 8},
            checkpoint={"uri": f"s3://runs/{name}"},
            runPolicy={"queueName": "gpus", "maxRestarts": 0},
            pods={"train": {"template": template}},
        )
    )


def run_pods(world: World, job: str) -> list[Json]:
    """Play the scheduler and the kubelet, when Kueue has admitted the Job."""
    pods = world.wait_pods(job, 2)
    for pod in pods:
        world.bind_pod(pod, "node-a")
    return world.run_pods(job, 2)


def test_a_job_that_kueue_preempts_goes_on_when_the_other_one_has_ended(world: World) -> None:
    submit(world, "patient")
    pods = run_pods(world, "patient-train-1")
    world.wait_phase("patient", "Training")
    uid = pods[0]["metadata"]["ownerReferences"][0]["uid"]

    submit(world, "urgent", "urgent")
    evicted = "Kueue evicted Job patient-train-1: Preempted to accommodate a workload"
    wait_for("the preemption", lambda: evicted in world.condition("patient", "Trained")["message"])
    world.stop_pods("patient-train-1", pods, SAVED)
    world.wait_phase("patient", "Queued")
    wait_for("what Kueue says", lambda: evicted in world.status("patient")["attempts"][0]["message"])
    (end,) = world.status("patient")["attempts"]
    assert [end[key] for key in ("attempt", "cause", "reason", "exitCode", "checkpointStep")] == [
        1,
        "Preempted",
        "Preempted",
        75,
        40,
    ]
    assert end["message"].startswith(evicted)

    run_pods(world, "urgent-train-1")
    status = world.wait_phase("urgent", "Training")
    lack = "attempt 1 waits in Kueue's queue gpus: couldn't assign flavors to pod set main: insufficient unused quota"
    wait_for("what Kueue says", lambda: lack in world.condition("patient", "Trained")["message"])
    message = world.condition("patient", "Trained")["message"]
    assert message.endswith("; its pods were stopped, and it resumes from the newest checkpoint")
    world.mlflow.register(world.model, status["mlflow"]["runId"])
    world.end_pods("urgent-train-1", [0, 0], [TRAINED, None])

    pods = run_pods(world, "patient-train-1")
    status = world.wait_phase("patient", "Training")
    assert pods[0]["metadata"]["ownerReferences"][0]["uid"] == uid
    assert (status["attempt"], status["restarts"], len(status["attempts"])) == (1, 0, 1)
