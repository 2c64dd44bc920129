"""How the ranks of one attempt find each other."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.distributed import Distributed
from finetune_crds.env import CODE_ENV, RESERVED_ENV
from finetune_crds.sinks import list_reserved_env
from finetune_crds.tracking import Tracking
from finetune_operator.finetunejob.pods.rendezvous import rendezvous_env, run_env, sink_env
from fixtures.operator_in_memory.decisions import (
    ADMITTED,
    SETTINGS,
    UID,
    conclude,
    ftj,
    observed,
    status,
    tracked,
)

Json = dict[str, Any]
INDEX = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}


def values(**distributed: Any) -> dict[str, Any]:
    variables = rendezvous_env(ftj(), 3, Distributed.model_validate(distributed))
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in variables}


def test_torchrun_and_scripts_are_told_the_same() -> None:
    assert values(nodes=4, processesPerNode=8, port=1234) == {
        "PET_NODE_RANK": INDEX,
        "NODE_RANK": INDEX,
        "PET_NNODES": "4",
        "PET_NPROC_PER_NODE": "8",
        "PET_MASTER_ADDR": "tune-train-3-0.tune",
        "PET_MASTER_PORT": "1234",
        "PET_RDZV_CONF": "timeout=600",
        "MASTER_ADDR": "tune-train-3-0.tune",
        "MASTER_PORT": "1234",
        "NUM_NODES": "4",
        "LOCAL_WORLD_SIZE": "8",
        "WORLD_SIZE": "32",
    }


def test_the_interface_is_set_for_both_backends() -> None:
    variables = values(networkInterface="eth1")
    added = {name: variables[name] for name in variables.keys() - values().keys()}
    assert added == {"NCCL_SOCKET_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": "eth1"}


RUNS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "no MLflow": ({"servers": ("", ""), "run_id": None}, {}),
    "no run yet": (
        {"servers": ("http://m", "http://m"), "run_id": None},
        {"MLFLOW_TRACKING_URI": "http://m", "MLFLOW_REGISTRY_URI": "http://m"},
    ),
    "a registry of its own": (
        {"servers": ("http://m", "http://r"), "run_id": "r1"},
        {"MLFLOW_TRACKING_URI": "http://m", "MLFLOW_REGISTRY_URI": "http://r", "MLFLOW_RUN_ID": "r1"},
    ),
}


@pytest.mark.parametrize(("arguments", "expected"), RUNS.values(), ids=RUNS)
def test_run_env(arguments: Json, expected: dict[str, str]) -> None:
    variables = {item["name"]: item["value"] for item in run_env(**arguments)}
    assert variables == {"FINETUNE_RECIPE": "/etc/finetune/recipe.yaml"} | expected


def test_what_the_operator_sets_is_what_people_may_not_set() -> None:
    on_executors = {
        "source": {"type": "Parquet", "path": "s3://corpora/a"},
        "prepare": {"output": "s3://splits/a", "spark": {"mode": "Kubernetes"}},
    }
    trainer_fields = {"command": ["torchrun", "t.py"], "code": {"configMapRef": {"name": "code"}}}
    decisions = (
        conclude(ftj(trainer=trainer_fields), observed(mlflow=tracked()), settings=SETTINGS),
        conclude(ftj(status(ADMITTED), data=on_executors), settings=SETTINGS),
    )
    pods = [decision.apply[-1]["spec"]["template"]["spec"] for decision in decisions]
    names = {item["name"] for pod in pods for item in pod["containers"][0]["env"]}
    assert names - {"HOME"} == {*RESERVED_ENV, CODE_ENV}


SHARED = {"WANDB_RUN_ID": UID, "WANDB_RESUME": "allow", "WANDB_PROJECT": "support"}
SECRET = {"name": "wandb", "key": "WANDB_API_KEY"}
SINKS: dict[str, tuple[Json, Json]] = {
    "none": ({}, {}),
    "TensorBoard": (
        {"sinks": [{"type": "TensorBoard", "uri": "s3://logs/"}]},
        {"TENSORBOARD_LOGGING_DIR": f"s3://logs/team-tune-{UID[:8]}"},
    ),
    "TensorBoard in a store that commands cannot write to": (
        {"sinks": [{"type": "TensorBoard", "uri": "gs://logs/"}]},
        {},
    ),
    "W&B with a key of the environment": (
        {"sinks": [{"type": "WandB", "project": "support"}]},
        {**SHARED, "WANDB_NAME": "tune"},
    ),
    "W&B with a Secret": (
        {
            "runName": "first try",
            "sinks": [
                {"type": "WandB", "project": "support", "entity": "ml", "secretRef": {"name": "wandb"}}
            ],
        },
        {
            **SHARED,
            "WANDB_NAME": "first try",
            "WANDB_ENTITY": "ml",
            "WANDB_API_KEY": {"secretKeyRef": {**SECRET, "optional": False}},
        },
    ),
    "W&B with a Secret that may be missing": (
        {
            "sinks": [
                {"type": "WandB", "project": "support", "secretRef": {"name": "wandb", "optional": True}}
            ]
        },
        {**SHARED, "WANDB_NAME": "tune", "WANDB_API_KEY": {"secretKeyRef": {**SECRET, "optional": True}}},
    ),
}


@pytest.mark.parametrize(("tracking", "expected"), SINKS.values(), ids=SINKS)
def test_sinks_are_variables_that_users_may_not_set(tracking: Json, expected: Json) -> None:
    spec = Tracking.model_validate(tracking)
    variables = {item["name"]: item.get("value", item.get("valueFrom")) for item in sink_env(ftj(), spec)}
    assert variables == expected
    assert {*list_reserved_env(spec.sinks)} >= expected.keys()
