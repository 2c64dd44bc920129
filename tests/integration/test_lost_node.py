"""A node that is lost: its pods cannot stop, and what ran on it goes on elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fixtures.operator_processes.jobs import EVALUATED, PREPARED, TRAINED, job, splits_given
from fixtures.operator_processes.world import World
from support.api import Api
from support.waiting import wait_for

Json = dict[str, Any]
STAYS = "which is not ready: Kubernetes deletes the pod when its containers stop, or when the node is deleted or gets the taint"


@pytest.fixture
def node(api: Api, namespace: str) -> Iterator[str]:
    """A node without a kubelet."""
    name = f"node-of-{namespace}"
    api.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
    yield name
    api.delete("Node", "", name)


def run_on(world: World, node: str, job_name: str, count: int = 1) -> Json:
    """Play the scheduler and the kubelet; the last pod is on the node."""
    last = world.wait_pods(job_name, count)[-1]
    world.bind_pod(last, node)
    return world.run_pods(job_name, count)[-1]


def find_failure(world: World) -> Json:
    failure: Json = world.status("tune")["lastFailure"]
    return {name: failure.get(name) for name in ("reason", "pod", "node", "attempt")}


def is_terminating(world: World, pod: Json) -> bool:
    body = world.api.get("Pod", world.namespace, pod["metadata"]["name"])
    return body is not None and "deletionTimestamp" in body["metadata"]


def test_training_goes_on_elsewhere_under_its_next_name_at_no_cost(world: World, node: str) -> None:
    world.submit(splits_given(runPolicy={"maxRestarts": 0}))
    lost_pod = run_on(world, node, "tune-train-1", 2)
    world.wait_phase("tune", "Training")
    world.lose_pod(lost_pod)

    world.run_pods("tune-train-2", 2)
    status = world.wait_phase("tune", "Training")
    name = lost_pod["metadata"]["name"]
    assert (status["attempt"], status["restarts"]) == (2, 0)
    assert find_failure(world) == {"reason": "NodeLost", "pod": name, "node": node, "attempt": 1}
    assert f"pod {name} is still on node {node}, {STAYS}" in status["lastFailure"]["message"]
    assert is_terminating(world, lost_pod)

    world.mlflow.register(world.model, status["mlflow"]["runId"])
    world.end_pods("tune-train-2", [0, 0], [TRAINED, None])
    world.wait_phase("tune", "Succeeded")


def test_a_preparation_that_its_node_does_not_stop_in_time_starts_again(world: World, node: str) -> None:
    template = {"spec": {"terminationGracePeriodSeconds": 1}}
    world.submit(job(pods={"prepare": {"template": template}}))
    lost_pod = run_on(world, node, "tune-prep")
    world.wait_phase("tune", "Preparing")
    first = world.api.get("Job", world.namespace, "tune-prep")
    world.api.delete("Pod", world.namespace, lost_pod["metadata"]["name"])

    wait_for_another(world, "tune-prep", first)
    assert find_failure(world) == {
        "reason": "NodeLost",
        "pod": lost_pod["metadata"]["name"],
        "node": node,
        "attempt": 0,
    }
    assert is_terminating(world, lost_pod)
    world.run_pods("tune-prep", 1)
    world.end_pods("tune-prep", [0], [PREPARED])
    world.wait_pods("tune-train-1", 2)


def test_an_evaluation_starts_again_elsewhere(world: World, node: str) -> None:
    world.submit(splits_given(evaluation={"metrics": ["Accuracy"]}))
    world.run_pods("tune-train-1", 2)
    run_id = world.wait_phase("tune", "Training")["mlflow"]["runId"]
    world.mlflow.register(world.model, run_id)
    world.end_pods("tune-train-1", [0, 0], [TRAINED, None])
    lost_pod = run_on(world, node, "tune-evaluate")
    world.wait_phase("tune", "Evaluating")
    first = world.api.get("Job", world.namespace, "tune-evaluate")
    world.lose_pod(lost_pod)

    wait_for_another(world, "tune-evaluate", first)
    assert is_terminating(world, lost_pod)
    world.run_pods("tune-evaluate", 1)
    world.end_pods("tune-evaluate", [0], [EVALUATED])
    status = world.wait_phase("tune", "Succeeded")
    assert status["evaluation"]["metrics"] == [{"name": "eval_accuracy", "value": 0.75, "base": 0.5}]


def wait_for_another(world: World, name: str, first: Json | None) -> None:
    """Wait until a Job of this name exists that is not the first one."""
    assert first is not None

    def is_another() -> bool:
        body = world.api.get("Job", world.namespace, name)
        return body is not None and body["metadata"]["uid"] != first["metadata"]["uid"]

    wait_for(f"another Job {name}", is_another, instead=lambda: str(world.status("tune")))
