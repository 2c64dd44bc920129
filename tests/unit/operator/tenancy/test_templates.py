"""What a tenant may set in a pod template."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_operator.tenancy.model import Tenant
from finetune_operator.tenancy.templates import count_devices, find_template_breaches

Json = dict[str, Any]


def main(**fields: Any) -> Json:
    return {"spec": {"containers": [{"name": "main", **fields}]}}


def volume(**source: Any) -> Json:
    return {"spec": {"volumes": [{"name": "data", **source}]}}


TEMPLATES: dict[str, tuple[Json | None, list[tuple[str, str]]]] = {
    "none": (None, []),
    "empty": ({}, []),
    "where pods run": (
        {
            "metadata": {
                "annotations": {
                    "karpenter.sh/do-not-disrupt": "true",
                    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
                },
                "labels": {"kueue.x-k8s.io/priority-class": "low"},
            },
            "spec": {
                "nodeSelector": {"pool": "gpu"},
                "affinity": {},
                "tolerations": [{"operator": "Exists"}],
                "topologySpreadConstraints": [],
                "terminationGracePeriodSeconds": 60,
                "imagePullSecrets": [{"name": "mine"}],
                "priorityClassName": "team-high",
            },
        },
        [],
    ),
    "what they need": (
        main(resources={"limits": {"nvidia.com/gpu": 1}}, volumeMounts=[], env=[], envFrom=[]),
        [],
    ),
    "a mount of its own volume": (
        {
            "spec": {
                "volumes": [{"name": "data", "emptyDir": {}}],
                "containers": [{"name": "main", "volumeMounts": [{"name": "data", "mountPath": "/data"}]}],
            }
        },
        [],
    ),
    "a mount of a volume of the chart": (
        main(volumeMounts=[{"name": "host", "mountPath": "/models"}]),
        [("template.spec.containers volumeMounts of volume host", "pods")],
    ),
    "volumes of the namespace": (
        {
            "spec": {
                "volumes": [
                    {"name": "a", "persistentVolumeClaim": {"claimName": "mine"}},
                    {"name": "b", "configMap": {}},
                    {"name": "c", "secret": {}},
                    {"name": "d", "emptyDir": {}},
                    {"name": "e", "ephemeral": {}},
                    {"name": "f", "downwardAPI": {}},
                ]
            }
        },
        [],
    ),
    "a folder of the node": (
        volume(hostPath={"path": "/"}),
        [("template.spec.volumes data hostPath", "pods")],
    ),
    "a token of the account": (
        volume(projected={"sources": []}),
        [("template.spec.volumes data projected", "pods")],
    ),
    "two sources": (
        volume(emptyDir={}, hostPath={"path": "/"}),
        [("template.spec.volumes data hostPath", "pods")],
    ),
    "a driver of storage": (volume(csi={}), [("template.spec.volumes data csi", "pods")]),
    "namespaces of the node": (
        {"spec": {"hostPID": True, "hostNetwork": True, "hostIPC": True, "hostUsers": True}},
        [
            ("template.spec.hostPID", "pods"),
            ("template.spec.hostNetwork", "pods"),
            ("template.spec.hostIPC", "pods"),
            ("template.spec.hostUsers", "pods"),
        ],
    ),
    "privileged": (
        main(securityContext={"privileged": True}),
        [("template.spec.containers main securityContext", "pods")],
    ),
    "the user of the pod": (
        {"spec": {"securityContext": {"runAsUser": 0}}},
        [("template.spec.securityContext", "pods")],
    ),
    "other containers": (
        {
            "spec": {
                "containers": [{"name": "helper", "image": "x"}],
                "initContainers": [{"name": "init", "image": "x"}],
            }
        },
        [("template.spec.containers helper", "pods"), ("template.spec.initContainers", "pods")],
    ),
    "another program": (
        main(command=["sh"], image="x"),
        [("template.spec.containers main command", "pods"), ("template.spec.containers main image", "pods")],
    ),
    "an account and its token": (
        {"spec": {"serviceAccountName": "admin", "automountServiceAccountToken": True}},
        [
            ("template.spec.serviceAccountName admin", "serviceAccounts"),
            ("template.spec.automountServiceAccountToken", "pods"),
        ],
    ),
    "an account that is permitted": ({"spec": {"serviceAccountName": "team-spark"}}, []),
    "a priority of the system": (
        {"spec": {"priorityClassName": "system-node-critical"}},
        [("template.spec.priorityClassName system-node-critical", "priorityClasses")],
    ),
    "labels of a Service": (
        {"metadata": {"labels": {"app": "payments"}, "annotations": {"sidecar.istio.io/inject": "true"}}},
        [
            ("template.metadata.labels app", "pods"),
            ("template.metadata.annotations sidecar.istio.io/inject", "pods"),
        ],
    ),
    "a name": ({"metadata": {"name": "x"}}, [("template.metadata.name", "pods")]),
    "another part": ({"status": {}}, [("template.status", "pods")]),
    "what is no template": (
        {"metadata": [], "spec": "x"},
        [("template.metadata", "pods"), ("template.spec", "pods")],
    ),
    "lists that are none": (
        {"spec": {"containers": "main", "volumes": ["data"]}, "metadata": {"labels": "x"}},
        [("template.metadata.labels", "pods"), ("template.spec.containers None", "pods")],
    ),
}


@pytest.mark.parametrize("case", TEMPLATES.values(), ids=TEMPLATES)
def test_what_a_template_sets_without_permission(case: tuple[Json | None, list[tuple[str, str]]]) -> None:
    template, expected = case
    tenant = Tenant(namespaces=["team"], service_accounts=["team-*"], priority_classes=["team-*"])
    breaches = find_template_breaches(template, "template", tenant)
    assert [(breach.what, breach.rule) for breach in breaches] == expected


@pytest.mark.parametrize("case", TEMPLATES.values(), ids=TEMPLATES)
def test_where_any_pod_is_permitted_only_accounts_are_checked(
    case: tuple[Json | None, list[tuple[str, str]]],
) -> None:
    template, expected = case
    tenant = Tenant(namespaces=["team"], service_accounts=["team-*"], pods="Any")
    breaches = find_template_breaches(template, "template", tenant)
    assert [(breach.what, breach.rule) for breach in breaches] == [
        breach for breach in expected if breach[1] == "serviceAccounts"
    ]


QUANTITIES: dict[object, int] = {
    1: 1,
    "8": 8,
    "8.0": 8,
    "64000m": 64,
    "6.4e1": 64,
    "0.064k": 64,
    "1Ki": 1024,
    "1500m": 2,
    "many": 10**9,
    "9" * 5000: 10**9,
    None: 10**9,
    "1x": 10**9,
}


@pytest.mark.parametrize(("amount", "expected"), QUANTITIES.items(), ids=lambda value: str(value)[:20])
@pytest.mark.parametrize(
    "resource", ["nvidia.com/gpu", "habana.ai/gaudi", "aws.amazon.com/neuron", "example.com/card"]
)
def test_how_many_devices_a_quantity_is(amount: object, expected: int, resource: str) -> None:
    template = main(resources={"limits": {resource: amount, "cpu": "64"}, "requests": {resource: amount}})
    assert count_devices(template, "example.com/card") == expected
