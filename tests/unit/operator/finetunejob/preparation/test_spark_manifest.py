"""The SparkApplication of a preparation, as a whole, and what of a pod template it takes."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import MlflowStatus
from finetune_operator.finetunejob.model import Mlflow
from finetune_operator.finetunejob.preparation import backends
from fixtures.operator_in_memory.decisions import (
    ACCEPTED,
    ADMITTED,
    PATIENCE_WITH_NODES,
    SETTINGS,
    UID,
    applied,
    conclude,
    ftj,
    observed,
    said,
    spec,
    status,
)

Json = dict[str, Any]
NEW = status(ACCEPTED, ADMITTED, mlflow=MlflowStatus(run_id="r1"))


def data(spark: Json | None = None, **prepare: Any) -> Json:
    return {
        "source": {"type": "Parquet", "path": "s3://corpora/a"},
        "prepare": {
            "output": "s3://splits/a",
            "spark": {"mode": "SparkApplication", **(spark or {})},
            **prepare,
        },
    }


def made(spark: Json | None = None, *, prepare: Json | None = None, **parts: Any) -> dict[str, Json]:
    """What is made of a new job, by kind."""
    job = ftj(NEW, data=data(spark, **(prepare or {})), **parts)
    decision = conclude(job, settings=SETTINGS)
    return {body["kind"]: body for body in decision.apply}


LABELS = {
    "app.kubernetes.io/managed-by": "finetune-operator",
    "finetune.dev/job": "tune",
    "finetune.dev/job-uid": UID,
    "finetune.dev/component": "prep",
}
OWNER = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "name": "tune", "uid": UID}
CONTAINER: Json = {
    "image": SETTINGS.prep_image,
    "imagePullPolicy": SETTINGS.prep_pull_policy,
    "terminationMessagePolicy": "FallbackToLogsOnError",
    "securityContext": {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    },
}
S3 = {"secretRef": {"name": "s3", "optional": False}}
SCRATCH = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "shm", "mountPath": "/dev/shm"}]
VOLUMES: list[Json] = [
    {"name": "tmp", "emptyDir": {}},
    {"name": "shm", "emptyDir": {"medium": "Memory"}},
]
POD: Json = {
    "enableServiceLinks": False,
    "terminationGracePeriodSeconds": 120,
    "securityContext": {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "fsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    },
    "restartPolicy": "Never",
    "serviceAccountName": "finetune-spark",
    "tolerations": PATIENCE_WITH_NODES,
}
HOME = {"name": "HOME", "value": "/tmp"}
SELECTOR = f"finetune.dev/job-uid={UID},finetune.dev/component=prep-executor"


def test_the_whole_of_it() -> None:
    conf = {"spark.sql.shuffle.partitions": "8"}
    spark = {"executors": 3, "executorCores": 2, "executorMemory": "4Gi", "driverMemory": "1Gi", "conf": conf}
    spark_application = made(
        spark,
        pods={"prepare": {"env": [{"name": "A", "value": "b"}], "envFrom": [{"secretRef": {"name": "s3"}}]}},
        runPolicy={"queueName": "research"},
    )
    assert [*spark_application] == ["ConfigMap", "SparkApplication"]
    assert [*spark_application["ConfigMap"]["data"]] == ["recipe.yaml"]
    template = spark_application["SparkApplication"]["spec"]["driver"]["template"]
    env = {item["name"]: item.get("value") for item in template["spec"]["containers"][0].pop("env")}
    assert env == {
        "HOME": "/tmp",
        "A": "b",
        "FINETUNE_RECIPE": "/etc/finetune/recipe.yaml",
        "MLFLOW_TRACKING_URI": SETTINGS.tracking_uri,
        "MLFLOW_REGISTRY_URI": SETTINGS.tracking_uri,
        "MLFLOW_RUN_ID": "r1",
        "FINETUNE_POD_NAMESPACE": "team",
        "FINETUNE_EXECUTOR_SELECTOR": SELECTOR,
    }
    recipe = {"name": "recipe", "mountPath": "/etc/finetune", "readOnly": True}
    assert spark_application["SparkApplication"] == {
        "apiVersion": "sparkoperator.k8s.io/v1beta2",
        "kind": "SparkApplication",
        "metadata": {
            "name": "tune-prep-1",
            "namespace": "team",
            "labels": {**LABELS, "kueue.x-k8s.io/queue-name": "research"},
            "ownerReferences": [{**OWNER, "controller": True, "blockOwnerDeletion": True}],
        },
        "spec": {
            "type": "Python",
            "mode": "cluster",
            "sparkVersion": "4.2.0",
            "image": SETTINGS.prep_image,
            "imagePullPolicy": SETTINGS.prep_pull_policy,
            "mainApplicationFile": "local:///opt/finetune/prep.py",
            "restartPolicy": {"type": "Never"},
            "memoryOverheadFactor": "0.4",
            "sparkConf": conf,
            "driver": {
                "podName": "tune-prep-1-driver",
                "memory": "1048576k",
                "serviceAccount": "finetune-spark",
                "template": {
                    "metadata": {"labels": LABELS, "ownerReferences": [{**OWNER, "controller": True}]},
                    "spec": {
                        **POD,
                        "automountServiceAccountToken": True,
                        "containers": [
                            {
                                **CONTAINER,
                                "name": "spark-kubernetes-driver",
                                "command": ["finetune-driver"],
                                "envFrom": [S3],
                                "volumeMounts": [*SCRATCH, recipe],
                            }
                        ],
                        "volumes": [*VOLUMES, {"name": "recipe", "configMap": {"name": "tune-prep"}}],
                    },
                },
            },
            "executor": {
                "instances": 3,
                "cores": 2,
                "memory": "4194304k",
                "labels": {"finetune.dev/component": "prep-executor"},
                "template": {
                    "metadata": {"labels": {**LABELS, "finetune.dev/component": "prep-executor"}},
                    "spec": {
                        **POD,
                        "automountServiceAccountToken": False,
                        "containers": [
                            {
                                **CONTAINER,
                                "name": "spark-kubernetes-executor",
                                "command": ["finetune-executor"],
                                "env": [HOME, {"name": "A", "value": "b"}],
                                "envFrom": [S3],
                                "volumeMounts": SCRATCH,
                            }
                        ],
                        "volumes": VOLUMES,
                    },
                },
            },
        },
    }


SIDECAR: Json = {"name": "sidecar", "image": "sidecar:1", "restartPolicy": "Always"}
TEAM: Json = {
    "metadata": {"annotations": {"team": "a"}, "name": "mine", "finalizers": ["mine"]},
    "spec": {
        "nodeSelector": {"pool": "spark"},
        "containers": [
            {
                "name": "main",
                "image": "theirs:1",
                "args": ["--theirs"],
                "resources": {
                    "requests": {"cpu": 1, "ephemeral-storage": "9Gi"},
                    "limits": {"cpu": "1500m"},
                },
            },
        ],
        "initContainers": [SIDECAR],
    },
}


def test_a_pod_template_counts_as_far_as_spark_submit_takes_it() -> None:
    spark_application = made(pods={"prepare": {"template": TEAM}})["SparkApplication"]["spec"]
    driver, executor = spark_application["driver"], spark_application["executor"]
    assert spark_application["image"] == "theirs:1"
    assert {key: driver[key] for key in ("coreRequest", "coreLimit")} == {
        "coreRequest": "1",
        "coreLimit": "1500m",
    }
    [main], [sidecar] = (driver["template"]["spec"][kind] for kind in ("containers", "initContainers"))
    assert (main["resources"], "args" in main) == ({"requests": {"ephemeral-storage": "9Gi"}}, False)
    assert sidecar == SIDECAR
    assert [part["template"]["spec"]["nodeSelector"] for part in (driver, executor)] == [
        {"pool": "spark"},
        {"pool": "spark"},
    ]
    assert [sorted(part["template"]["metadata"]) for part in (driver, executor)] == [
        ["annotations", "labels", "ownerReferences"],
        ["annotations", "labels"],
    ]
    assert "resources" not in executor["template"]["spec"]["containers"][0]


def test_with_dynamic_allocation_spark_chooses_the_number_of_executors() -> None:
    spark_application = made({"conf": {"spark.dynamicAllocation.enabled": "true"}})
    assert "instances" not in spark_application["SparkApplication"]["spec"]["executor"]


def memory(kind: str) -> Json:
    return {"spec": {"containers": [{"name": "main", "resources": {kind: {"memory": "4Gi"}}}]}}


MISTAKES: dict[str, tuple[Json, bool]] = {
    "none": ({}, False),
    "a request of memory": ({"template": memory("requests")}, True),
    "a limit of memory": ({"template": memory("limits")}, True),
    "another mode": ({"template": memory("limits"), "spark": {"mode": "Local"}}, False),
    "a template that is none": (
        {"template": {"spec": {"containers": [{"name": "main", "resources": 1}]}}},
        False,
    ),
}


@pytest.mark.parametrize(("given", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_what_spark_submit_overrides_is_refused(given: Json, expected: bool) -> None:
    wanted = data()
    wanted["prepare"] |= {"spark": given["spark"]} if "spark" in given else {}
    pods = {"prepare": {"template": given.get("template")}}
    job_spec = spec(data=wanted, pods=pods)
    backend = backends.find_backend(job_spec)
    assert backend
    assert [*backend.find_pod_mistakes(job_spec)] == (
        [
            "spec.pods.prepare.template sets the memory of the container main, but with data.prepare.spark.mode SparkApplication the "
            "driver gets driverMemory plus 40%: remove the memory from the template"
        ]
        if expected
        else []
    )


def test_a_job_with_such_a_template_waits_for_its_correction() -> None:
    decision = conclude(ftj(data=data(), pods={"prepare": {"template": memory("limits")}}))
    assert applied(decision) == []
    spark_application = said(decision, ConditionType.ACCEPTED)
    assert spark_application
    assert spark_application[:2] == ("False", ConditionReason.POD_TEMPLATE_INVALID)


def test_the_driver_has_the_login_of_the_run_and_executors_do_not() -> None:
    """And no other keys of the Secret: a variable such as PYTHONPATH would load code beside the API token of the driver."""
    spark_application = made(tracking={"uri": "http://m:5000", "secretRef": {"name": "mlflow"}})
    pods = [
        spark_application["SparkApplication"]["spec"][role]["template"]["spec"]
        for role in ("driver", "executor")
    ]
    secret_keys = [
        [
            (item["name"], reference["name"], reference["key"], reference["optional"])
            for item in pod["containers"][0]["env"]
            if (reference := item.get("valueFrom", {}).get("secretKeyRef"))
        ]
        for pod in pods
    ]
    keys = ("TOKEN", "USERNAME", "PASSWORD", "INSECURE_TLS")
    names_of_keys = [f"MLFLOW_TRACKING_{key}" for key in keys]
    assert secret_keys == [[(name, "mlflow", name, True) for name in names_of_keys], []]
    assert [pod["containers"][0]["envFrom"] for pod in pods] == [[], []]


def test_it_waits_for_the_run() -> None:
    decision = conclude(
        ftj(status(ACCEPTED, ADMITTED), data=data()), observed(mlflow=Mlflow()), settings=SETTINGS
    )
    assert (applied(decision), decision.status.spark_application) == ([], None)
    spark_application = said(decision, ConditionType.PREPARED)
    assert spark_application
    assert spark_application[2] == "preparation starts when the MLflow run exists"
