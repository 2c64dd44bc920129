"""GPU or CPU, how many, and which."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.status_parts import DeviceStatus
from finetune_operator.finetunejob.draft import device
from fixtures.operator_in_memory.decisions import child, conclude, ended, ftj, observed, pod, running

Json = dict[str, Any]
JOB = "tune-train-1"
H100 = "NVIDIA-H100-80GB-HBM3"
CPU = DeviceStatus(type="CPU", summary="CPU")
UNNAMED = DeviceStatus(type="GPU", count=16, summary="16x GPU")
NAMED = DeviceStatus(type="GPU", count=16, product=H100, summary=f"16x {H100}")
Labels = dict[str, dict[str, str]]
LABELS: Labels = {"node-1": {"nvidia.com/gpu.product": H100, "zone": "a"}}


def selecting(reported: Json, **selector: str) -> Json:
    return {**reported, "spec": {**reported["spec"], "nodeSelector": selector}}


DEVICES: dict[str, tuple[list[Json], Labels, DeviceStatus | None, DeviceStatus | None]] = {
    "no pod yet": ([], {}, None, None),
    "no pod any more": ([ended(JOB, 0, 1, gpus=8)], LABELS, NAMED, NAMED),
    "CPUs": ([pod(JOB, 0, node="node-1"), pod(JOB, 1)], LABELS, None, CPU),
    "GPUs without a node": ([pod(JOB, 0, gpus=8)], LABELS, None, UNNAMED),
    "a node that can be read": (
        [pod(JOB, 0, gpus=8), pod(JOB, 1, node="node-1", gpus=8)],
        LABELS,
        None,
        NAMED,
    ),
    "a node that cannot be read": ([pod(JOB, 0, node="node-1", gpus=8)], {}, None, UNNAMED),
    "a node without labels": ([pod(JOB, 0, node="node-1", gpus=8)], {"node-1": {}}, None, UNNAMED),
    "a product that is asked for": (
        [selecting(pod(JOB, 0, node="node-1", gpus=8), **{"nvidia.com/gpu.product": H100})],
        {},
        None,
        NAMED,
    ),
    "a node that cannot be read any more": ([pod(JOB, 0, node="node-1", gpus=8)], {}, NAMED, NAMED),
    "fewer GPUs than before": (
        [pod(JOB, 0, node="node-1", gpus=4)],
        {},
        NAMED,
        DeviceStatus(type="GPU", count=8, summary="8x GPU"),
    ),
}


@pytest.mark.parametrize(("pods", "labels", "before", "expected"), DEVICES.values(), ids=DEVICES)
def test_device(
    pods: list[Json], labels: Labels, before: DeviceStatus | None, expected: DeviceStatus | None
) -> None:
    observation = observed(child(JOB), pods=pods, node_labels=labels)
    assert conclude(ftj(running(device=before)), observation).status.device == expected


LIMITS: dict[str, tuple[list[Json | None], int]] = {
    "none": ([None, {}, {"cpu": "4", "memory": "1Gi"}], 0),
    "of two containers": ([{"nvidia.com/gpu": "2"}, {"nvidia.com/gpu": 1}], 3),
    "of other makers": ([{"amd.com/gpu": "4"}, {"gpu.intel.com/i915": "1"}], 5),
    "slices": ([{"nvidia.com/mig-1g.5gb": "2", "nvidia.com/gpu.shared": "1"}], 3),
    "of the resource that the spec names": ([{"habana.ai/gaudi": "8", "rdma/hca": "1"}], 8),
    "other devices": ([{"rdma/hca": "1", "aws.amazon.com/neuron": "2", "vendor/gpu-memory": "9"}], 0),
}


@pytest.mark.parametrize(("limits", "expected"), LIMITS.values(), ids=LIMITS)
def test_gpus_are_counted_in_the_limits(limits: list[Json | None], expected: int) -> None:
    containers = [{"resources": {"limits": item}} for item in limits]
    assert device.count_gpus({"spec": {"containers": [*containers, {}]}}, "habana.ai/gaudi") == expected


READ: dict[str, tuple[list[Json], str | None]] = {
    "nothing": ([], None),
    "no node yet": ([pod(JOB, 0, gpus=1)], None),
    "no GPU": ([pod(JOB, 0, node="node-1")], None),
    "the first with both": ([pod(JOB, 0, gpus=1), pod(JOB, 1, node="node-2", gpus=1)], "node-2"),
}


@pytest.mark.parametrize(("pods", "expected"), READ.values(), ids=READ)
def test_the_node_to_read(pods: list[Json], expected: str | None) -> None:
    assert device.node_to_read(pods, "nvidia.com/gpu") == expected


def test_gpus_of_the_resource_that_the_spec_names() -> None:
    pod_body = pod(JOB, 0)
    pod_body["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/GA102GL_A10"] = "8"
    parts: Json = {
        "distributed": {"nodes": 2, "gpusPerNode": 8, "gpu": {"resourceName": "nvidia.com/GA102GL_A10"}}
    }
    reported = conclude(ftj(running(), **parts), observed(child(JOB), pods=[pod_body])).status.device
    assert reported == UNNAMED
