"""Which checkpoints a job starts from, and what it waits for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import CheckpointStatus, ResumedFrom
from finetune_operator.defaults import Defaults
from finetune_operator.finetunejob.model import FineTuneJob, ResumedJob
from finetune_operator.finetunejob.resolve import resolve
from fixtures.operator_in_memory.decisions import (
    ADMITTED,
    CORRECTED,
    FAILED,
    SPLITS,
    SUCCEEDED,
    applied,
    conclude,
    condition,
    ftj,
    observed,
    said,
    spec,
    status,
)

Json = dict[str, Any]
CHECKPOINTS: Json = {"uri": "s3://bucket/checkpoints"}
FOLDER = "s3://bucket/checkpoints/team-first-11111111"
RESOLVED = ResumedFrom(uri=FOLDER, job="first")
SUSPENDED = condition(ConditionType.SUSPENDED, "True", ConditionReason.SUSPENDED)
SAVED: Json = {"attempt": 1, "checkpoint": CheckpointStatus(step=40, uri=f"{FOLDER}/step-00000040")}


def job(resumed: ResumedFrom | None = None, reference: Json | None = None, **parts: Any) -> FineTuneJob:
    """The job that carries on the job first."""
    place = reference or {"type": "Job", "name": "first"}
    return ftj(
        status(ADMITTED, resumed_from=resumed),
        **{"checkpoint": {**CHECKPOINTS, "resumeFrom": place}, **parts},
    )


def first(*conditions: Any, fields: Json | None = None, **parts: Any) -> FineTuneJob:
    """The job first, with checkpoints."""
    body = {"checkpoint": CHECKPOINTS, **parts}
    job_spec = resolve(spec(**body), namespace="team", name="first", earlier=None, defaults=Defaults())
    return dataclasses.replace(
        ftj(status(*conditions, **(SAVED if fields is None else fields))),
        name="first", uid="11111111-2222", spec=job_spec,
    )  # fmt: skip


STILL_RUNS = (
    ConditionReason.WAITING_FOR_JOB,
    "FineTuneJob first still runs: this job starts from its newest checkpoint when it has finished or is suspended",
)
NONE_YET = (
    ConditionReason.WAITING_FOR_CHECKPOINT,
    "FineTuneJob first has no checkpoint yet: this job starts when it has one",
)

# What is known of the other job, and why this one waits; None where it starts.
SEEN: dict[str, tuple[ResumedJob, tuple[str, str] | None]] = {
    "it does not exist": (
        ResumedJob(),
        (
            ConditionReason.WAITING_FOR_JOB,
            "FineTuneJob first of checkpoint.resumeFrom does not exist: this job starts when it exists and has a checkpoint",
        ),
    ),
    "another version's spec": (
        ResumedJob(dataclasses.replace(first(), spec=None, invalid="spec.model.base: Field required")),
        (
            ConditionReason.WAITING_FOR_JOB,
            "this version of the operator cannot read the spec of FineTuneJob first (spec.model.base: Field required)",
        ),
    ),
    "it runs": (ResumedJob(first()), STILL_RUNS),
    "it succeeded": (ResumedJob(first(SUCCEEDED)), None),
    "it failed": (ResumedJob(first(FAILED)), None),
    "it failed, and its pods still stop": (ResumedJob(first(FAILED), pods=2), STILL_RUNS),
    "it is suspended": (ResumedJob(first(SUSPENDED)), None),
    "it is suspended, and its pods still stop": (ResumedJob(first(SUSPENDED), pods=1), STILL_RUNS),
    "it was suspended before its first checkpoint": (ResumedJob(first(SUSPENDED, fields={"attempt": 1})), NONE_YET),
    "it failed before it trained": (
        ResumedJob(first(FAILED, fields={})),
        (
            ConditionReason.INVALID_SPEC,
            "FineTuneJob first ended before it trained, so it has no checkpoint: remove checkpoint.resumeFrom",
        ),
    ),
    # Without MLflow nobody may have told of the last checkpoint: the pods look.
    "it failed and told of none": (ResumedJob(first(FAILED, fields={"attempt": 1})), None),
    "it keeps none": (
        ResumedJob(first(SUCCEEDED, checkpoint=None)),
        (
            ConditionReason.INVALID_SPEC,
            "FineTuneJob first does not set spec.checkpoint and has no checkpoints: remove checkpoint.resumeFrom from this job",
        ),
    ),
    "a script of its own": (
        ResumedJob(first(SUCCEEDED, trainer={"command": ["torchrun", "train.py"]})),
        (
            ConditionReason.INVALID_SPEC,
            "FineTuneJob first runs a custom command, and the built-in loop cannot read its checkpoints: "
            "remove checkpoint.resumeFrom",
        ),
    ),
    "another run": (
        ResumedJob(first(training={"seed": 7}, distributed={"nodes": 1, "processesPerNode": 2})),
        (
            ConditionReason.INVALID_SPEC,
            "this job cannot continue FineTuneJob first, whose settings differ (training.seed 7 -> 42; sequences per "
            "step 8 -> 16 (training.perDeviceBatchSize x gradientAccumulation x ranks; for 4 ranks, set perDeviceBatchSize "
            "to 2 and gradientAccumulation to 1)): create the job with the same settings, or without checkpoint.resumeFrom",
        ),
    ),
    "more steps, on other ranks": (
        ResumedJob(
            first(SUCCEEDED, training={"maxSteps": 5, "gradientAccumulation": 4}, distributed={"nodes": 1})
        ),
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("resumed", "waits"), SEEN.values(), ids=SEEN)
def test_what_is_known_of_the_other_job(resumed: ResumedJob, waits: tuple[str, str] | None) -> None:
    decision = conclude(job(), observed(resumed=resumed))
    reported = said(decision, ConditionType.CHECKPOINT_FOUND)
    if waits is None:
        message = (
            f"the job starts from the newest complete checkpoint that FineTuneJob first wrote to {FOLDER}"
        )
        assert reported == ("True", ConditionReason.CHECKPOINT_FOUND, message)
        assert decision.status.resumed_from == RESOLVED
        assert decision.status.phase == "Starting"
        return
    assert reported == ("False", *waits)
    assert (applied(decision), decision.status.start_time, decision.status.resumed_from) == ([], None, None)
    if waits[0] == ConditionReason.INVALID_SPEC:
        ended = (waits[0], waits[1] + CORRECTED)
        assert said(decision, ConditionType.READY) == ("False", *ended)
        assert said(decision, ConditionType.STALLED) == ("True", *ended)
        assert said(decision, ConditionType.FINISHED) == ("True", *ended)
        return
    assert said(decision, ConditionType.READY) == ("False", *waits)
    assert said(decision, ConditionType.RECONCILING) == ("True", *waits)
    assert decision.status.phase == "Pending"
    assert decision.requeue_seconds is not None
    assert decision.requeue_seconds <= 15


def test_what_was_found_once_stays() -> None:
    decision = conclude(job(RESOLVED), observed(resumed=ResumedJob()))
    assert decision.status.resumed_from == RESOLVED
    assert applied(decision) == [
        "Service/tune",
        "ConfigMap/tune-train",
        "NetworkPolicy/tune",
        "Job/tune-train-1",
    ]


# A URI, and what the job starts from.
URIS = {
    "a folder": (
        f"{FOLDER}/",
        f"the newest complete checkpoint in the folder that checkpoint.resumeFrom names: {FOLDER}/",
    ),
    "a checkpoint": (
        f"{FOLDER}/step-00000040",
        f"the checkpoint that checkpoint.resumeFrom names: {FOLDER}/step-00000040",
    ),
}


@pytest.mark.parametrize(("uri", "start"), URIS.values(), ids=URIS)
def test_a_uri_waits_for_nothing(uri: str, start: str) -> None:
    decision = conclude(job(reference={"type": "Uri", "uri": uri}))
    assert decision.status.resumed_from == ResumedFrom(uri=uri)
    assert said(decision, ConditionType.CHECKPOINT_FOUND) == (
        "True",
        ConditionReason.CHECKPOINT_FOUND,
        f"the job starts from {start}",
    )


def test_the_pods_get_what_was_found() -> None:
    decision = conclude(job(RESOLVED, data=SPLITS))
    (config,) = (body for body in decision.apply if body["kind"] == "ConfigMap")
    recipe = yaml.safe_load(config["data"]["recipe.yaml"])
    assert recipe["checkpoint"]["resumeFrom"] == {"type": "Uri", "uri": FOLDER}
    assert (
        "resumeFrom"
        not in yaml.safe_load(
            next(
                b
                for b in conclude(ftj(status(ADMITTED), checkpoint=CHECKPOINTS)).apply
                if b["kind"] == "ConfigMap"
            )["data"]["recipe.yaml"]
        )["checkpoint"]
    )


def test_a_suspended_job_waits_for_nobody() -> None:
    suspended = job(suspend=True)
    assert conclude(suspended).status.phase == "Suspended"


def test_a_job_that_is_resumed_waits_for_the_other() -> None:
    paused = conclude(job(suspend=True)).status
    body: Json = {"checkpoint": {**CHECKPOINTS, "resumeFrom": {"type": "Job", "name": "first"}}}
    decision = conclude(ftj(paused, **body), observed(resumed=ResumedJob(first())))
    assert (decision.status.phase, decision.status.suspend_time) == ("Pending", None)
    assert said(decision, ConditionType.READY) == ("False", *STILL_RUNS)
