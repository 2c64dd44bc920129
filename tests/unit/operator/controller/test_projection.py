"""What the store keeps of an object. The tests of decisions get their Jobs and pods through it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finetune_operator.controller.projection import project

Json = dict[str, Any]
META: Json = {
    "name": "tune",
    "namespace": "team",
    "uid": "u1",
    "resourceVersion": "7",
    "labels": {"finetune.dev/job": "tune"},
}
WRITERS: Json = {"managedFields": [{"manager": "kubectl"}]}
APPLIED: Json = {"annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "note": "a"}}
STATUS: Json = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
POD_SPEC: Json = {
    "nodeName": "node-1",
    "nodeSelector": {"gpu": "a"},
    "volumes": [{"name": "data"}],
    "containers": [
        {"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": "1"}}, "env": [{"name": "A"}]},
        {"name": "sidecar", "image": "b"},
    ],
}
JOB_SPEC: Json = {
    "parallelism": 2,
    "suspend": True,
    "podFailurePolicy": {"rules": [{"action": "FailJob"}]},
    "template": {"spec": POD_SPEC},
}
CASES: dict[str, tuple[str, Json, Json]] = {
    "a pod": (
        "Pod",
        {"kind": "Pod", "metadata": META | WRITERS, "spec": POD_SPEC, "status": STATUS},
        {
            "metadata": META,
            "spec": {
                "nodeName": "node-1",
                "nodeSelector": {"gpu": "a"},
                "containers": [
                    {"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": "1"}}},
                    {"name": "sidecar"},
                ],
            },
            "status": STATUS,
        },
    ),
    "a Job": (
        "Job",
        {"metadata": META | WRITERS, "spec": JOB_SPEC, "status": STATUS},
        {
            "metadata": META,
            "spec": {name: value for name, value in JOB_SPEC.items() if name != "template"},
            "status": STATUS,
        },
    ),
    "a ConfigMap": ("ConfigMap", {"metadata": META | WRITERS, "data": {"a": "b"}}, {"metadata": META}),
    "a FineTuneJob": (
        "FineTuneJob",
        {"metadata": META | WRITERS | APPLIED, "spec": {"model": {}}, "status": STATUS},
        {"metadata": META | {"annotations": {"note": "a"}}, "spec": {"model": {}}, "status": STATUS},
    ),
    "a promotion, whose writers its history names": (
        "ModelPromotion",
        {"metadata": META | WRITERS, "spec": {"alias": "champion"}},
        {"metadata": META | WRITERS, "spec": {"model": "tune", "alias": "champion"}},
    ),
}


@pytest.mark.parametrize(("kind", "body", "expected"), CASES.values(), ids=CASES)
def test_projection(kind: str, body: Json, expected: Json) -> None:
    before = json.dumps(body)
    assert project(kind, body) == expected
    assert project(kind, project(kind, body)) == expected
    assert json.dumps(body) == before


def test_objects_share_their_keys() -> None:
    body = {"metadata": META, "spec": POD_SPEC, "status": STATUS}
    first, second = (project("Pod", json.loads(json.dumps(body))) for _ in range(2))
    names = list(first["status"]["conditions"][0])
    assert all(a is b for a, b in zip(names, second["status"]["conditions"][0], strict=True))
