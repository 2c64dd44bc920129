"""The Job of a gate, as the API server gets it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from finetune_crds.gates import JobGate
from finetune_crds.modelpromotion import ModelPromotionSpec
from finetune_operator.defaults import Defaults
from finetune_operator.modelpromotion.model import Promotion
from finetune_operator.modelpromotion.observe import read_promotion
from finetune_operator.modelpromotion.pods.gate_pod import build_job
from finetune_operator.modelpromotion.pods.job import add_run
from finetune_operator.settings import Settings

Json = dict[str, Any]
SETTINGS = Settings(tracking_uri="http://mlflow:5000")
LABELS = {
    "app.kubernetes.io/managed-by": "finetune-operator",
    "finetune.dev/job-uid": "u1",
    "finetune.dev/component": "gate",
}
ANNOTATIONS = {"finetune.dev/promotion": "champion", "finetune.dev/version": "7"}


def promotion(**spec: Any) -> tuple[Promotion, ModelPromotionSpec]:
    fields = {"model": "support", "alias": "champion", "source": {"type": "Version", "version": 7}, **spec}
    meta = {
        "name": "champion",
        "namespace": "team",
        "uid": "u1",
        "resourceVersion": "1",
        "creationTimestamp": "2026-08-01T12:00:00Z",
    }
    resource = read_promotion({"metadata": meta, "spec": fields})
    assert resource.spec
    return resource, resource.spec


def built(gate: Json, settings: Settings = SETTINGS, **spec: Any) -> Json:
    resource, parsed = promotion(**spec)
    return build_job(
        resource, parsed, settings, gate=JobGate.model_validate(gate), version="7", name="champion-gate-1"
    )


def container(job: Json) -> Json:
    [main] = job["spec"]["template"]["spec"]["containers"]
    return dict(main)


def test_a_job_as_a_whole() -> None:
    job = add_run(
        built(
            {
                "image": "tests:1",
                "command": ["pytest"],
                "args": ["-q"],
                "env": [{"name": "LEVEL", "value": "high"}],
                "retries": 2,
                "timeoutSeconds": 600,
            },
            tracking={"secretRef": {"name": "mlflow"}},
        ),
        "run-1",
    )
    assert job == {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": "champion-gate-1",
            "namespace": "team",
            "labels": LABELS,
            "annotations": {**ANNOTATIONS, "finetune.dev/mlflow-run": "run-1"},
            "ownerReferences": [
                {
                    "apiVersion": "finetune.dev/v1alpha1",
                    "kind": "ModelPromotion",
                    "name": "champion",
                    "uid": "u1",
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": {
            "backoffLimit": 2,
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "Ignore",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    }
                ]
            },
            "template": {
                "metadata": {"labels": LABELS, "annotations": ANNOTATIONS},
                "spec": {
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "terminationGracePeriodSeconds": 120,
                    "securityContext": {
                        "runAsNonRoot": True,
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    "restartPolicy": "Never",
                    "activeDeadlineSeconds": 600,
                    "containers": [
                        {
                            "name": "main",
                            "image": "tests:1",
                            "imagePullPolicy": "IfNotPresent",
                            "command": ["pytest"],
                            "args": ["-q"],
                            "terminationMessagePolicy": "FallbackToLogsOnError",
                            "terminationMessagePath": "/dev/termination-log",
                            "securityContext": {
                                "allowPrivilegeEscalation": False,
                                "capabilities": {"drop": ["ALL"]},
                            },
                            "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
                            "volumeMounts": [
                                {"name": "tmp", "mountPath": "/tmp"},
                                {"name": "shm", "mountPath": "/dev/shm"},
                            ],
                            "env": [
                                {"name": "HOME", "value": "/tmp"},
                                {"name": "LEVEL", "value": "high"},
                                {"name": "MLFLOW_TRACKING_URI", "value": "http://mlflow:5000"},
                                {"name": "MLFLOW_REGISTRY_URI", "value": "http://mlflow:5000"},
                                {"name": "MODEL_URI", "value": "models:/support/7"},
                                {"name": "MODEL_NAME", "value": "support"},
                                {"name": "MODEL_VERSION", "value": "7"},
                                {"name": "METRICS_PATH", "value": "/dev/termination-log"},
                                {"name": "MLFLOW_RUN_ID", "value": "run-1"},
                            ],
                            "envFrom": [{"secretRef": {"name": "mlflow", "optional": False}}],
                        }
                    ],
                    "volumes": [
                        {"name": "tmp", "emptyDir": {}},
                        {"name": "shm", "emptyDir": {"medium": "Memory"}},
                    ],
                },
            },
        },
    }


def test_the_defaults_of_a_gate() -> None:
    job = built({"image": "tests:1"})
    pod = job["spec"]["template"]["spec"]
    assert (job["spec"]["backoffLimit"], pod["activeDeadlineSeconds"]) == (0, 3600)
    assert "command" not in container(job)
    # The result could be lost if Kubernetes deleted the Job while the operator is down.
    assert "ttlSecondsAfterFinished" not in job["spec"]


def test_the_template_of_the_gate_overrides_that_of_the_chart_and_neither_gets_a_token() -> None:
    defaults = Defaults.model_validate(
        {
            "imagePullSecrets": [{"name": "registry"}],
            "pods": {
                "all": {
                    "env": [
                        {"name": "HTTPS_PROXY", "value": "http://proxy"},
                        {"name": "LEVEL", "value": "low"},
                    ],
                    "template": {"spec": {"tolerations": [{"key": "a"}], "nodeSelector": {"zone": "a"}}},
                }
            },
        }
    )
    template = {
        "metadata": {"labels": {"team": "a", "finetune.dev/component": "mine"}},
        "spec": {
            "automountServiceAccountToken": True,
            "nodeSelector": {"zone": "b"},
            "containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": 1}}}],
        },
    }
    job = built(
        {"image": "tests:1", "env": [{"name": "LEVEL", "value": "high"}], "template": template},
        replace(SETTINGS, defaults=defaults),
    )
    pod = job["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert (pod["tolerations"], pod["nodeSelector"]) == ([{"key": "a"}], {"zone": "b"})
    requests = {"cpu": "100m", "memory": "256Mi"}
    assert container(job)["resources"] == {"limits": {"nvidia.com/gpu": 1}, "requests": requests}
    variables = {item["name"]: item["value"] for item in container(job)["env"]}
    assert (variables["HTTPS_PROXY"], variables["LEVEL"]) == ("http://proxy", "high")
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert (labels["team"], labels["finetune.dev/component"]) == ("a", "gate")


def test_a_model_in_unity_catalog() -> None:
    job = built(
        {"image": "tests:1"},
        model="ml.prod.support",
        tracking={"uri": "databricks", "registryUri": "databricks-uc"},
    )
    variables = {item["name"]: item["value"] for item in container(job)["env"]}
    assert variables["MLFLOW_REGISTRY_URI"] == "databricks-uc"
    assert variables["MODEL_URI"] == "models:/ml.prod.support/7"
