"""The MLflow run and what it says."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from finetune_crds import contract
from finetune_crds.base import Json
from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_crds.status import FineTuneJobStatus, MlflowStatus, ModelStatus, Progress
from finetune_crds.status_parts import PlanStatus
from finetune_operator.errors import Problem
from finetune_operator.finetunejob.decide.created_run import record_run
from finetune_operator.finetunejob.model import EnsureRun, Mlflow
from finetune_operator.mlflow.model import Run
from worlds.memory.decisions import (
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
    pod,
    running,
    said,
    status,
    tracked,
)

AWAY = Mlflow(problem=Problem(ConditionReason.MLFLOW_UNREACHABLE, "MLflow at http://m cannot be reached: no"))
KNOWN = MlflowStatus(experiment_id="e1", run_id="r1", url="http://mlflow:5000/#/experiments/e1/runs/r1")


def follow(mlflow: Mlflow | None, before: FineTuneJobStatus | None = None, **parts: Any) -> Any:
    """The decision about a job that trains."""
    observation = observed(
        child("tune-train-1"), pods=[pod("tune-train-1", 0), pod("tune-train-1", 1)], mlflow=mlflow
    )
    return conclude(ftj(before or running(), **parts), observation, at=later(30), settings=SETTINGS)


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


STEP = {contract.TAG_PREPARATION: "near duplicates 40%"}
SHOWN = Progress(summary="near duplicates 40%", update_time=NOW)
PREPARING: dict[str, tuple[Mlflow, Progress | None, Progress | None]] = {
    "a step": (tracked(tags=STEP), None, SHOWN.model_copy(update={"update_time": later(30)})),
    "the same step": (tracked(tags=STEP), SHOWN, SHOWN),
    "no step": (tracked(), None, None),
    "MLflow is away": (AWAY, SHOWN, SHOWN),
    "a long text": (
        tracked(tags={contract.TAG_PREPARATION: "x" * 100}),
        None,
        Progress(summary="x" * 24, update_time=later(30)),
    ),
}


@pytest.mark.parametrize(("mlflow", "before", "after"), PREPARING.values(), ids=PREPARING)
def test_the_step_of_a_preparation_is_its_progress(
    mlflow: Mlflow, before: Progress | None, after: Progress | None
) -> None:
    preparing = condition(ConditionType.PREPARED, "False", ConditionReason.PREPARING)
    of = ftj(status(ADMITTED, preparing, progress=before, mlflow=KNOWN), data=SOURCE)
    decision = conclude(of, observed(child("tune-prep"), mlflow=mlflow), at=later(30), settings=SETTINGS)
    assert (decision.status.phase, decision.status.progress) == ("Preparing", after)


def test_the_step_of_a_preparation_goes_when_training_starts() -> None:
    assert follow(tracked(tags=STEP), running(progress=SHOWN)).status.progress is None
    trained = Progress(step=3, summary="3%", update_time=NOW)
    assert follow(tracked(tags=STEP), running(progress=trained)).status.progress == trained


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
RESTORE = "restore it, since the metrics and the model of this attempt belong to it"
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


NAN, INF = float("nan"), float("inf")

PROGRESS: dict[str, tuple[dict[str, float], Progress | None]] = {
    "nothing logged": ({}, None),
    "other metrics alone": ({"accuracy": 1.0}, None),
    "everything": (
        {
            "step": 40.0,
            "max_steps": 120.0,
            "loss": 3.25678,
            "eval_loss": 3.5,
            "tokens_per_second": 1234.56,
            "seconds_remaining": 80.9,
        },
        Progress(
            step=40,
            max_steps=120,
            percent=33,
            summary="33%",
            loss=3.2568,
            eval_loss=3.5,
            tokens_per_second=1234.6,
            seconds_remaining=80,
            eta="1m20s",
            update_time=later(30),
        ),
    ),
    "the last evaluation": (
        {"step": 9.0, "eval_loss": 3.5, "final_eval_loss": 3.25},
        Progress(step=9, eval_loss=3.25, update_time=later(30)),
    ),
    "loss alone": ({"loss": 2.0}, Progress(step=0, loss=2.0, update_time=later(30))),
    "no end in sight": ({"step": 7.0}, Progress(step=7, update_time=later(30))),
    "nothing to do": (
        {"step": 0.0, "max_steps": 0.0},
        Progress(step=0, max_steps=0, update_time=later(30)),
    ),
    "beyond the end": (
        {"step": 130.0, "max_steps": 120.0},
        Progress(step=130, max_steps=120, percent=100, summary="100%", update_time=later(30)),
    ),
    "a run that diverged": (
        {"step": 3.0, "max_steps": 10.0, "loss": NAN, "eval_loss": INF, "seconds_remaining": INF},
        Progress(step=3, max_steps=10, percent=30, summary="30%", update_time=later(30)),
    ),
    "numbers that are none": (
        {"step": NAN, "max_steps": -INF, "seconds_remaining": -5.0},
        Progress(step=0, seconds_remaining=0, eta="0s", update_time=later(30)),
    ),
}


@pytest.mark.parametrize(("metrics", "expected"), PROGRESS.values(), ids=PROGRESS)
def test_progress(metrics: dict[str, float], expected: Progress | None) -> None:
    assert follow(tracked(metrics=metrics)).status.progress == expected


NAMES: dict[str, tuple[dict[str, float], float | None, float | None]] = {
    "ours": ({"loss": 1.0, "train_loss": 2.0, "eval_loss": 3.0, "val_loss": 4.0}, 1.0, 3.0),
    "ours, at the end": ({"loss": 1.0, "eval_loss": 3.0, "final_eval_loss": 2.5}, 1.0, 2.5),
    "HF's Trainer as it logs": ({"loss": 1.0, "grad_norm": 9.0, "eval_loss": 3.0}, 1.0, 3.0),
    "HF's Trainer at its end": ({"loss": 1.0, "train_loss": 2.0, "train_runtime": 9.0}, 1.0, None),
    "HF's Trainer, rewritten": ({"train/loss": 1.0, "train/train_loss": 9.0, "eval/loss": 3.0}, 1.0, 3.0),
    "two names at once": (
        {"train_loss": 2.0, "train/loss": 1.0, "val_loss": 4.0, "eval/loss": 3.0},
        1.0,
        3.0,
    ),
    "Lightning": ({"train_loss": 1.0, "val_loss": 3.0, "epoch": 0.0}, 1.0, 3.0),
    "Lightning, of steps and epochs": ({"train_loss_epoch": 2.0, "train_loss_step": 1.0}, 1.0, None),
    "Lightning, with slashes": ({"train/loss_step": 1.0, "train/loss_epoch": 2.0, "val/loss": 3.0}, 1.0, 3.0),
    "an evaluation alone": ({"validation_loss": 3.0}, None, 3.0),
    "one that diverged": ({"loss": NAN, "train_loss": 1.0}, None, None),
}


@pytest.mark.parametrize(("metrics", "loss", "eval_loss"), NAMES.values(), ids=NAMES)
def test_losses_have_the_names_of_other_trainers_too(
    metrics: dict[str, float], loss: float | None, eval_loss: float | None
) -> None:
    progress = follow(tracked(metrics=metrics)).status.progress
    assert (progress.loss, progress.eval_loss) == (loss, eval_loss)


STEPS: dict[str, tuple[dict[str, float], dict[str, int], int | None, tuple[int, int | None, str | None]]] = {
    "a metric": ({"step": 7.0, "loss": 1.0}, {"step": 3, "loss": 5}, None, (7, None, None)),
    "that of the loss": (
        {"loss": 1.0, "accuracy": 0.5},
        {"loss": 50, "accuracy": 90},
        None,
        (50, None, None),
    ),
    "that of the newest loss": (
        {"loss": 1.0, "train_loss": 2.0},
        {"loss": 90, "train_loss": 100},
        100,
        (100, 100, "100%"),
    ),
    "that of an evaluation": ({"val_loss": 1.0}, {"val_loss": 20}, 40, (20, 40, "50%")),
    "a metric of the last step": (
        {"loss": 1.0, "max_steps": 80.0},
        {"loss": 20, "max_steps": 0},
        40,
        (20, 80, "25%"),
    ),
}


@pytest.mark.parametrize(("metrics", "steps", "planned", "expected"), STEPS.values(), ids=STEPS)
def test_the_step_is_that_of_mlflow_where_nothing_logs_it(
    metrics: dict[str, float],
    steps: dict[str, int],
    planned: int | None,
    expected: tuple[int, int | None, str | None],
) -> None:
    mlflow = tracked(metrics=metrics)
    assert mlflow.run
    run = dataclasses.replace(mlflow.run, steps=steps, planned_steps=planned)
    progress = follow(dataclasses.replace(mlflow, run=run)).status.progress
    assert (progress.step, progress.max_steps, progress.summary) == expected


def test_progress_is_dated_when_it_changes_and_no_later() -> None:
    first = follow(tracked(step=4, max_steps=10)).status
    again = follow(tracked(step=4, max_steps=10), first).status
    assert again.progress == first.progress
    before = first.model_copy(update={"progress": first.progress.model_copy(update={"update_time": NOW})})
    moved = follow(tracked(step=5, max_steps=10), before).status.progress
    assert (moved.step, moved.update_time) == (5, later(30))


def test_the_remaining_time_is_told_while_training_runs_and_its_end_is_no_report() -> None:
    metrics = {"step": 4.0, "max_steps": 10.0, "seconds_remaining": 4800.0}
    training = follow(tracked(metrics=metrics)).status
    assert (training.progress.eta, training.progress.update_time) == ("1h20m", later(30))
    observation = observed(mlflow=tracked(metrics=metrics))
    stopped = ftj(training, suspend=True)
    suspended = conclude(stopped, observation, at=later(60), settings=SETTINGS).status
    assert suspended.progress == training.progress.model_copy(update={"eta": None})
    again = conclude(ftj(suspended, suspend=True), observation, at=later(90), settings=SETTINGS).status
    assert again == suspended


def test_evaluation_and_goodput() -> None:
    decision = follow(
        tracked(base_eval_loss=5.0, final_eval_loss=2.00004, final_eval_perplexity=7.38905, goodput=1.25)
    )
    assert decision.status.model == ModelStatus(base_eval_loss=5.0, eval_loss=2.0, perplexity=7.3891)
    assert decision.status.goodput == 1.0


def test_evaluation_and_goodput_that_are_no_numbers_are_left_out() -> None:
    decision = follow(tracked(final_eval_loss=NAN, final_eval_perplexity=INF, goodput=NAN))
    assert (decision.status.model, decision.status.goodput) == (None, None)


PLAN = {
    "activationCheckpointing": "Selective",
    "memoryBytes": 57_683_279_872,
    "limitBytes": 79_026_978_816,
    "parameters": 8_072_204_288,
    "trainedParameters": 41_943_040,
    "fourBitParameters": 6_979_321_856,
    "parts": {"weights": 16_128_466_944},
}
PLANNED = PlanStatus(
    activation_checkpointing="Selective",
    memory="53.7Gi",
    limit="73.6Gi",
    parameters=8_072_204_288,
    trained_parameters=41_943_040,
    four_bit_parameters=6_979_321_856,
)
PLANS: dict[str, tuple[str, PlanStatus | None]] = {
    "of a GPU": (json.dumps(PLAN), PLANNED),
    "of a rank whose limit is unknown": (
        json.dumps({**PLAN, "limitBytes": None}),
        PLANNED.model_copy(update={"limit": None}),
    ),
    "with asynchronous checkpoints": (
        json.dumps({**PLAN, "stagedBytes": 503_316_480}),
        PLANNED.model_copy(update={"host_memory": "480Mi"}),
    ),
    "with a kind that is none": (json.dumps({**PLAN, "activationCheckpointing": "Some"}), None),
    "with a number that no status can hold": (json.dumps({**PLAN, "parameters": 2**63}), None),
    "something else": ("53.7 GiB", None),
}


@pytest.mark.parametrize(("tag", "expected"), PLANS.values(), ids=PLANS)
def test_a_plan_of_the_memory_is_that_of_the_run(tag: str, expected: PlanStatus | None) -> None:
    assert follow(tracked(tags={contract.TAG_PLAN: tag})).status.plan == expected


def test_a_plan_stays_until_the_next_attempt_has_another() -> None:
    before = running().model_copy(update={"plan": PLANNED})
    assert follow(tracked(), before).status.plan == PLANNED
    new_plan = {contract.TAG_PLAN: json.dumps({**PLAN, "memoryBytes": 2**20})}
    assert follow(tracked(tags=new_plan), before).status.plan == PLANNED.model_copy(update={"memory": "1Mi"})


def test_a_checkpoint_is_noted_where_it_is() -> None:
    decision = follow(tracked(checkpoint_step=40), checkpoint={"uri": "s3://bucket/c/"})
    assert decision.status.checkpoint is not None
    assert decision.status.checkpoint.to_json() == {
        "step": 40,
        "uri": f"s3://bucket/c/team-tune-{UID[:8]}/step-00000040",
    }
    assert follow(tracked(checkpoint_step=40)).status.checkpoint is None
    assert follow(tracked(checkpoint_step=NAN), checkpoint={"uri": "/c"}).status.checkpoint is None
