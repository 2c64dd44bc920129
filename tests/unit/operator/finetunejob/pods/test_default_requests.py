"""What the pods of each step request if their templates name no resources."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import ModelStatus
from finetune_operator.registry.base import RegisteredVersion
from fixtures.operator_in_memory.decisions import (
    ACCEPTED,
    ADMITTED,
    PREPARED,
    SETTINGS,
    TRAINED,
    conclude,
    condition,
    ftj,
    observed,
    running,
    status,
    tracked,
)

Json = dict[str, Any]
EVALUATING = condition(ConditionType.EVALUATED, "False", ConditionReason.EVALUATING)
MODEL = ModelStatus(name="tuned", version="4", uri="models:/tuned/4", summary="tuned/4")
QUEUE: Json = {"runPolicy": {"queueName": "gpus"}}


def preparing(**spark: Any) -> Json:
    source = {"type": "Parquet", "path": "s3://lake/raw"}
    return {"data": {"source": source, "prepare": {"output": "s3://lake/out", "spark": spark}}}


def start(before: Any, **parts: Any) -> Json:
    """The object with the pods of the step that a pass starts."""
    observation = observed(mlflow=tracked(RegisteredVersion("tuned", "4")))
    return dict(conclude(ftj(before, **parts), observation, settings=SETTINGS).apply[-1])


def resources(job: Json) -> dict[str, Json | None]:
    """The resources of each container of the operator."""
    spec = job["spec"]["template"]["spec"]
    return {
        item["name"]: item.get("resources") for item in [*spec.get("initContainers", []), *spec["containers"]]
    }


REQUESTS: Json = {"requests": {"cpu": "100m", "memory": "256Mi"}}
NEW, TRAIN = status(ADMITTED), running()
EVALUATE = status(ACCEPTED, PREPARED, TRAINED, EVALUATING, model=MODEL)
EVALUATION: Json = {"evaluation": {"metrics": ["Accuracy"]}, "register": {"model": "tuned"}}
STEPS: dict[str, tuple[Any, Json, dict[str, Json | None]]] = {
    "a preparation with a large heap": (NEW, preparing(driverMemory="6Gi"), {"prep": REQUESTS}),
    "a preparation with executors: the driver": (NEW, preparing(mode="Kubernetes"), {"prep": REQUESTS}),
    "a training with eight ranks in a pod": (
        TRAIN,
        {"distributed": {"nodes": 2, "processesPerNode": 8}},
        {"trainer": REQUESTS},
    ),
    "an evaluation": (EVALUATE, EVALUATION, {"evaluate": REQUESTS}),
    "an evaluation by a command, and its init container": (
        EVALUATE,
        EVALUATION | {"evaluation": {"command": ["python3", "judge.py"]}},
        {"fetch": REQUESTS, "evaluate": REQUESTS},
    ),
    "a preparation in a queue": (NEW, preparing() | QUEUE, {"prep": None}),
    "a training in a queue": (TRAIN, QUEUE, {"trainer": None}),
    "an evaluation in a queue": (EVALUATE, EVALUATION | QUEUE, {"evaluate": None}),
}


@pytest.mark.parametrize(("before", "parts", "expected"), STEPS.values(), ids=STEPS)
def test_what_a_step_requests(before: Any, parts: Json, expected: dict[str, Json | None]) -> None:
    assert resources(start(before, **parts)) == expected


def test_spark_itself_sets_what_executors_request() -> None:
    driver = start(NEW, **preparing(mode="Kubernetes"))["spec"]["template"]["spec"]["containers"][0]
    variables = {item["name"]: item.get("value") for item in driver["env"]}
    executor = json.loads(variables["FINETUNE_EXECUTOR_TEMPLATE"].replace("$$", "$"))
    assert [item.get("resources") for item in executor["spec"]["containers"]] == [None]


def test_spark_submit_sets_what_the_driver_of_a_sparkapplication_requests() -> None:
    spec = start(NEW, **preparing(mode="SparkApplication"))["spec"]
    assert "coreRequest" not in spec["driver"]
    assert [item.get("resources") for item in spec["driver"]["template"]["spec"]["containers"]] == [None]
