"""How long pods wait for a node that is not ready."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_operator.finetunejob.pods.tolerations import limit_wait_for_node
from fixtures.operator_in_memory.decisions import (
    PATIENCE_WITH_NODES,
    SOURCE,
    conclude,
    ftj,
)

Json = dict[str, Any]
NOT_READY, UNREACHABLE = ({**item, "tolerationSeconds": 7} for item in PATIENCE_WITH_NODES)
ALWAYS = {"operator": "Exists"}
GPU = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
PATIENT = {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "tolerationSeconds": 600}
SCHEDULES = {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoSchedule"}
TOLERATIONS: dict[str, tuple[Any, Any]] = {
    "none": (None, [NOT_READY, UNREACHABLE]),
    "of another taint": ([GPU], [GPU, NOT_READY, UNREACHABLE]),
    "of one of the two": ([PATIENT], [PATIENT, UNREACHABLE]),
    "of all taints": ([ALWAYS], [ALWAYS]),
    "of one of the two, which does not keep the pod": ([SCHEDULES], [SCHEDULES, NOT_READY, UNREACHABLE]),
    "that are no objects": (["x"], ["x", NOT_READY, UNREACHABLE]),
    "that are no list": ("x", "x"),
}


@pytest.mark.parametrize(("written", "expected"), TOLERATIONS.values(), ids=TOLERATIONS)
def test_what_a_template_tolerates_stays(written: Any, expected: Any) -> None:
    spec = {"containers": [], **({"tolerations": written} if written is not None else {})}
    assert limit_wait_for_node({"spec": spec}, 7) == {"spec": {"containers": [], "tolerations": expected}}


@pytest.mark.parametrize("parts", [{}, {"data": SOURCE}], ids=["training", "preparation"])
def test_the_job_says_how_long_its_pods_wait(parts: Json) -> None:
    job = ftj(**parts, distributed={"nodeLostSeconds": 7})
    assert conclude(job).apply[-1]["spec"]["template"]["spec"]["tolerations"] == [NOT_READY, UNREACHABLE]
