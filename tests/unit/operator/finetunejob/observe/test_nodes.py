"""The labels of the node that tells which GPU a job has, and the resources that any node offers."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_operator.finetunejob.observe.nodes import NodeReader
from finetune_operator.kube import KubeError
from fixtures.fake_kube import StandIn
from fixtures.operator_in_memory.decisions import pod

Json = dict[str, Any]
LABELS = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
NODE: Json = {"kind": "Node", "metadata": {"name": "node-1", "namespace": "", "labels": LABELS}}
GPU = pod("tune-train-1", 0, node="node-1", gpus=8)
FORBIDDEN = KubeError(403, 'nodes "node-1" is forbidden')

READ: dict[str, tuple[list[Json], list[Json], KubeError | None, Json]] = {
    "the node of a GPU": ([NODE], [GPU], None, {"node-1": LABELS}),
    "no GPU": ([NODE], [pod("tune-train-1", 0, node="node-1")], None, {}),
    "a node that may not be read": ([NODE], [GPU], FORBIDDEN, {"node-1": {}}),
    "a node that no longer exists": ([], [GPU], None, {"node-1": {}}),
}


@pytest.mark.parametrize(("exist", "alive", "refusal", "expected"), READ.values(), ids=READ)
async def test_read(exist: list[Json], alive: list[Json], refusal: KubeError | None, expected: Json) -> None:
    kube = StandIn(*exist)
    if refusal:
        kube.refuse["get", "Node"] = refusal
    seconds = 0.0
    reader = NodeReader(kube, lambda: seconds)
    for later in (0.0, 5.0, 3599.0):
        seconds = later
        assert await reader.read(alive, "nvidia.com/gpu") == expected
    assert len(kube.asked) == len(expected)
    seconds = 3600.0
    await reader.read(alive, "nvidia.com/gpu")
    assert len(kube.asked) == 2 * len(expected)


WAITS = pod(
    "tune-train-1",
    0,
    "Pending",
    gpus=8,
    conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}],
)


def offering(name: str, **allocatable: str) -> Json:
    meta = {"name": name, "namespace": ""}
    return {"kind": "Node", "metadata": meta, "status": {"allocatable": allocatable}}


GPUS = offering("gpus", **{"cpu": "8", "nvidia.com/gpu": "8"})
BROKEN = offering("broken", **{"cpu": "8", "nvidia.com/gpu": "0"})
OFFERED: dict[str, tuple[list[Json], list[Json], KubeError | None, set[str] | None]] = {
    "GPUs": ([GPUS, BROKEN], [WAITS], None, {"cpu", "nvidia.com/gpu"}),
    "none that works": ([BROKEN], [WAITS], None, {"cpu"}),
    "a node that says nothing": ([NODE], [WAITS], None, set()),
    "nodes that may not be listed": ([GPUS], [WAITS], FORBIDDEN, None),
    "no pod that waits": ([GPUS], [GPU], None, None),
}


@pytest.mark.parametrize(("exist", "alive", "refusal", "expected"), OFFERED.values(), ids=OFFERED)
async def test_offered(
    exist: list[Json], alive: list[Json], refusal: KubeError | None, expected: set[str] | None
) -> None:
    kube = StandIn(*exist)
    if refusal:
        kube.refuse["list", "Node"] = refusal
    assert await NodeReader(kube, lambda: 0.0).offered_resources(alive, "nvidia.com/gpu") == expected
    assert len(kube.asked) == (WAITS in alive)


async def test_all_jobs_share_a_list_of_nodes_for_two_minutes() -> None:
    kube, seconds = StandIn(GPUS), 0.0
    reader = NodeReader(kube, lambda: seconds)
    for now, lists in ((0.0, 1), (119.0, 1), (120.0, 2)):
        seconds = now
        await reader.offered_resources([WAITS], "nvidia.com/gpu")
        assert len(kube.asked) == lists
