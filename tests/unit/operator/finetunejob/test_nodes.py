"""The labels of the node that tells which GPU a job has."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_operator.finetunejob.nodes import NodeReader
from finetune_operator.kube import KubeError
from standins.kube import StandIn
from worlds.memory.decisions import pod

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
