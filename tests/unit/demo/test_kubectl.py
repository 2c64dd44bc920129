"""Why pods do not run, as the demo reports it."""

from __future__ import annotations

from typing import Any

import pytest

from demo.kubectl import pod_trouble

Json = dict[str, Any]
TAINTED = "0/2 nodes are available: 2 node(s) had untolerated taint {node.kubernetes.io/disk-pressure: }."


def waiting(reason: str) -> Json:
    return {"containerStatuses": [{"state": {"waiting": {"reason": reason}}}]}


def scheduled(status: str, **why: str) -> Json:
    return {"conditions": [{"type": "PodScheduled", "status": status, **why}]}


PODS: dict[str, tuple[Json, list[str]]] = {
    "new": ({}, []),
    "starting": (scheduled("True") | waiting("ContainerCreating"), []),
    "no such image": (scheduled("True") | waiting("ImagePullBackOff"), ["seed-x: ImagePullBackOff"]),
    "no node takes it": (
        scheduled("False", reason="Unschedulable", message=TAINTED),
        [f"seed-x: Unschedulable: {TAINTED}"],
    ),
}


@pytest.mark.parametrize(("status", "trouble"), PODS.values(), ids=PODS)
def test_pod_trouble(status: Json, trouble: list[str]) -> None:
    assert pod_trouble([{"metadata": {"name": "seed-x"}, "status": status}]) == trouble
