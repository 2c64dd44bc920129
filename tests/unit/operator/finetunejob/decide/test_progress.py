"""What the metrics and tags of a run say about a job."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from finetune_crds import contract
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import ModelStatus, Progress
from finetune_crds.status_parts import PlanStatus
from finetune_operator.finetunejob.model import Mlflow
from fixtures.operator_in_memory.decisions import (
    ADMITTED,
    NOW,
    SETTINGS,
    SOURCE,
    UID,
    child,
    conclude,
    condition,
    ftj,
    later,
    observed,
    running,
    status,
    tracked,
)
from unit.operator.finetunejob.decide.mlflow_runs import AWAY, KNOWN, follow

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


# The parameters of a custom command, the steps that its run names, and the number of steps.
PARAMETERS: dict[str, tuple[dict[str, Any], int | None, int | None]] = {
    "the script logs no number of steps": ({"max_steps": 100}, None, 100),
    "a script that logs it": ({"max_steps": 100}, 80, 80),
    "a number in a text": ({"max_steps": "100"}, None, None),
    "epochs": ({"max_steps": -1, "epochs": 3}, None, None),
    "a truth": ({"max_steps": True}, None, None),
}


@pytest.mark.parametrize(("parameters", "planned", "expected"), PARAMETERS.values(), ids=PARAMETERS)
def test_a_parameter_of_a_command_has_the_number_of_steps(
    parameters: dict[str, Any], planned: int | None, expected: int | None
) -> None:
    mlflow = tracked(metrics={"loss": 1.0})
    assert mlflow.run
    run = dataclasses.replace(mlflow.run, steps={"loss": 20}, planned_steps=planned)
    world = observed(child("tune-train-1"), mlflow=dataclasses.replace(mlflow, run=run))
    job = ftj(running(), trainer={"command": ["torchrun", "a.py"], "parameters": parameters})
    progress = conclude(job, world, at=later(30), settings=SETTINGS).status.progress
    assert progress is not None
    assert (progress.step, progress.max_steps) == (20, expected)


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
        tracked(
            base_eval_loss=5.0,
            final_eval_loss=2.00004,
            final_eval_perplexity=7.38905,
            goodput=1.25,
            productive_seconds=61.9,
        )
    )
    assert decision.status.model == ModelStatus(base_eval_loss=5.0, eval_loss=2.0, perplexity=7.3891)
    assert (decision.status.goodput, decision.status.productive_seconds) == (1.0, 61)


def test_evaluation_and_goodput_that_are_no_numbers_are_left_out() -> None:
    decision = follow(
        tracked(final_eval_loss=NAN, final_eval_perplexity=INF, goodput=NAN, productive_seconds=NAN)
    )
    status = decision.status
    assert (status.model, status.goodput, status.productive_seconds) == (None, None, None)


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
