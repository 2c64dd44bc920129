"""Why pods do not run, as the demo reports it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from demo.kubectl import DemoError, Kubectl, explain_unready

Json = dict[str, Any]
TAINTED = "0/2 nodes are available: 2 node(s) had untolerated taint {node.kubernetes.io/disk-pressure: }."


def waiting(reason: str) -> Json:
    return {"containerStatuses": [{"state": {"waiting": {"reason": reason}}}]}


def running(*, ready: bool) -> Json:
    return {"containerStatuses": [{"name": "main", "ready": ready, "state": {"running": {}}}]}


def scheduled(status: str, **why: str) -> Json:
    return {"conditions": [{"type": "PodScheduled", "status": status, **why}]}


PODS: dict[str, tuple[Json, list[str]]] = {
    "new": ({}, []),
    "starting": (scheduled("True") | waiting("ContainerCreating"), ["seed-x: ContainerCreating"]),
    "its server starts": (running(ready=False), ["seed-x: the container main runs and is not ready yet"]),
    "ready": (running(ready=True), []),
    "no such image": (scheduled("True") | waiting("ImagePullBackOff"), ["seed-x: ImagePullBackOff"]),
    "no node takes it": (
        scheduled("False", reason="Unschedulable", message=TAINTED),
        [f"seed-x: Unschedulable: {TAINTED}"],
    ),
}


@pytest.mark.parametrize(("status", "reasons"), PODS.values(), ids=PODS)
def test_unready_pods_are_explained(status: Json, reasons: list[str]) -> None:
    assert explain_unready([{"metadata": {"name": "seed-x"}, "status": status}]) == reasons


def test_pods_that_are_deleted_are_left_out() -> None:
    pod = {"metadata": {"name": "seed-x", "deletionTimestamp": "now"}, "status": waiting("ContainerCreating")}
    assert explain_unready([pod]) == []


def test_a_kubectl_that_does_not_end_is_an_error_of_the_demo(tmp_path: Path) -> None:
    program = tmp_path / "kubectl"
    program.write_text("#!/bin/sh\nexec sleep 60\n", encoding="utf-8")
    program.chmod(0o755)
    message = "kubectl delete job seed did not end within 0 s: run the same `make` target again, it continues"
    with pytest.raises(DemoError, match=re.escape(message)):
        Kubectl(program, tmp_path / "kubeconfig")("delete", "job", "seed", timeout=0)
