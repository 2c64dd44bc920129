"""Which version an alias means for a job, and what the job waits for until it is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import FineTuneJobStatus, Pinned
from finetune_operator.errors import Problem
from finetune_operator.finetunejob.decision import Decision
from finetune_operator.finetunejob.model import AliasVersion, FineTuneJob, Mlflow
from finetune_operator.finetunejob.resolve import pinned
from fixtures.operator_in_memory.decisions import (
    ACCEPTED,
    ADMITTED,
    NO_MLFLOW,
    PREPARED,
    SETTINGS,
    applied,
    conclude,
    ftj,
    observed,
    said,
    status,
    tracked,
)

Json = dict[str, Any]
BASE: Json = {"base": "models:/support@champion"}
TEACHER: Json = {"type": "Distillation", "distillation": {"teacher": "models:/ml.prod.large@champion"}}
NO_ALIAS = "the registered model support has no alias champion: this job starts when a version has this alias"
AWAY = Problem(ConditionReason.MLFLOW_UNREACHABLE, "MLflow server http://mlflow:5000 cannot be reached")


def job(job_status: FineTuneJobStatus | None = None, **parts: Any) -> FineTuneJob:
    """A job whose base is an alias, as it is read."""
    finetunejob = ftj(job_status or status(ACCEPTED, ADMITTED), **{"model": BASE, **parts})
    assert finetunejob.spec
    return FineTuneJob(**{**vars(finetunejob), "spec": pinned(finetunejob.spec, finetunejob.status.pinned)})


def decided(of: FineTuneJob, **alias_versions: AliasVersion) -> Decision:
    return conclude(of, observed(mlflow=tracked(), alias_versions=alias_versions), settings=SETTINGS)


WAITS: dict[str, tuple[Mapping[str, AliasVersion], tuple[str, str]]] = {
    "nobody has looked": (
        {},
        (ConditionReason.WAITING_FOR_MODEL, "the version of models:/support@champion is not known yet"),
    ),
    "no such model": (
        {"base": AliasVersion()},
        (
            ConditionReason.WAITING_FOR_MODEL,
            "the registered model support of models:/support@champion does not exist: this job starts when it has the alias "
            "champion",
        ),
    ),
    "no such alias": (
        {"base": AliasVersion(exists=True)},
        (
            ConditionReason.WAITING_FOR_ALIAS,
            NO_ALIAS,
        ),
    ),
    "the registry is away": (
        {"base": AliasVersion(problem=AWAY)},
        (AWAY.reason, f"the version of models:/support@champion is not known: {AWAY.message}"),
    ),
}


@pytest.mark.parametrize(("alias_versions", "waits"), WAITS.values(), ids=WAITS)
def test_a_job_waits_for_its_model(
    alias_versions: Mapping[str, AliasVersion], waits: tuple[str, str]
) -> None:
    decision = decided(job(), **alias_versions)
    assert said(decision, ConditionType.MODELS_FOUND) == ("False", *waits)
    assert said(decision, ConditionType.READY) == ("False", *waits)
    assert said(decision, ConditionType.RECONCILING) == ("True", *waits)
    assert (applied(decision), decision.actions, decision.status.start_time) == ([], (), None)
    assert (decision.status.phase, decision.status.pinned) == ("Pending", None)
    assert decision.requeue_seconds is not None
    assert decision.requeue_seconds <= 15


def test_versions_are_pinned_before_anything_starts() -> None:
    decision = decided(job(objective=TEACHER), base=AliasVersion(True, "3"), teacher=AliasVersion(True, "7"))
    assert decision.status.pinned == Pinned(base="models:/support/3", teacher="models:/ml.prod.large/7")
    assert said(decision, ConditionType.MODELS_FOUND) == (
        "True",
        ConditionReason.MODELS_FOUND,
        "models:/support@champion is models:/support/3 for all pods of this job; models:/ml.prod.large@champion is "
        "models:/ml.prod.large/7 for all pods of this job",
    )
    assert (applied(decision), decision.actions, decision.requeue_seconds) == ([], (), 0)


def test_one_that_is_missing_keeps_both_waiting() -> None:
    decision = decided(job(objective=TEACHER), base=AliasVersion(True, "3"), teacher=AliasVersion(True))
    assert decision.status.pinned is None
    assert said(decision, ConditionType.READY) == (
        "False",
        ConditionReason.WAITING_FOR_ALIAS,
        "the registered model ml.prod.large has no alias champion: this job starts when a version has this alias",
    )


def test_the_pods_get_what_was_pinned_wherever_the_alias_points_now() -> None:
    job_status = status(
        ADMITTED, PREPARED, pinned=Pinned(base="models:/support/3", teacher="models:/large/7")
    )
    decision = conclude(
        job(job_status, objective=TEACHER), observed(alias_versions={"base": AliasVersion(True, "4")})
    )
    (config,) = (body for body in decision.apply if body["kind"] == "ConfigMap")
    recipe = yaml.safe_load(config["data"]["recipe.yaml"])
    assert (recipe["model"]["base"], recipe["objective"]["distillation"]["teacher"]) == (
        "models:/support/3",
        "models:/large/7",
    )


def test_without_a_server_nothing_is_waited_for() -> None:
    decision = conclude(job(), settings=NO_MLFLOW)
    assert applied(decision) == [
        "Service/tune",
        "ConfigMap/tune-train",
        "NetworkPolicy/tune",
        "Job/tune-train-1",
    ]


def test_a_job_that_is_resumed_waits_for_its_model() -> None:
    paused = decided(job(suspend=True))
    assert paused.status.phase == "Suspended"
    waits = (ConditionReason.WAITING_FOR_ALIAS, NO_ALIAS)
    decision = decided(job(paused.status), base=AliasVersion(exists=True))
    assert (decision.status.phase, decision.status.suspend_time) == ("Pending", None)
    assert said(decision, ConditionType.SUSPENDED) == ("False", ConditionReason.RESUMED, "the job goes on")
    assert said(decision, ConditionType.READY) == ("False", *waits)


def test_a_suspended_job_has_no_run_before_its_model_is_known() -> None:
    no_run = observed(mlflow=Mlflow())
    decision = conclude(job(suspend=True), no_run, settings=SETTINGS)
    assert (decision.status.phase, decision.actions) == ("Suspended", ())
    job_status = status(ACCEPTED, ADMITTED, pinned=Pinned(base="models:/support/3"))
    assert len(conclude(job(job_status, suspend=True), no_run, settings=SETTINGS).actions) == 1


def test_a_job_that_was_just_accepted_waits_for_the_next_pass() -> None:
    decision = decided(job(status(ADMITTED)))
    assert (applied(decision), decision.actions, decision.status.start_time) == ([], (), None)
    assert (said(decision, ConditionType.MODELS_FOUND), decision.requeue_seconds) == (None, 0.1)


def test_what_was_known_stays_until_the_registry_was_read_again() -> None:
    known = decided(job(), base=AliasVersion(exists=True))
    unread = decided(job(known.status))
    assert said(unread, ConditionType.MODELS_FOUND) == ("False", ConditionReason.WAITING_FOR_ALIAS, NO_ALIAS)
