"""`kubectl get` and `kubectl describe` alone tell why a job waits, what was dropped, and which pods failed where."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from finetune_crds.contract import TerminationMessage
from fixtures.operator_processes.jobs import PREPARED, error, job, splits_given
from fixtures.operator_processes.servers import Plane
from fixtures.operator_processes.world import OwnWorld, World
from support.api import Api
from support.waiting import wait_for

Json = dict[str, Any]


def kubectl(plane: Plane, world: World, *arguments: str) -> str:
    """The output of kubectl in the world's namespace, each run of spaces as one."""
    return plane.run_kubectl(world.namespace, *arguments)


def described(plane: Plane, world: World) -> str:
    return kubectl(plane, world, "describe", "ftj", "tune")


def test_what_each_step_dropped_is_described(world: World, plane: Plane) -> None:
    assert PREPARED.prep is not None
    result = PREPARED.prep.model_copy(update={"dropped": {"notNull": 4, "minQuality": 0, "dedupe": 96}})
    world.submit(job())
    world.run_pods("tune-prep", 1)
    world.end_pods("tune-prep", [0], [TerminationMessage(prep=result)])
    condition = world.wait_condition("tune", "Prepared", "Prepared")
    assert condition["message"].endswith("50 test rows; 100 dropped: 4 by notNull, 96 by dedupe")
    text = described(plane, world)
    assert "Dropped:\nRows: 4\nStep: notNull\nRows: 0\nStep: minQuality\nRows: 96\nStep: dedupe\n" in text
    assert condition["message"] in text


def test_a_quota_is_described(world: World, plane: Plane) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "none", "namespace": world.namespace},
        "spec": {"hard": {"pods": "0"}},
    }
    world.api.create(quota)
    wait_for(
        "the quota counts",
        lambda: (world.api.get("ResourceQuota", world.namespace, "none") or {}).get("status", {}).get("hard"),
    )
    world.submit(splits_given())
    world.wait_condition("tune", "PodsHealthy", "PodRejected")
    text = described(plane, world)
    assert "pods of Job tune-train-1 cannot be created" in text
    assert "exceeded quota: none" in text
    assert kubectl(plane, world, "get", "ftj").splitlines()[1].startswith("tune Starting PodRejected ")


def event_about(pod: Json, reason: str, message: str) -> Json:
    """Play an autoscaler, or the kubelet."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    meta = pod["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{meta['name']}.{reason.lower()}", "namespace": meta["namespace"]},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": meta["name"],
            "namespace": meta["namespace"],
            "uid": meta["uid"],
        },
        "type": "Normal",
        "reason": reason,
        "message": message,
        "source": {"component": "test"},
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("TriggeredScaleUp", "pod triggered scale-up: [{gpus 1->2 (max: 5)}]"),
        ("Nominated", "Pod should schedule on: nodeclaim/gpus-x7"),
    ],
)
def test_a_node_that_comes_is_no_warning(world: World, plane: Plane, reason: str, message: str) -> None:
    world.submit(splits_given())
    for pod in world.wait_pods("tune-train-1", 2):
        world.api.create(event_about(pod, reason, message))
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        waiting = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/2 nodes: no GPU",
            "lastTransitionTime": stamp,
        }
        meta = pod["metadata"]
        status = {"status": {"conditions": [waiting]}}
        world.api.patch("Pod", meta["namespace"], meta["name"], status, status=True)
    world.wait_condition("tune", "PodsHealthy", "ScalingUp")
    sentence = f"waits for a node that is being added: {message} (2 of 2 pods wait)"
    wait_for("both pods", lambda: world.condition("tune", "PodsHealthy")["message"].endswith(sentence))
    wait_for("an Event", lambda: world.events("ScalingUp"))
    assert {item["type"] for item in world.events("ScalingUp")} == {"Normal"}
    assert world.events("Unschedulable") == []
    assert sentence in described(plane, world)
    assert kubectl(plane, world, "get", "ftj").splitlines()[1].startswith("tune Starting ScalingUp ")


@pytest.fixture
def node(api: Api, namespace: str) -> Iterator[str]:
    """A node with GPUs, which nobody runs."""
    name = f"gpus-{namespace}"
    labels = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    api.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}})
    yield name
    api.delete("Node", "", name)


def test_where_a_job_ran_and_what_it_used_is_told_also_after_a_restart(
    own_world: OwnWorld, plane: Plane, node: str
) -> None:
    world = own_world
    container = {"name": "main", "resources": {"limits": {"nvidia.com/gpu": 8}}}
    template = {"spec": {"nodeName": node, "containers": [container]}}
    world.submit(splits_given(pods={"train": {"template": template}}, runPolicy={"maxRestarts": 0}))
    hour_ago = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 3600))
    pods = world.wait_pods("tune-train-1", 2)
    # NB: one pod counts until the time of the pass, so the operator may not see one hour without the other.
    world.operator.kill()
    for pod in pods:
        meta = pod["metadata"]
        world.api.patch(
            "Pod", world.namespace, meta["name"], {"status": {"startTime": hour_ago}}, status=True
        )
    world.operator.start()
    world.run_pods("tune-train-1", 2)
    status = world.wait_phase("tune", "Training")
    names = [pod["metadata"]["name"] for pod in pods]
    assert status["nodes"]["pods"] == [
        {"name": name, "node": node, "nodeRank": rank, "ready": True} for rank, name in enumerate(names)
    ]
    assert status["device"]["summary"] == "16x NVIDIA-H100-80GB-HBM3"
    wide = kubectl(plane, world, "get", "ftj", "-o", "wide").splitlines()[1]
    assert " 2/2 16x NVIDIA-H100-80GB-HBM3 1 " in wide

    world.end_pods("tune-train-1", [1, 1], [error("Boom", "it blew up"), error("PeerLost", "rank 0 is gone")])
    status = world.wait_phase("tune", "Failed")
    sentence = f"pod {names[0]} on node {node} ended with exit code 1: it blew up"
    assert status["lastFailure"]["node"] == node
    assert status["usage"]["podHours"] == pytest.approx(2, abs=0.1)
    assert status["usage"]["gpuHours"] == pytest.approx(16, abs=0.8)
    world.restart()
    world.settle(world.operator)
    assert world.status("tune")["usage"] == status["usage"]
    text = described(plane, world)
    assert sentence in text
    assert f"Gpu Hours: {status['usage']['gpuHours']:g}" in text
