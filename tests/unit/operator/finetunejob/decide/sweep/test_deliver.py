"""The last FineTuneJob of a sweep, and what the job says when it ends."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.finetunejob.decision import Decision
from fixtures.operator_in_memory.decisions import applied, failure_of, said
from unit.operator.finetunejob.decide.sweep.children import (
    condition_of,
    decide_sweep,
    record,
    sweep_job,
    trial,
)

Json = dict[str, Any]
OUTPUT: Json = {"output": {"uri": "s3://bucket/model"}}
METRICS = {1: 0.9, 2: 0.7, 3: 0.8, 4: 1.0}
MODEL: Json = {"name": "m", "version": "3", "uri": "models:/m/3", "summary": "m/3", "evalLoss": 0.7}
CHECKPOINT: Json = {"step": 10, "uri": "s3://bucket/checkpoints/team-tune-2/step-00000010"}
ENDED = tuple(trial(number, "Succeeded", metric) for number, metric in METRICS.items())


def after_trials(*children: Json, parts: Json = OUTPUT) -> Decision:
    job = sweep_job(*(record(number, metric=metric) for number, metric in METRICS.items()), **parts)
    return decide_sweep(job, *children)


def test_without_a_model_to_deliver_the_job_ends_with_its_trials() -> None:
    best = trial(2, "Succeeded", 0.7, checkpoint=CHECKPOINT)
    decision = after_trials(*ENDED[:1], best, *ENDED[2:], parts={})
    assert (decision.status.phase, applied(decision)) == ("Succeeded", [])
    assert decision.status.model is not None
    assert decision.status.model.to_json() == {"evalLoss": 0.7}
    assert decision.status.checkpoint is not None
    assert decision.status.checkpoint.to_json() == CHECKPOINT
    assert said(decision, ConditionType.FINISHED) is not None


def test_the_last_job_continues_from_the_best_trial() -> None:
    decision = after_trials(*ENDED)
    assert applied(decision) == ["FineTuneJob/tune-best"]
    spec = decision.apply[0]["spec"]
    assert (spec["training"], spec["output"], spec["checkpoint"]) == (
        {"learningRate": 2e-4},
        OUTPUT["output"],
        {"uri": "s3://bucket/checkpoints", "resumeFrom": {"type": "Job", "name": "tune-2"}},
    )
    assert decision.status.phase == "Registering"
    assert said(decision, ConditionType.REGISTERED) == (
        "False",
        "Registering",
        "FineTuneJob tune-best delivers the model of trial 2 from its last checkpoint",
    )


EVALUATING = condition_of(ConditionType.EVALUATED, "False", ConditionReason.EVALUATING, "it evaluates")
EVALUATED = condition_of(ConditionType.EVALUATED, "True", ConditionReason.EVALUATED, "evaluated")
SETTING = condition_of(ConditionType.REGISTERED, "False", ConditionReason.REGISTERING, "setting candidate")
REGISTERED = condition_of(ConditionType.REGISTERED, "True", ConditionReason.REGISTERED, "m version 3")
# The phase and the conditions of the last job, and the phase of the sweep.
PHASES: dict[str, tuple[str, tuple[Json, ...], str]] = {
    "new": ("Pending", (), "Registering"),
    "it trains no step": ("Training", (), "Registering"),
    "it evaluates": ("Evaluating", (EVALUATING,), "Evaluating"),
    "it sets aliases": ("Registering", (EVALUATED, SETTING), "Registering"),
    "it has succeeded": ("Succeeded", (EVALUATED, REGISTERED), "Succeeded"),
}


@pytest.mark.parametrize(("phase", "conditions", "expected"), PHASES.values(), ids=PHASES)
def test_the_job_follows_its_last_one(phase: str, conditions: tuple[Json, ...], expected: str) -> None:
    last = trial("best", phase, None, *conditions, model=MODEL, parent=sweep_job(**OUTPUT))
    decision = after_trials(*ENDED, last)
    assert (decision.status.phase, applied(decision)) == (expected, [])
    assert decision.status.model is not None
    assert decision.status.model.to_json() == MODEL


def test_a_last_job_that_fails_fails_the_sweep() -> None:
    failed = condition_of(ConditionType.FAILED, "True", ConditionReason.EVALUATION_FAILED, "no rows")
    decision = after_trials(*ENDED, trial("best", "Failed", None, failed, parent=sweep_job(**OUTPUT)))
    assert failure_of(decision) == (
        "True",
        "EvaluationFailed",
        "FineTuneJob tune-best, which delivers the model of the best trial, failed: no rows",
    )


def test_a_failure_says_once_what_to_do() -> None:
    hint = "this job has finished: create a FineTuneJob with another name and the correction, or delete this job first"
    failed = condition_of(
        ConditionType.FAILED, "True", ConditionReason.RECIPE_WRONG, f"no such layer; {hint}"
    )
    decision = after_trials(*ENDED, trial("best", "Failed", None, failed, parent=sweep_job(**OUTPUT)))
    (condition,) = (item for item in decision.status.conditions if item.type == ConditionType.FAILED)
    assert condition.message == (
        f"FineTuneJob tune-best, which delivers the model of the best trial, failed: no such layer; {hint}"
    )


def test_a_best_trial_that_was_deleted_has_no_checkpoint_to_find() -> None:
    decision = after_trials(ENDED[0], *ENDED[2:])
    assert failure_of(decision) == (
        "True",
        "TrialsFailed",
        "the best trial was deleted before its model was registered: create a FineTuneJob with another name",
    )
