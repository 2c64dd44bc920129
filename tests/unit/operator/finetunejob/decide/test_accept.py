"""What this version can run, and what it refuses by name."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from typing import Any

import pytest

from finetune_crds.conditions import SUMMARY, ConditionReason, ConditionType
from finetune_crds.status import FineTuneJobStatus
from finetune_operator.defaults import Defaults
from finetune_operator.finetunejob.decide.accept import unsupported_fields
from finetune_operator.finetunejob.decision import Decision
from finetune_operator.settings import Settings
from fixtures.operator_in_memory.decisions import (
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
    tracked,
)

Json = dict[str, Any]
ACCEPTED = ("True", ConditionReason.ACCEPTED, "the spec can be run")


def prepared(**prepare: Any) -> Json:
    return {**SOURCE, "prepare": {**SOURCE["prepare"], **prepare}}


REFUSED: dict[str, tuple[Json, list[str]]] = {
    "nothing": ({}, []),
    "Spark on Kubernetes": ({"data": prepared(spark={"mode": "Kubernetes"})}, []),
    "Spark on Databricks": (
        {"data": prepared(spark={"mode": "Databricks", "databricks": {"volume": "/Volumes/a/b/c"}})},
        [],
    ),
    "near duplicates": ({"data": prepared(dedupe={"near": {}})}, []),
    "a data set of the Hub": (
        {"data": {**SOURCE, "source": {"type": "Hub", "dataset": "a/b"}}},
        [],
    ),
    "an MLflow of another kind": (
        {"tracking": {"uri": "databricks://me", "registryUri": "uc:http://x"}},
        [
            "tracking.uri databricks://me (use the http or https address of an MLflow server, or databricks)",
            "tracking.registryUri uc:http://x (use the http or https address of an MLflow server, or databricks-uc)",
        ],
    ),
    "a Databricks workspace": ({"tracking": {"uri": "databricks", "registryUri": "databricks-uc"}}, []),
    "several at once": (
        {"tracking": {"uri": "dbfs:/runs", "registryUri": "file:/models"}},
        [
            "tracking.uri dbfs:/runs (use the http or https address of an MLflow server, or databricks)",
            "tracking.registryUri file:/models (use the http or https address of an MLflow server, or databricks-uc)",
        ],
    ),
    **{
        f"method {method}": ({"method": {"type": method}}, [])
        for method in ("Full", "LoRA", "QLoRA", "DoRA", "PrefixTuning", "PromptTuning")
    },
    "DPO": ({"objective": {"type": "DPO"}}, []),
    "KTO": ({"objective": {"type": "KTO"}}, []),
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
            "pods": {"train": {"template": {"spec": {"nodeSelector": {"a": "b"}}}}},
        },
        [],
    ),
}


@pytest.mark.parametrize(("parts", "expected"), REFUSED.values(), ids=REFUSED)
def test_not_implemented(parts: Json, expected: list[str]) -> None:
    assert [*unsupported_fields(spec(**parts))] == expected


REGISTER: Json = {"register": {"model": "m"}}
NEEDS_MLFLOW = (
    "spec.register requires an MLflow server: install the chart with tracking.uri, or create a FineTuneJob with "
    "another name and spec.tracking.uri"
)
PASSWORD = (
    "spec.tracking.uri contains a password: move it to a Secret with MLFLOW_TRACKING_USERNAME and "
    "MLFLOW_TRACKING_PASSWORD, and set spec.tracking.secretRef"
)
CANNOT = (
    "this version of the operator does not support tracking.uri file:/runs (use the http or https address of an MLflow server, "
    "or databricks); the job waits for a version that does"
)
NO_STORAGE = (
    "{} is missing: install the chart with defaults.storage, in which each job gets a folder, or create a "
    "FineTuneJob with another name and this field"
)
SETS_RANK = "spec.pods.all.template sets NODE_RANK, which the operator sets: remove the variable"
OWN_RANK: Json = {
    "pods": {
        "all": {
            "template": {
                "spec": {"containers": [{"name": "main", "env": [{"name": "NODE_RANK", "value": "1"}]}]}
            }
        }
    }
}
TOO_HIGH = (
    "spec.training.minLearningRate 2e-05 must be below the learning rate, which defaults to 2e-05 for method Full: "
    "lower spec.training.minLearningRate, or set spec.training.learningRate"
)
TOO_LONG = (
    "spec.training.decaySteps 98 and a warm-up of 3 steps are longer than maxSteps 100: reduce one of them"
)
NO_SCHEME: Json = {"tracking": {"uri": "file:/runs"}}

# The parts, the installation, the reason and the message of Accepted, and what the job does then.
VERDICTS: dict[str, tuple[Json, Settings, tuple[str, str, str], str]] = {
    "registering nowhere": (
        REGISTER,
        NO_MLFLOW,
        ("False", ConditionReason.MLFLOW_NOT_CONFIGURED, NEEDS_MLFLOW),
        "waits",
    ),
    "registering at the default server": (REGISTER, Settings(tracking_uri="http://m"), ACCEPTED, "runs"),
    "registering at one's own server": (
        REGISTER | {"tracking": {"uri": "http://m"}},
        NO_MLFLOW,
        ACCEPTED,
        "runs",
    ),
    "no MLflow at all": ({}, NO_MLFLOW, ACCEPTED, "runs"),
    "a feature that is not there": (
        NO_SCHEME,
        NO_MLFLOW,
        ("False", ConditionReason.NOT_IMPLEMENTED, CANNOT),
        "waits",
    ),
    "a reserved variable": (
        OWN_RANK,
        NO_MLFLOW,
        ("False", ConditionReason.POD_TEMPLATE_INVALID, SETS_RANK),
        "is stalled",
    ),
    "a container of preparation under another name": (
        {
            "data": prepared(),
            "pods": {"prepare": {"template": {"spec": {"containers": [{"name": "spark"}]}}}},
        },
        NO_MLFLOW,
        (
            "False",
            ConditionReason.POD_TEMPLATE_INVALID,
            "spec.pods.prepare.template has the container 'spark': name it 'main', which stands for the pod's own container",
        ),
        "is stalled",
    ),
    "a password in plain sight": (
        {"tracking": {"uri": "http://me:pass@m:5000"}},
        NO_MLFLOW,
        ("False", ConditionReason.INVALID_SPEC, PASSWORD),
        "fails",
    ),
    "a password in a page's address": (
        {"tracking": {"uri": "http://m", "publicUrl": "https://me:pass@m.example.com"}},
        NO_MLFLOW,
        ("False", ConditionReason.INVALID_SPEC, PASSWORD.replace("tracking.uri", "tracking.publicUrl")),
        "fails",
    ),
    "eight processes on four GPUs of the template": (
        {
            "distributed": {"gpusPerNode": 8},
            "pods": {
                "train": {
                    "template": {
                        "spec": {
                            "containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "4"}}}]
                        }
                    }
                }
            },
        },
        NO_MLFLOW,
        (
            "False",
            ConditionReason.POD_TEMPLATE_INVALID,
            "each pod has 8 processes, and spec.pods.train.template limits it to 4 nvidia.com/gpu: remove the limit from the template",
        ),
        "is stalled",
    ),
    "a floor above the default of the method": (
        {"training": {"minLearningRate": 2e-5}},
        NO_MLFLOW,
        ("False", ConditionReason.INVALID_SPEC, TOO_HIGH),
        "fails",
    ),
    "a floor below the default of another method": (
        {"training": {"minLearningRate": 2e-5}, "method": {"type": "LoRA"}},
        NO_MLFLOW,
        ACCEPTED,
        "runs",
    ),
    "a decay that the warm-up leaves no room for": (
        {"training": {"scheduler": "WSD", "maxSteps": 100, "decaySteps": 98}},
        NO_MLFLOW,
        ("False", ConditionReason.INVALID_SPEC, TOO_LONG),
        "fails",
    ),
    "a decay of all that the warm-up leaves": (
        {"training": {"scheduler": "WSD", "maxSteps": 100, "decaySteps": 97}},
        NO_MLFLOW,
        ACCEPTED,
        "runs",
    ),
    "the best of checkpoints that nobody keeps": (
        {"training": {"select": "Best", "evalEverySteps": 5}, "checkpoint": None},
        NO_MLFLOW,
        ("False", ConditionReason.STORAGE_NOT_CONFIGURED, NO_STORAGE.format("spec.checkpoint")),
        "waits",
    ),
    "no place for the splits": (
        {"data": {"source": SOURCE["source"]}},
        NO_MLFLOW,
        ("False", ConditionReason.STORAGE_NOT_CONFIGURED, NO_STORAGE.format("spec.data.prepare.output")),
        "waits",
    ),
    "no place for checkpoints": (
        {"checkpoint": {}},
        NO_MLFLOW,
        ("False", ConditionReason.STORAGE_NOT_CONFIGURED, NO_STORAGE.format("spec.checkpoint.uri")),
        "waits",
    ),
    "a password for the registry": (
        {"tracking": {"uri": "http://m", "registryUri": "https://me:pass@m"}},
        NO_MLFLOW,
        ("False", ConditionReason.INVALID_SPEC, PASSWORD.replace("tracking.uri", "tracking.registryUri")),
        "fails",
    ),
}
SUMMARIES: dict[str, tuple[str, set[str]]] = {
    "runs": ("Starting", {"Reconciling"}),
    "waits": ("Pending", {"Reconciling"}),
    "is stalled": ("Pending", {"Stalled"}),
    "fails": ("Failed", {"Stalled", "Finished", "Failed"}),
}


@pytest.mark.parametrize(("parts", "settings", "expected", "then"), VERDICTS.values(), ids=VERDICTS)
def test_a_new_job(parts: Json, settings: Settings, expected: tuple[str, str, str], then: str) -> None:
    decision = conclude(ftj(**parts), settings=dataclasses.replace(settings, tracking_uri=""))
    if settings.tracking_uri or parts.get("tracking", {}).get("uri") == "http://m":
        decision = conclude(ftj(**parts), observed(mlflow=tracked()), settings=settings)
    assert said(decision, ConditionType.ACCEPTED) == expected
    true = {item.type for item in decision.status.conditions if item.status == "True"}
    summary = (decision.status.phase, true & {"Ready", "Reconciling", "Stalled", "Finished", "Failed"})
    assert summary == SUMMARIES[then]
    assert (applied(decision) != []) == (then == "runs")


def test_what_kept_a_job_waiting_comes() -> None:
    """A server is set, a version of the operator comes that can, and spec.pods is corrected."""
    server = Settings(tracking_uri="http://m")
    for before, after, settings in (
        (REGISTER, REGISTER, server),
        (NO_SCHEME, {}, NO_MLFLOW),
        (OWN_RANK, {}, NO_MLFLOW),
    ):
        job_status = conclude(ftj(**before)).status
        again = conclude(ftj(job_status, **after), observed(mlflow=tracked()), settings=settings)
        assert said(again, ConditionType.ACCEPTED) == ACCEPTED
        assert applied(again)[-1] == "Job/tune-train-1"


UNREADABLE = (
    "this version of the operator cannot read the spec (spec.method.type: Input should be 'Full' or 'LoRA') and "
    "does not change the job and its children: install a version that can read the spec"
)


@pytest.mark.parametrize("before", [status(), running()], ids=["a new job", "a running job"])
def test_a_job_whose_spec_cannot_be_read_is_left_alone(before: FineTuneJobStatus) -> None:
    invalid = "spec.method.type: Input should be 'Full' or 'LoRA'"
    unreadable = dataclasses.replace(ftj(before), spec=None, invalid=invalid)
    decision = conclude(unreadable, observed(child("tune-train-1"), pods=[pod("tune-train-1")]))
    assert said(decision, ConditionType.ACCEPTED) == ("Unknown", ConditionReason.SPEC_UNREADABLE, UNREADABLE)
    said_anew = {ConditionType.ACCEPTED, *SUMMARY}
    untouched = [item for item in decision.status.conditions if item.type not in said_anew]
    assert untouched == [item for item in before.conditions if item.type not in said_anew]
    assert decision == Decision(status=decision.status)


def test_a_job_at_work_goes_on_when_its_spec_can_be_read_again() -> None:
    """It was accepted before, so it is not judged again."""
    unreadable = condition(ConditionType.ACCEPTED, "Unknown", ConditionReason.SPEC_UNREADABLE)
    before = status(unreadable, PREPARED, TRAINING, attempt=1, restarts=0, start_time=NOW)
    refused_now = ftj(before, **REGISTER)
    observation = observed(child("tune-train-1"), pods=[pod("tune-train-1", index) for index in (0, 1)])
    decision = conclude(refused_now, observation)
    assert said(decision, ConditionType.ACCEPTED) == ("True", ConditionReason.ACCEPTED, "the spec can be run")
    assert (decision.status.phase, decision.apply, decision.delete) == ("Training", (), ())


def accept_in(queue: str, before: FineTuneJobStatus | None = None) -> FineTuneJobStatus:
    """The status after a pass in an installation with this default queue."""
    defaults = Defaults(queue_name=queue)
    job = ftj(before, defaults=defaults)
    return conclude(job, settings=dataclasses.replace(NO_MLFLOW, defaults=defaults)).status


@pytest.mark.parametrize("start_time", [NOW, None], ids=["at work", "not started"])
def test_a_job_whose_spec_can_be_read_again_stays_in_the_queue_that_it_began_with(
    start_time: datetime | None,
) -> None:
    accepted = accept_in("gpus")
    unreadable = condition(ConditionType.ACCEPTED, "Unknown", ConditionReason.SPEC_UNREADABLE)
    others = [item for item in accepted.conditions if item.type != ConditionType.ACCEPTED]
    before = accepted.model_copy(update={"conditions": [unreadable, *others], "start_time": start_time})
    after = accept_in("research", before)
    assert after.resolved is not None
    assert (after.resolved, after.resolved.queue_name) == (accepted.resolved, "gpus")


def test_an_accepted_job_without_a_start_is_not_judged_again_when_its_spec_can_be_read() -> None:
    unreadable = condition(ConditionType.ACCEPTED, "Unknown", ConditionReason.SPEC_UNREADABLE)
    before = status(unreadable, resolved=accept_in("gpus").resolved)
    decision = conclude(ftj(before, **REGISTER), settings=NO_MLFLOW)
    accepted = said(decision, ConditionType.ACCEPTED)
    assert accepted is not None
    assert accepted[0] == "True"


def test_a_new_job_is_judged_when_its_spec_can_be_read() -> None:
    unreadable = condition(ConditionType.ACCEPTED, "Unknown", ConditionReason.SPEC_UNREADABLE)
    assert conclude(ftj(status(unreadable))).status.phase == "Starting"
    decision = conclude(ftj(status(unreadable), **REGISTER))
    assert said(decision, ConditionType.ACCEPTED) == (
        "False",
        ConditionReason.MLFLOW_NOT_CONFIGURED,
        NEEDS_MLFLOW,
    )


def test_what_was_accepted_is_not_judged_again() -> None:
    decision = conclude(ftj(running(), data=prepared(spark={"mode": "Databricks"})))
    assert said(decision, ConditionType.FAILED) is None
