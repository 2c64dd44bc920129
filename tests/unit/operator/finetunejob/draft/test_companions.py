"""Services, ConfigMaps and NetworkPolicies that somebody deleted."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import FineTuneJobStatus, MlflowStatus, ModelStatus
from finetune_operator import names
from finetune_operator.registry.base import RegisteredVersion
from fixtures.operator_in_memory.decisions import (
    ACCEPTED,
    NOW,
    PREPARED,
    SETTINGS,
    SOURCE,
    TRAINED,
    applied,
    child,
    conclude,
    condition,
    ended,
    ftj,
    observed,
    pod,
    running,
    status,
    tracked,
)

Json = dict[str, Any]
KNOWN: Json = {"attempt": 1, "start_time": NOW, "mlflow": MlflowStatus(experiment_id="e1", run_id="r1")}
PREPARING = condition(ConditionType.PREPARED, "False", ConditionReason.PREPARING)
EVALUATING = condition(ConditionType.EVALUATED, "False", ConditionReason.EVALUATING)
MODEL = ModelStatus(name="tuned", version="4", uri="models:/tuned/4", summary="tuned/4")
TRAIN = {("Service", "tune"), ("ConfigMap", "tune-train"), ("NetworkPolicy", "tune")}
ALL_OF_TRAIN = ["Service/tune", "ConfigMap/tune-train", "NetworkPolicy/tune"]
EXECUTORS: Json = {"mode": "Kubernetes", "executors": 2}


def evaluating(job: Json, *pods: Json, version: RegisteredVersion | None) -> tuple[Any, Any]:
    before = status(ACCEPTED, PREPARED, TRAINED, EVALUATING, **KNOWN, model=MODEL)
    job["metadata"]["annotations"] = {names.ANNOTATION_VERSION: "4"}
    parts: Json = {"evaluation": {"metrics": ["Accuracy"]}, "register": {"model": "tuned"}}
    return ftj(before, **parts), observed(job, pods=[*pods], mlflow=tracked(version))


def preparing(**spark: Any) -> tuple[Any, Any]:
    prepare = {"spark": spark} if spark else {}
    data = SOURCE | {"prepare": SOURCE["prepare"] | prepare}
    return ftj(status(ACCEPTED, PREPARING, **KNOWN), data=data), observed(
        child("tune-prep"), pods=[pod("tune-prep", component=names.PREP)], mlflow=tracked()
    )


def training(job: Json, *pods: Json, before: FineTuneJobStatus | None = None) -> tuple[Any, Any]:
    return ftj(before or running(**KNOWN)), observed(job, pods=[*pods], mlflow=tracked())


PODS = [pod("tune-train-1", 0), pod("tune-train-1", 1)]
QUEUED = child("tune-train-1") | {"spec": {"suspend": True}}
VERSION = RegisteredVersion("tuned", "4")
STEPS: dict[str, tuple[tuple[Any, Any], set[tuple[str, str]], list[str]]] = {
    "training, all present": (training(child("tune-train-1"), *PODS), TRAIN, []),
    "training, nothing present": (
        training(child("tune-train-1"), *PODS),
        set(),
        ALL_OF_TRAIN,
    ),
    "training, no Service": (
        training(child("tune-train-1"), *PODS),
        TRAIN - {("Service", "tune")},
        ["Service/tune"],
    ),
    "training, no NetworkPolicy": (
        training(child("tune-train-1"), *PODS),
        TRAIN - {("NetworkPolicy", "tune")},
        ["NetworkPolicy/tune"],
    ),
    "training in a queue": (training(QUEUED), set(), ALL_OF_TRAIN),
    "failed training": (
        training(child("tune-train-1", "Failed"), ended("tune-train-1", 0, 1), ended("tune-train-1", 1, 1)),
        set(),
        [],
    ),
    "a preparation in one pod": (preparing(), set(), ["ConfigMap/tune-prep"]),
    "a preparation with executors": (
        preparing(**EXECUTORS),
        {("ConfigMap", "tune-prep")},
        ["Service/tune-prep", "NetworkPolicy/tune"],
    ),
    "a preparation with executors, all present": (
        preparing(**EXECUTORS),
        {("ConfigMap", "tune-prep"), ("Service", "tune-prep"), ("NetworkPolicy", "tune")},
        [],
    ),
    "an evaluation": (
        evaluating(child("tune-evaluate"), pod("tune-evaluate", component=names.EVALUATE), version=VERSION),
        TRAIN,
        ["ConfigMap/tune-evaluate"],
    ),
    "an evaluation whose version is not known": (
        evaluating(child("tune-evaluate"), pod("tune-evaluate", component=names.EVALUATE), version=None),
        TRAIN,
        [],
    ),
}


@pytest.mark.parametrize(("step", "companions", "restored"), STEPS.values(), ids=STEPS)
def test_a_running_step_gets_its_companions_back(
    step: tuple[Any, Any], companions: set[tuple[str, str]], restored: list[str]
) -> None:
    job, observation = step
    observation = observation.__class__(**{**vars(observation), "companions": frozenset(companions)})
    assert applied(conclude(job, observation, settings=SETTINGS)) == restored
    unknown = observation.__class__(**{**vars(observation), "companions": None})
    assert applied(conclude(job, unknown, settings=SETTINGS)) == []
