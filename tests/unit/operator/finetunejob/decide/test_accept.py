"""What this version can run, and what it refuses by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from finetune_crds.conditions import SUMMARY, ConditionReason, ConditionType
from finetune_crds.status import FineTuneJobStatus
from finetune_operator.finetunejob.decide.accept import mistakes, not_implemented
from finetune_operator.finetunejob.model import Decision
from finetune_operator.settings import Settings
from worlds.memory.decisions import (
    NO_MLFLOW,
    NOW,
    PREPARED,
    SOURCE,
    TRAINING,
    applied,
    child,
    conclude,
    condition,
    ftj,
    observed,
    pod,
    running,
    said,
    spec,
    status,
)

Json = dict[str, Any]


def prepared(**prepare: Any) -> Json:
    return {**SOURCE, "prepare": {**SOURCE["prepare"], **prepare}}


REFUSED: dict[str, tuple[Json, list[str]]] = {
    "nothing": ({}, []),
    "Spark on Kubernetes": (
        {"data": prepared(spark={"mode": "Kubernetes"})},
        ["data.prepare.spark.mode Kubernetes (use Local)"],
    ),
    "Spark on Databricks": (
        {"data": prepared(spark={"mode": "Databricks"})},
        ["data.prepare.spark.mode Databricks (use Local)"],
    ),
    "near duplicates": (
        {"data": prepared(dedupe={"near": {}})},
        ["data.prepare.dedupe.near (exact duplicates can be removed)"],
    ),
    "a data set of the Hub": (
        {"data": {**SOURCE, "source": {"type": "Hub", "dataset": "a/b"}}},
        ["data.source.type Hub (copy the data set to a folder and use Parquet or JSONLines)"],
    ),
    "an MLflow of another kind": (
        {"tracking": {"uri": "databricks", "registryUri": "databricks-uc"}},
        [
            "tracking.uri databricks (use the http or https address of an MLflow server)",
            "tracking.registryUri databricks-uc (use the http or https address of an MLflow server)",
        ],
    ),
    "several at once": (
        {"data": prepared(spark={"mode": "Kubernetes"}, dedupe={"near": {}})},
        [
            "data.prepare.spark.mode Kubernetes (use Local)",
            "data.prepare.dedupe.near (exact duplicates can be removed)",
        ],
    ),
    **{
        f"method {method}": ({"method": {"type": method}}, [])
        for method in ("Full", "LoRA", "QLoRA", "DoRA", "PrefixTuning", "PromptTuning")
    },
    "DPO": ({"objective": {"type": "DPO"}}, []),
    "Distillation": ({"objective": {"type": "Distillation", "distillation": {"teacher": "t"}}}, []),
    **{strategy: ({"distributed": {"strategy": strategy}}, []) for strategy in ("FSDP", "HSDP", "DDP")},
    **{
        f"activation checkpointing {choice}": ({"training": {"activationCheckpointing": choice}}, [])
        for choice in ("None", "Selective", "Full", "Auto")
    },
    "all that is there": (
        {
            "data": prepared(
                notNull=["answer"],
                minQuality=0.5,
                filter="a = 1",
                promptTemplate="{question}",
                maxTokens=10,
                limit=10,
                spark={"mode": "Local", "conf": {"a": "b"}},
            ),
            "method": {"type": "LoRA", "lora": {"rank": 8}},
            "training": {
                "compile": True,
                "select": "Best",
                "epochs": 2,
                "evalEverySteps": 5,
                "earlyStopping": {"patience": 2},
            },
            "checkpoint": {"uri": "/c"},
            "tracking": {"uri": "http://m:5000", "secretRef": {"name": "s"}, "systemMetrics": True},
            "register": {"model": "m"},
            "runPolicy": {"queueName": "q", "activeDeadlineSeconds": 5, "ttlSecondsAfterFinished": 5},
            "podTemplate": {"spec": {"nodeSelector": {"a": "b"}}},
        },
        [],
    ),
}


@pytest.mark.parametrize(("parts", "expected"), REFUSED.values(), ids=REFUSED)
def test_not_implemented(parts: Json, expected: list[str]) -> None:
    assert [*not_implemented(spec(**parts))] == expected


REGISTER: Json = {"register": {"model": "m"}}
NEEDS_MLFLOW = (
    "spec.register needs an MLflow server: set spec.tracking.uri, or install the chart with tracking.uri"
)
PASSWORD = (
    "spec.tracking.uri holds a password: put it into a Secret as MLFLOW_TRACKING_USERNAME and "
    "MLFLOW_TRACKING_PASSWORD, and name that in spec.tracking.secretRef"
)

MISTAKES: dict[str, tuple[Json, Settings, list[str]]] = {
    "registering nowhere": (REGISTER, NO_MLFLOW, [NEEDS_MLFLOW]),
    "registering at the default server": (REGISTER, Settings(tracking_uri="http://m"), []),
    "registering at one's own server": (REGISTER | {"tracking": {"uri": "http://m"}}, NO_MLFLOW, []),
    "no MLflow at all": ({}, NO_MLFLOW, []),
    "a password in a page's address": (
        {"tracking": {"uri": "http://m", "publicUrl": "https://me:pass@m.example.com"}},
        NO_MLFLOW,
        [PASSWORD.replace("tracking.uri", "tracking.publicUrl")],
    ),
    "a password in plain sight": ({"tracking": {"uri": "http://me:pass@m:5000"}}, NO_MLFLOW, [PASSWORD]),
    "a password for the registry": (
        {"tracking": {"uri": "http://m", "registryUri": "https://me:pass@m"}},
        NO_MLFLOW,
        [PASSWORD.replace("tracking.uri", "tracking.registryUri")],
    ),
}


@pytest.mark.parametrize(("parts", "settings", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(parts: Json, settings: Settings, expected: list[str]) -> None:
    assert [*mistakes(spec(**parts), settings)] == expected


def test_a_refused_job_fails_with_everything_that_is_missing_and_makes_nothing() -> None:
    decision = conclude(ftj(data=prepared(spark={"mode": "Kubernetes"}, dedupe={"near": {}})))
    message = (
        "this version of the operator cannot do: data.prepare.spark.mode Kubernetes (use Local); "
        "data.prepare.dedupe.near (exact duplicates can be removed)"
    )
    assert said(decision, ConditionType.ACCEPTED) == ("False", ConditionReason.NOT_IMPLEMENTED, message)
    assert said(decision, ConditionType.FAILED) == ("True", ConditionReason.NOT_IMPLEMENTED, message)
    assert (decision.status.phase, applied(decision), decision.actions) == ("Failed", [], ())


def test_a_mistake_is_an_invalid_spec() -> None:
    decision = conclude(ftj(**REGISTER))
    assert said(decision, ConditionType.FAILED) == ("True", ConditionReason.INVALID_SPEC, NEEDS_MLFLOW)


UNREADABLE = (
    "this version of the operator cannot read the spec (spec.method.type: Input should be 'Full' or 'LoRA') and leaves "
    "the job and its children as they are: install a version that can read it"
)


@pytest.mark.parametrize("before", [status(), running()], ids=["a new job", "a running job"])
def test_a_job_whose_spec_cannot_be_read_is_left_alone(before: FineTuneJobStatus) -> None:
    invalid = "spec.method.type: Input should be 'Full' or 'LoRA'"
    unreadable = dataclasses.replace(ftj(before), spec=None, invalid=invalid)
    decision = conclude(unreadable, observed(child("tune-train-1"), pods=[pod("tune-train-1")]))
    assert said(decision, ConditionType.ACCEPTED) == ("Unknown", ConditionReason.SPEC_UNREADABLE, UNREADABLE)
    said_anew = {ConditionType.ACCEPTED, *SUMMARY}
    others = [item for item in decision.status.conditions if item.type not in said_anew]
    assert others == [item for item in before.conditions if item.type not in said_anew]
    assert decision == Decision(status=decision.status)


def test_a_job_at_work_goes_on_when_its_spec_can_be_read_again() -> None:
    """It was accepted before, so it is not judged again."""
    unreadable = condition(ConditionType.ACCEPTED, "Unknown", ConditionReason.SPEC_UNREADABLE)
    before = status(unreadable, PREPARED, TRAINING, attempt=1, restarts=0, start_time=NOW)
    refused_now = ftj(before, **REGISTER)
    seen = observed(child("tune-train-1"), pods=[pod("tune-train-1", index) for index in (0, 1)])
    decision = conclude(refused_now, seen)
    assert said(decision, ConditionType.ACCEPTED) == ("True", ConditionReason.ACCEPTED, "the spec can be run")
    assert (decision.status.phase, decision.apply, decision.delete) == ("Training", (), ())


def test_a_new_job_is_judged_when_its_spec_can_be_read() -> None:
    unreadable = condition(ConditionType.ACCEPTED, "Unknown", ConditionReason.SPEC_UNREADABLE)
    assert conclude(ftj(status(unreadable))).status.phase == "Starting"
    assert conclude(ftj(status(unreadable), **REGISTER)).status.phase == "Failed"


def test_what_was_accepted_is_not_judged_again() -> None:
    decision = conclude(ftj(running(), data=prepared(dedupe={"near": {}})))
    assert said(decision, ConditionType.FAILED) is None


RESERVED: dict[str, tuple[Json, list[str]]] = {
    "of the trainer": (
        {
            "containers": [
                {"name": "trainer", "env": [{"name": "WORLD_SIZE", "value": "1"}, {"name": "MINE"}]}
            ]
        },
        ["spec.podTemplate sets WORLD_SIZE, which the operator sets: remove it"],
    ),
    "of a sidecar": ({"containers": [{"name": "side", "env": [{"name": "WORLD_SIZE", "value": "1"}]}]}, []),
    "nonsense": ({"containers": ["trainer", {"name": "trainer", "env": ["WORLD_SIZE"]}]}, []),
}


@pytest.mark.parametrize(("pod", "expected"), RESERVED.values(), ids=RESERVED)
def test_reserved_variables_in_a_pod_template(pod: Json, expected: list[str]) -> None:
    assert [*mistakes(spec(podTemplate={"spec": pod}), Settings())] == expected
