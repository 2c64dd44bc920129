"""All trials of a sweep are checked before the first one starts."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.finetunejob.model import DryRunAnswer
from fixtures.operator_in_memory.decisions import SETTINGS, applied, conclude, failure_of, ftj, later, said
from unit.operator.finetunejob.decide.sweep.children import CHECKPOINT, REGISTER, SWEEP

Json = dict[str, Any]
JOB: Json = {"sweep": SWEEP, "checkpoint": CHECKPOINT}


def answer(reason: ConditionReason, *, admitted: bool | None = False) -> DryRunAnswer:
    return DryRunAnswer(
        admitted, reason, "the API server would reject FineTuneJob tune-3: no", retry_seconds=30
    )


@pytest.mark.parametrize(
    ("parts", "last"), [(JOB, "tune-4"), (JOB | {"register": REGISTER}, "tune-best")], ids=["trials", "best"]
)
def test_every_trial_is_created_in_a_dry_run(parts: Json, last: str) -> None:
    decision = conclude(ftj(**parts), settings=SETTINGS, answer=None)
    names = [body["metadata"]["name"] for body in decision.dry_runs]
    assert (names[:4], names[-1]) == (["tune-1", "tune-2", "tune-3", "tune-4"], last)
    assert (applied(decision), decision.status.sweep) == ([], None)


def test_the_first_trials_start_when_all_are_accepted() -> None:
    decision = conclude(ftj(**JOB))
    assert applied(decision) == ["FineTuneJob/tune-1", "FineTuneJob/tune-2"]
    assert decision.status.sweep is not None
    assert [trial.phase for trial in decision.status.sweep.trials] == ["Pending", "Pending"]
    assert conclude(ftj(decision.status, **JOB), answer=None).dry_runs == ()


# The answer to the dry runs; whether the job fails, and the reason that Ready has.
ANSWERS: dict[str, tuple[DryRunAnswer, bool, str]] = {
    "invalid": (answer(ConditionReason.POD_TEMPLATE_INVALID), True, "InvalidSpec"),
    "a policy": (answer(ConditionReason.POD_REJECTED), False, "PodRejected"),
    "no answer": (answer(ConditionReason.CHECK_FAILED, admitted=None), False, "CheckFailed"),
}


@pytest.mark.parametrize(("answered", "fails", "reason"), ANSWERS.values(), ids=ANSWERS)
def test_a_refused_trial(answered: DryRunAnswer, reason: str, *, fails: bool) -> None:
    decision = conclude(ftj(**JOB), answer=answered)
    assert (failure_of(decision) is not None) == fails
    ready = said(decision, ConditionType.READY)
    assert ready
    assert ready[1] == reason
    assert "the API server would reject FineTuneJob tune-3: no" in ready[2]
    assert (applied(decision), decision.status.sweep) == ([], None)
    assert decision.requeue_seconds == (None if fails else 30)


def test_a_trial_that_the_operator_would_refuse_is_named() -> None:
    # The schema cannot compare the second one with the default of the learning rate.
    rates = {"field": "training.minLearningRate", "values": [1e-6, 1e-3]}
    decision = conclude(ftj(**JOB | {"sweep": {"parameters": [rates], "algorithm": "Grid"}}))
    failure = failure_of(decision)
    assert failure
    assert failure[1] == "InvalidSpec"
    assert failure[2].startswith(
        "trial tune-2 (training.minLearningRate 0.001) is invalid: spec.training.minLearningRate 0.001 must be below the learning rate"
    )


def test_too_many_combinations_fail_the_job() -> None:
    seeds = {"field": "training.seed", "range": {"min": 0, "max": 200, "step": 1}}
    failure = failure_of(
        conclude(ftj(**JOB | {"sweep": {"parameters": [seeds], "algorithm": "Grid"}}), answer=None)
    )
    assert failure
    assert failure[2].startswith("spec.sweep.parameters have more than 100 combinations: ")


@pytest.mark.parametrize(
    ("parts", "reason"),
    [({"register": REGISTER}, "StorageNotConfigured"), ({}, "Starting")],
    ids=["registers", "registers nothing"],
)
def test_a_model_is_registered_from_a_checkpoint(parts: Json, reason: str) -> None:
    decision = conclude(ftj(sweep=SWEEP, **parts), settings=SETTINGS)
    ready = said(decision, ConditionType.READY)
    assert ready
    assert ready[1] == reason
    # The next pass says the same.
    again = conclude(ftj(decision.status, sweep=SWEEP, **parts), settings=SETTINGS, at=later(60))
    assert said(again, ConditionType.READY) == ready
    before, after = (
        next(item for item in status.conditions if item.type == ConditionType.ACCEPTED)
        for status in (decision.status, again.status)
    )
    assert after == before
