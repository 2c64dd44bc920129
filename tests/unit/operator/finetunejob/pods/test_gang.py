"""The children of a training attempt, whole."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.data import Columns
from finetune_crds.status import DataStatus
from finetune_operator.settings import Settings
from fixtures.operator_in_memory.decisions import (
    PATIENCE_WITH_NODES,
    SOURCE,
    UID,
    conclude,
    condition,
    ftj,
    observed,
    running,
    status,
    tracked,
)

Json = dict[str, Any]

SETTINGS = Settings(
    trainer_image="trainer:1",
    trainer_pull_policy="Always",
    tracking_uri="http://m:5000",
    registry_uri="http://r",
)
OWNER = [
    {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "name": "tune",
        "uid": UID,
        "controller": True,
        "blockOwnerDeletion": True,
    }
]
LABELS = {
    "app.kubernetes.io/managed-by": "finetune-operator",
    "finetune.dev/job": "tune",
    "finetune.dev/job-uid": UID,
    "finetune.dev/component": "train",
}
FULL: Json = {
    "distributed": {
        "nodes": 2,
        "processesPerNode": 4,
        "networkInterface": "eth0",
        "port": 29400,
    },
    "trainer": {
        "command": ["torchrun", "my_train.py"],
        "args": ["--fast"],
        "code": {"configMapRef": {"name": "my-code"}, "mountPath": "/code"},
    },
    "pods": {
        "train": {
            "image": "mine:1",
            "env": [{"name": "HF_HOME", "value": "/models"}],
            "envFrom": [{"configMapRef": {"name": "more"}}],
            "template": {
                "spec": {
                    "tolerations": [{"key": "gpu", "operator": "Exists"}],
                    "containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": 4}}}],
                }
            },
        },
    },
    "tracking": {"secretRef": {"name": "mlflow"}},
    "checkpoint": {"uri": "/checkpoints"},
    "runPolicy": {"queueName": "gpus", "fatalExitCodes": [65, 64, 64]},
}
INDEX = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}

EXPECTED: Json = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {
        "name": "tune-train-2",
        "namespace": "team",
        "labels": LABELS | {"finetune.dev/attempt": "2", "kueue.x-k8s.io/queue-name": "gpus"},
        "ownerReferences": OWNER,
    },
    "spec": {
        "completionMode": "Indexed",
        "completions": 2,
        "parallelism": 2,
        "backoffLimit": 0,
        "suspend": True,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {
            "metadata": {"labels": LABELS | {"finetune.dev/attempt": "2"}},
            "spec": {
                "automountServiceAccountToken": False,
                "enableServiceLinks": False,
                "restartPolicy": "Never",
                "subdomain": "tune",
                "terminationGracePeriodSeconds": 120,
                "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
                "tolerations": [{"key": "gpu", "operator": "Exists"}, *PATIENCE_WITH_NODES],
                "topologySpreadConstraints": [
                    {
                        "maxSkew": 1,
                        "topologyKey": "kubernetes.io/hostname",
                        "whenUnsatisfiable": "ScheduleAnyway",
                        "labelSelector": {
                            "matchLabels": {"finetune.dev/job-uid": UID, "finetune.dev/attempt": "2"}
                        },
                    }
                ],
                "containers": [
                    {
                        "name": "trainer",
                        "image": "mine:1",
                        "imagePullPolicy": "Always",
                        "command": ["torchrun", "my_train.py"],
                        "args": ["--fast"],
                        "workingDir": "/code",
                        "terminationMessagePolicy": "FallbackToLogsOnError",
                        "resources": {"limits": {"nvidia.com/gpu": 4}},
                        "securityContext": {
                            "allowPrivilegeEscalation": False,
                            "capabilities": {"drop": ["ALL"]},
                        },
                        "env": [
                            {"name": "HOME", "value": "/tmp"},
                            {"name": "HF_HOME", "value": "/models"},
                            {"name": "PET_NODE_RANK", "valueFrom": INDEX},
                            {"name": "NODE_RANK", "valueFrom": INDEX},
                            {"name": "PET_NNODES", "value": "2"},
                            {"name": "PET_NPROC_PER_NODE", "value": "4"},
                            {"name": "PET_MASTER_ADDR", "value": "tune-train-2-0.tune"},
                            {"name": "PET_MASTER_PORT", "value": "29400"},
                            {"name": "PET_RDZV_CONF", "value": "timeout=600"},
                            {"name": "MASTER_ADDR", "value": "tune-train-2-0.tune"},
                            {"name": "MASTER_PORT", "value": "29400"},
                            {"name": "NUM_NODES", "value": "2"},
                            {"name": "LOCAL_WORLD_SIZE", "value": "4"},
                            {"name": "WORLD_SIZE", "value": "8"},
                            {"name": "NCCL_SOCKET_IFNAME", "value": "eth0"},
                            {"name": "GLOO_SOCKET_IFNAME", "value": "eth0"},
                            {"name": "FINETUNE_RECIPE", "value": "/etc/finetune/recipe.yaml"},
                            {"name": "MLFLOW_TRACKING_URI", "value": "http://m:5000"},
                            {"name": "MLFLOW_REGISTRY_URI", "value": "http://r"},
                            {"name": "MLFLOW_RUN_ID", "value": "r1"},
                            {"name": "HYPERPARAMETERS_PATH", "value": "/etc/finetune/parameters.yaml"},
                            {"name": "CODE_SOURCE_PATH", "value": "/code"},
                            {"name": "FINETUNE_ATTEMPT", "value": "2"},
                            {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": "110"},
                        ],
                        "envFrom": [
                            {"configMapRef": {"name": "more", "optional": False}},
                            {"secretRef": {"name": "mlflow", "optional": False}},
                        ],
                        "volumeMounts": [
                            {"name": "tmp", "mountPath": "/tmp"},
                            {"name": "shm", "mountPath": "/dev/shm"},
                            {"name": "finetune-code", "mountPath": "/code", "readOnly": True},
                            {"name": "recipe", "mountPath": "/etc/finetune", "readOnly": True},
                        ],
                    }
                ],
                "volumes": [
                    {"name": "tmp", "emptyDir": {}},
                    {"name": "shm", "emptyDir": {"medium": "Memory"}},
                    {"name": "finetune-code", "configMap": {"name": "my-code", "optional": False}},
                    {"name": "recipe", "configMap": {"name": "tune-train"}},
                ],
            },
        },
    },
}


def children(before: Any = None, **parts: Any) -> list[Json]:
    prepared_columns = conclude(ftj(before, **parts), observed(mlflow=tracked()), settings=SETTINGS)
    return list(prepared_columns.apply)


def test_the_job_of_an_attempt() -> None:
    assert children(running(attempt=2), **FULL)[-1] == EXPECTED


def test_the_service_names_pods_before_they_are_ready() -> None:
    assert children()[0] == {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "tune", "namespace": "team", "labels": LABELS, "ownerReferences": OWNER},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"finetune.dev/job-uid": UID, "finetune.dev/component": "train"},
            "ports": [{"name": "rendezvous", "port": 29500, "protocol": "TCP"}],
        },
    }


def test_the_recipe_names_the_splits_that_preparation_made() -> None:
    before = status(
        condition(ConditionType.PREPARED, "True", ConditionReason.PREPARED),
        data=DataStatus(path="/data/splits", version=7, digest="c0ffee", source_version=3),
    )
    bodies = children(before, data=SOURCE)[1]
    assert (bodies["kind"], bodies["metadata"]["name"]) == ("ConfigMap", "tune-train")
    recipe = yaml.safe_load(bodies["data"]["recipe.yaml"])
    assert recipe["data"]["splits"] == {"type": "Delta", "path": "/data/splits", "version": 7}
    assert recipe["prepared"] == {
        "path": "/data/splits",
        "version": 7,
        "digest": "c0ffee",
        "sourceVersion": 3,
    }


PARAMETERS: Json = {
    "learning_rate": 2e-5,
    "max_steps": 100,
    "packed": False,
    "name": "2e-5",
    "nothing": None,
    "layers": [1, "q_proj", 0.5],
    "optimizer": {"betas": [0.9, 0.95], "fused": True},
    "text": "zwei\nZeilen, ä",
}


def test_a_command_finds_its_parameters_alone_and_typed() -> None:
    trainer = {"command": ["torchrun", "t.py"], "parameters": PARAMETERS}
    data = children(trainer=trainer)[1]["data"]
    assert set(data) == {"recipe.yaml", "parameters.yaml"}
    assert yaml.safe_load(data["parameters.yaml"]) == PARAMETERS
    assert yaml.safe_load(data["recipe.yaml"])["parameters"] == PARAMETERS
    assert yaml.safe_load(children(trainer={"command": ["t"]})[1]["data"]["parameters.yaml"]) == {}


def environment(**parts: Any) -> set[str]:
    container = children(**parts)[-1]["spec"]["template"]["spec"]["containers"][0]
    return {item["name"] for item in container["env"]}


def test_only_a_command_has_a_file_of_parameters_and_only_with_code_a_folder_of_it() -> None:
    assert set(children()[1]["data"]) == {"recipe.yaml"}
    assert {"HYPERPARAMETERS_PATH", "CODE_SOURCE_PATH"} & environment() == set()
    command = {"HYPERPARAMETERS_PATH", "CODE_SOURCE_PATH"} & environment(trainer={"command": ["t"]})
    assert command == {"HYPERPARAMETERS_PATH"}


def test_a_command_needs_neither_model_nor_data() -> None:
    bodies = children(model=None, data=None, trainer={"command": ["torchrun", "t.py"]})
    recipe = yaml.safe_load(bodies[1]["data"]["recipe.yaml"])
    assert {"model", "data", "prepared"} & set(recipe) == set()
    assert bodies[-1]["spec"]["template"]["spec"]["volumes"][-1]["name"] == "recipe"


FOUND = Columns(type="Messages", messages="messages")
NAMED = {"type": "PromptResponse", "prompt": "question", "response": "answer"}
COLUMNS: dict[str, tuple[Json | None, Columns | None, Json | None]] = {
    "those that preparation found": (None, FOUND, {"type": "Messages", "messages": "messages"}),
    "those of the spec": (NAMED, Columns.model_validate(NAMED), NAMED),
    "those of the spec, where preparation said nothing": (NAMED, None, NAMED),
    "none, where nobody knows them": (None, None, None),
}


@pytest.mark.parametrize(("spec_columns", "prepared_columns", "expected"), COLUMNS.values(), ids=COLUMNS)
def test_training_follows_the_columns_of_the_preparation(
    spec_columns: Json | None, prepared_columns: Columns | None, expected: Json | None
) -> None:
    before = status(
        condition(ConditionType.PREPARED, "True", ConditionReason.PREPARED),
        data=DataStatus(path="/data/splits", version=7, columns=prepared_columns),
    )
    data = {key: value for key, value in {**SOURCE, "columns": spec_columns}.items() if value is not None}
    recipe = yaml.safe_load(children(before, data=data)[1]["data"]["recipe.yaml"])
    assert recipe["data"].get("columns") == expected


@pytest.mark.parametrize("component", ["train", "prep"])
def test_downloaded_models_are_kept_on_their_claim(component: str) -> None:
    """The Hub's client of a user's own script finds the claim too, unless its environment says otherwise."""
    parts: Json = {"model": {"base": "org/base", "cache": {"claimName": "models"}}}
    if component == "prep":
        parts["data"] = SOURCE | {"prepare": {"output": "/o"}}
        parts["pods"] = {"prepare": {"env": [{"name": "HF_HUB_CACHE", "value": "/hub"}]}}
    spec = children(**parts)[-1]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert {"name": "model-cache", "persistentVolumeClaim": {"claimName": "models"}} in spec["volumes"]
    assert {"name": "model-cache", "mountPath": "/var/cache/finetune"} in container["volumeMounts"]
    hub = [item["value"] for item in container["env"] if item["name"] == "HF_HUB_CACHE"]
    assert hub == (["/hub"] if component == "prep" else ["/var/cache/finetune/hub"])


def test_the_built_in_loop_runs_in_the_operators_image() -> None:
    container = children()[-1]["spec"]["template"]["spec"]["containers"][0]
    assert (container["image"], container["command"], container.get("args")) == (
        "trainer:1",
        ["finetune-train"],
        None,
    )


def test_a_job_without_a_queue_starts_at_once() -> None:
    bodies = children()[-1]
    assert "suspend" not in bodies["spec"]
    assert "kueue.x-k8s.io/queue-name" not in bodies["metadata"]["labels"]


def test_no_code_is_fatal_when_none_is_said_to_be() -> None:
    rules = children(runPolicy={"fatalExitCodes": []})[-1]["spec"]["podFailurePolicy"]["rules"]
    assert len(rules) == 2


def test_code_on_a_volume_is_mounted_from_there() -> None:
    template = {"spec": {"volumes": [{"name": "src", "persistentVolumeClaim": {"claimName": "c"}}]}}
    trainer = {"command": ["python", "t.py"], "code": {"volume": "src"}}
    spec = children(trainer=trainer, pods={"train": {"template": template}})[-1]["spec"]["template"]["spec"]
    assert {"name": "src", "mountPath": "/workspace", "readOnly": True} in spec["containers"][0][
        "volumeMounts"
    ]
    assert [item["name"] for item in spec["volumes"]] == ["tmp", "shm", "src", "recipe"]


def test_a_spread_of_ones_own_replaces_the_operators() -> None:
    template: Json = {"spec": {"topologySpreadConstraints": []}}
    assert (
        children(pods={"train": {"template": template}})[-1]["spec"]["template"]["spec"][
            "topologySpreadConstraints"
        ]
        == []
    )
