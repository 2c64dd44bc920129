"""Pod templates: defaults, under what people write, under what the operator owns."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_operator import names
from finetune_operator.settings import Settings
from finetune_operator.template_merge import merge
from fixtures.operator_in_memory.decisions import PATIENCE_WITH_NODES, SOURCE, UID, conclude, ftj

Json = dict[str, Any]


MERGES: dict[str, tuple[Any, Any, Any]] = {
    "maps merge": (
        {"a": 1, "b": {"c": 1, "d": 1}},
        {"b": {"d": 2, "e": 2}},
        {"a": 1, "b": {"c": 1, "d": 2, "e": 2}},
    ),
    "values are replaced": ({"a": 1}, {"a": 2}, {"a": 2}),
    "lists are replaced": ({"tolerations": [1]}, {"tolerations": [2]}, {"tolerations": [2]}),
    "null says nothing": ({"spec": {"a": 1}}, {"spec": None}, {"spec": {"a": 1}}),
    "containers merge by name": (
        {"containers": [{"name": "a", "image": "x"}, {"name": "b"}]},
        {"containers": [{"name": "c"}, {"name": "a", "tty": True}]},
        {"containers": [{"name": "a", "image": "x", "tty": True}, {"name": "b"}, {"name": "c"}]},
    ),
    "a volume has one source": (
        {"volumes": [{"name": "tmp", "emptyDir": {}}]},
        {"volumes": [{"name": "tmp", "persistentVolumeClaim": {"claimName": "c"}}]},
        {"volumes": [{"name": "tmp", "persistentVolumeClaim": {"claimName": "c"}}]},
    ),
    "a variable has one origin": (
        {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "1"}]},
        {"env": [{"name": "A", "valueFrom": {}}]},
        {"env": [{"name": "A", "valueFrom": {}}, {"name": "B", "value": "1"}]},
    ),
    "mounts are told apart by their path": (
        {"volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}]},
        {"volumeMounts": [{"name": "fast", "mountPath": "/tmp"}, {"name": "fast", "mountPath": "/x"}]},
        {"volumeMounts": [{"name": "fast", "mountPath": "/tmp"}, {"name": "fast", "mountPath": "/x"}]},
    ),
    "sources of environment stand beside each other": (
        {"envFrom": [{"secretRef": {"name": "a"}}]},
        {"envFrom": [{"secretRef": {"name": "b"}}]},
        {"envFrom": [{"secretRef": {"name": "a"}}, {"secretRef": {"name": "b"}}]},
    ),
    "an item without its key is left for the API server to refuse": (
        {"containers": [{"name": "a"}]},
        {"containers": [{"tty": True}, "nonsense", {"name": 3}]},
        {"containers": [{"name": "a"}, {"tty": True}, "nonsense", {"name": 3}]},
    ),
    "what is no list is left for the API server to refuse": (
        {"containers": [{"name": "a"}]},
        {"containers": {"name": "a"}},
        {"containers": {"name": "a"}},
    ),
}


@pytest.mark.parametrize(("below", "above", "expected"), MERGES.values(), ids=MERGES)
def test_merge(below: Any, above: Any, expected: Any) -> None:
    assert merge(below, above) == expected


def pod_of(template: Any, **parts: Any) -> Json:
    """The pod template of a training Job with this template in spec.pods.train."""
    train = {"template": template, **parts.pop("train", {})}
    applied = conclude(ftj(pods={"train": train}, **parts)).apply[-1]
    return dict(applied["spec"]["template"])


def trainer(template: Any, **parts: Any) -> Json:
    containers = pod_of(template, **parts)["spec"]["containers"]
    return dict(next(item for item in containers if item["name"] == "trainer"))


def test_what_people_write_is_kept() -> None:
    written: Json = {
        "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
        "spec": {
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "nodeSelector": {"gpu": "h100"},
            "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
            "terminationGracePeriodSeconds": 600,
            "serviceAccountName": "mine",
            "containers": [
                {
                    "name": "main",
                    "resources": {"limits": {"nvidia.com/gpu": 8}},
                    "volumeMounts": [{"name": "models", "mountPath": "/models"}],
                    "env": [{"name": "HF_HOME", "value": "/models/hub"}],
                },
            ],
            "initContainers": [{"name": "sidecar", "image": "side:1", "restartPolicy": "Always"}],
        },
    }
    pod = pod_of(written)
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["annotations"] == {"note": "b"}
    assert pod["spec"]["tolerations"] == [*written["spec"]["tolerations"], *PATIENCE_WITH_NODES]
    user_fields = ("nodeSelector", "terminationGracePeriodSeconds", "serviceAccountName")
    assert {name: pod["spec"][name] for name in user_fields} == {
        name: written["spec"][name] for name in user_fields
    }
    assert [item["name"] for item in pod["spec"]["volumes"]] == ["tmp", "shm", "models", "recipe"]
    [main] = pod["spec"]["containers"]
    requests = {"cpu": "100m", "memory": "256Mi"}
    assert main["resources"] == {"limits": {"nvidia.com/gpu": 8}, "requests": requests}
    assert [item["mountPath"] for item in main["volumeMounts"]] == [
        "/tmp",
        "/dev/shm",
        "/models",
        "/etc/finetune",
    ]
    assert {"name": "HF_HOME", "value": "/models/hub"} in main["env"]
    assert pod["spec"]["initContainers"] == written["spec"]["initContainers"]


def test_what_the_operator_owns_cannot_be_taken() -> None:
    pod = pod_of(
        {
            "metadata": {"labels": {names.LABEL_UID: "mine", names.LABEL_COMPONENT: "mine"}},
            "spec": {
                "restartPolicy": "Always",
                "subdomain": "mine",
                "volumes": [{"name": "recipe", "emptyDir": {}}],
            },
        }
    )
    assert pod["metadata"]["labels"][names.LABEL_UID] == UID
    assert pod["metadata"]["labels"][names.LABEL_COMPONENT] == "train"
    assert (pod["spec"]["restartPolicy"], pod["spec"]["subdomain"]) == ("Never", "tune")
    assert {"name": "recipe", "configMap": {"name": "tune-train"}} in pod["spec"]["volumes"]


def test_the_pod_meets_the_restricted_standard_without_a_token() -> None:
    spec = pod_of(None)["spec"]
    assert {
        "token": spec["automountServiceAccountToken"],
        "pod": spec["securityContext"],
        "container": spec["containers"][0]["securityContext"],
    } == {
        "token": False,
        "pod": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "container": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }


def test_an_image_of_ones_own_keeps_its_user_and_its_files() -> None:
    spec = pod_of(None, train={"image": "mine:1"})["spec"]
    assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert "readOnlyRootFilesystem" not in spec["containers"][0]["securityContext"]


@pytest.mark.parametrize("component", ["prep", "train"])
def test_on_openshift_the_pod_names_no_user(component: str) -> None:
    parts: Json = {"data": SOURCE} if component == "prep" else {}
    decision = conclude(ftj(**parts), settings=Settings(pod_user=0))
    job = next(child for child in decision.apply if child["kind"] == "Job")
    pod = job["spec"]["template"]
    assert pod["metadata"]["labels"][names.LABEL_COMPONENT] == component
    assert pod["spec"]["securityContext"] == {
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_environment_from_every_side_stands_together() -> None:
    template = {"spec": {"containers": [{"name": "main", "envFrom": [{"configMapRef": {"name": "theirs"}}]}]}}
    tracking = {"secretRef": {"name": "mlflow"}}
    env_from = [{"secretRef": {"name": "s3"}, "prefix": "P_"}]
    trainer_spec = trainer(template, train={"envFrom": env_from}, tracking=tracking)
    assert trainer_spec["envFrom"] == [
        {"prefix": "P_", "secretRef": {"name": "s3", "optional": False}},
        {"configMapRef": {"name": "theirs"}},
        {"secretRef": {"name": "mlflow", "optional": False}},
    ]


NONSENSE: dict[str, Any] = {
    "empty": {},
    "nulls": {"metadata": None, "spec": None},
    "null lists": {"spec": {"containers": None, "volumes": None}},
    "a container without a name": {"spec": {"containers": [{"resources": {}}]}},
    "lists of strings": {"spec": {"containers": ["main"], "volumes": ["v"]}},
    "text": {"metadata": "text", "spec": "text"},
    "maps for lists": {"spec": {"containers": {"name": "main"}, "volumes": {}}},
}


@pytest.mark.parametrize("template", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_left_for_the_api_server_to_refuse(template: Any) -> None:
    pod = pod_of(template)
    assert (pod["spec"]["restartPolicy"], pod["metadata"]["labels"][names.LABEL_UID]) == ("Never", UID)
