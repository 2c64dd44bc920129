"""The MLflow run: which one a job logs to."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from finetune_crds.base import Json
from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_crds.status import MlflowStatus, Progress
from finetune_operator.finetunejob.decide.created_run import record_run
from finetune_operator.finetunejob.decision import EnsureRun
from finetune_operator.finetunejob.model import Mlflow
from finetune_operator.mlflow.model import Run
from fixtures.operator_in_memory.decisions import (
    ADMITTED,
    NOW,
    SETTINGS,
    SOURCE,
    UID,
    applied,
    child,
    conclude,
    condition,
    ftj,
    later,
    observed,
    running,
    said,
    status,
    tracked,
)
from unit.operator.finetunejob.decide.mlflow_runs import AWAY, KNOWN, follow


def test_without_an_mlflow_server_training_goes_on_and_says_so() -> None:
    decision = conclude(ftj())
    assert said(decision, ConditionType.TRACKED) == (
        "False",
        ConditionReason.MLFLOW_NOT_CONFIGURED,
        "no MLflow server is configured: progress and the model appear only in the pods' logs",
    )
    assert "Job/tune-train-1" in applied(decision)


RUNS: dict[str, tuple[dict[str, Any], EnsureRun]] = {
    "named for the job": (
        {},
        EnsureRun("team", "tune", {"finetune.dev/uid": UID, "finetune.dev/job": "team/tune"}),
    ),
    "named by people, who cannot take the operator's tags": (
        {"experiment": "e", "runName": "r", "tags": {"team": "a", "finetune.dev/uid": "mine"}},
        EnsureRun("e", "r", {"team": "a", "finetune.dev/uid": UID, "finetune.dev/job": "team/tune"}),
    ),
}


@pytest.mark.parametrize(("tracking", "expected"), RUNS.values(), ids=RUNS)
def test_a_run_is_made_when_there_is_none(tracking: dict[str, Any], expected: EnsureRun) -> None:
    of = ftj(status(ADMITTED), tracking=tracking, data=SOURCE)
    decision = conclude(of, observed(mlflow=Mlflow()), settings=SETTINGS)
    assert decision.actions == (expected,)
    assert applied(decision) == []
    assert said(decision, ConditionType.PREPARED) == (
        "False",
        ConditionReason.PREPARING,
        "preparation starts when the MLflow run exists",
    )


REFUSED = condition(ConditionType.TRACKED, "False", ConditionReason.MLFLOW_ERROR)
WITH_RUN: dict[str, tuple[Mlflow, tuple[Condition, ...], str | None]] = {
    "the run exists": (tracked(), (), "r1"),
    "MLflow is away": (AWAY, (), None),
    "the run could not be created": (Mlflow(), (REFUSED,), None),
}


@pytest.mark.parametrize(("mlflow", "before", "run_id"), WITH_RUN.values(), ids=WITH_RUN)
def test_a_preparation_knows_the_run_and_does_not_depend_on_it(
    mlflow: Mlflow, before: tuple[Condition, ...], run_id: str | None
) -> None:
    of = ftj(status(ADMITTED, *before), data=SOURCE)
    decision = conclude(of, observed(mlflow=mlflow), settings=SETTINGS)
    assert applied(decision) == ["ConfigMap/tune-prep", "Job/tune-prep"]
    container = decision.apply[1]["spec"]["template"]["spec"]["containers"][0]
    assert {item["name"]: item.get("value") for item in container["env"]}.get("MLFLOW_RUN_ID") == run_id


@pytest.mark.parametrize("mlflow", [None, Mlflow(), AWAY], ids=["not asked", "no run", "away"])
def test_training_waits_for_the_run_that_its_pods_log_to(mlflow: Mlflow | None) -> None:
    decision = conclude(ftj(), observed(mlflow=mlflow), settings=SETTINGS)
    assert applied(decision) == []
    reason, why = ConditionReason.STARTING, "the MLflow run is being created"
    if mlflow == AWAY and AWAY.problem:
        reason, why = AWAY.problem.reason, AWAY.problem.message
    assert said(decision, ConditionType.TRAINED) == (
        "False",
        reason,
        f"training waits for MLflow: {why}",
    )
    assert decision.requeue_seconds == SETTINGS.poll_seconds


def test_the_first_run_is_requested_without_reading_mlflow_and_once() -> None:
    """Its creation finds a run that exists. After a failed creation, MLflow is read before the next one."""
    jobs = {
        "new": ftj(),
        "the creation failed": ftj(status(REFUSED)),
        "has a run": ftj(running(mlflow=KNOWN)),
    }
    decisions = {name: conclude(job, observed(mlflow=None), settings=SETTINGS) for name, job in jobs.items()}
    assert {
        name: ([type(item).__name__ for item in decision.actions], decision.status.run_id)
        for name, decision in decisions.items()
    } == {
        "new": (["EnsureRun"], None),
        "the creation failed": ([], None),
        "has a run": ([], "r1"),
    }


def test_a_run_that_exists_is_taken_and_none_is_made() -> None:
    decision = conclude(ftj(), observed(mlflow=tracked()), settings=SETTINGS)
    assert decision.actions == ()
    assert decision.status.mlflow == KNOWN
    assert said(decision, ConditionType.TRACKED) == ("True", ConditionReason.RUN_READY, "MLflow run r1")


DELETED = Mlflow(run=Run("r1", "e1", "RUNNING", is_deleted=True))
ANOTHER = Mlflow(run=Run("r2", "e1", "RUNNING"))
NOT_FOUND = condition(
    ConditionType.TRACKED,
    "False",
    ConditionReason.RUN_NOT_FOUND,
    "MLflow run r1 cannot be found: the operator checks again before it creates another run",
)
TRAINS = {"tune-train-1": child("tune-train-1")}
RESTORE = "restore the run, since the metrics and the model of this attempt belong to it"
# What MLflow has, the condition before, the Jobs, and the seconds since: the actions, the run in the status, and the condition.
LOST: dict[str, tuple[Mlflow, Condition | None, Json, float, Json]] = {
    "deleted before the attempt": (DELETED, None, {}, 0, {"actions": ["EnsureRun"], "run": None}),
    "deleted, and the tag names another": (
        ANOTHER,
        None,
        {},
        0,
        {"run": "r2", "said": ("True", ConditionReason.RUN_REPLACED, "MLflow run r2 replaces run r1")},
    ),
    "not found at first": (
        Mlflow(),
        None,
        {},
        0,
        {"said": ("False", ConditionReason.RUN_NOT_FOUND, NOT_FOUND.message)},
    ),
    "not found for some time": (
        Mlflow(),
        NOT_FOUND,
        {},
        59,
        {"said": ("False", ConditionReason.RUN_NOT_FOUND, NOT_FOUND.message)},
    ),
    "not found for too long": (Mlflow(), NOT_FOUND, {}, 60, {"actions": ["EnsureRun"], "run": None}),
    "deleted while it is logged to": (
        DELETED,
        None,
        TRAINS,
        0,
        {"said": ("False", ConditionReason.RUN_NOT_FOUND, f"MLflow run r1 was deleted: {RESTORE}")},
    ),
    "not found while it is logged to": (
        Mlflow(),
        NOT_FOUND,
        TRAINS,
        600,
        {"said": ("False", ConditionReason.RUN_NOT_FOUND, f"MLflow run r1 cannot be found: {RESTORE}")},
    ),
    "another one while it is logged to": (
        ANOTHER,
        None,
        TRAINS,
        0,
        {"said": ("False", ConditionReason.RUN_NOT_FOUND, f"MLflow run r1 cannot be found: {RESTORE}")},
    ),
}


@pytest.mark.parametrize(("mlflow", "before", "jobs", "seconds", "expected"), LOST.values(), ids=LOST)
def test_a_run_that_is_gone_is_replaced_before_an_attempt_and_never_during_one(
    mlflow: Mlflow, before: Condition | None, jobs: Json, seconds: float, expected: Json
) -> None:
    of = ftj(status(*([before] if before else []), attempt=1, mlflow=KNOWN))
    decision = conclude(of, observed(*jobs.values(), mlflow=mlflow), at=later(seconds), settings=SETTINGS)
    assert {
        "actions": [type(action).__name__ for action in decision.actions],
        "run": decision.status.run_id,
        "said": said(decision, ConditionType.TRACKED),
    } == {
        "actions": [],
        "run": "r1",
        "said": (before.status, before.reason, before.message) if before else None,
    } | expected
    if mlflow != ANOTHER:
        assert not applied(decision)


def test_the_progress_of_a_deleted_run_stays_in_the_status_while_it_is_logged_to() -> None:
    deleted_run = dataclasses.replace(DELETED.run or Run("r1", "e1", "RUNNING"), metrics={"step": 4.0})
    decision = follow(Mlflow(run=deleted_run), running(mlflow=KNOWN))
    assert decision.status.progress == Progress(step=4, update_time=later(30))


READY = condition(ConditionType.TRACKED, "True", ConditionReason.RUN_READY)
GONE: dict[str, tuple[Mlflow, Condition, float]] = {
    "deleted": (DELETED, READY, 0),
    "not found at first": (Mlflow(), READY, 0),
    "not found for too long": (Mlflow(), NOT_FOUND, 60),
}


@pytest.mark.parametrize(("mlflow", "before", "seconds"), GONE.values(), ids=GONE)
def test_a_preparation_waits_for_the_run_that_replaces_one(
    mlflow: Mlflow, before: Condition, seconds: float
) -> None:
    of = ftj(status(ADMITTED, before, mlflow=KNOWN), data=SOURCE)
    decision = conclude(of, observed(mlflow=mlflow), at=later(seconds), settings=SETTINGS)
    assert applied(decision) == []
    assert said(decision, ConditionType.PREPARED) == (
        "False",
        ConditionReason.PREPARING,
        "preparation starts when the MLflow run exists",
    )
    replaced = conclude(ftj(decision.status, data=SOURCE), observed(mlflow=ANOTHER), settings=SETTINGS)
    assert applied(replaced) == ["ConfigMap/tune-prep", "Job/tune-prep"]
    env = replaced.apply[1]["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {item["name"]: item.get("value") for item in env}["MLFLOW_RUN_ID"] == "r2"


def test_a_run_that_was_just_created_is_in_the_status() -> None:
    of = ftj(status(mlflow=KNOWN))
    decision = conclude(of, observed(mlflow=DELETED), settings=SETTINGS)
    after = record_run(of, decision, Run("r2", "e1", "RUNNING"), "http://mlflow:5000", SETTINGS, now=NOW)
    url = "http://mlflow:5000/#/experiments/e1/runs/r2"
    assert after.status.mlflow == MlflowStatus(experiment_id="e1", run_id="r2", url=url)
    replaced = ("True", ConditionReason.RUN_REPLACED, "MLflow run r2 replaces run r1")
    assert said(after, ConditionType.TRACKED) == replaced
    # The next pass finds it, starts the training, and still says so.
    outcome = conclude(ftj(after.status), observed(mlflow=ANOTHER), settings=SETTINGS)
    assert said(outcome, ConditionType.TRACKED) == replaced
    assert "Job/tune-train-1" in applied(outcome)


def test_mlflow_away_later_stops_nothing() -> None:
    decision = follow(AWAY, running(mlflow=KNOWN))
    assert said(decision, ConditionType.TRACKED) == (
        "False",
        ConditionReason.MLFLOW_UNREACHABLE,
        "MLflow at http://m cannot be reached: no",
    )
    assert (decision.status.phase, decision.status.mlflow) == ("Training", KNOWN)
