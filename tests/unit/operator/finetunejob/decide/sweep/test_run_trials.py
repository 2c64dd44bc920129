"""In which order trials start, when they end the job, and what the job reports."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import DataStatus
from finetune_crds.sweep import Trial
from finetune_operator.finetunejob.model import Observed
from fixtures.operator_in_memory.decisions import applied, conclude, condition, failure_of, said
from unit.operator.finetunejob.decide.sweep.children import (
    SWEEP,
    condition_of,
    decide_sweep,
    record,
    sweep_job,
    trial,
)

Json = dict[str, Any]
OK = (trial(1, "Succeeded", 0.9), trial(2, "Succeeded", 0.7), trial(3, "Succeeded", 0.8))
# The trials in the status, the FineTuneJobs that exist, and the ones that are created.
STARTS: dict[str, tuple[tuple[Trial, ...], tuple[Json, ...], list[str]]] = {
    "as many as run in parallel": ((), (), ["tune-1", "tune-2"]),
    "the next one after a crash": ((), (trial(1, "Pending"),), ["tune-2"]),
    "none while enough run": ((), (trial(1), trial(2, "Preparing")), []),
    "the next one after an end": ((), (trial(1, "Succeeded", 0.9), trial(2)), ["tune-3"]),
    "the next one after a failure": ((), (trial(1, "Failed"), trial(2)), ["tune-3"]),
    "no more than there are": ((), (*OK, trial(4)), []),
    "a deleted one again": ((record(1, "Training"), record(2, "Training")), (trial(2),), ["tune-1"]),
    "a deleted one that had ended, never": (
        (record(1, metric=0.9), record(2, "Training")),
        (trial(2),),
        ["tune-3"],
    ),
    "none for one that is being deleted": (
        (),
        (
            trial(1),
            {**trial(2), "metadata": {**trial(2)["metadata"], "deletionTimestamp": "2026-08-01T12:00:00Z"}},
        ),
        [],
    ),
}


@pytest.mark.parametrize(("trials", "children", "names"), STARTS.values(), ids=STARTS)
def test_which_trials_start(trials: tuple[Trial, ...], children: tuple[Json, ...], names: list[str]) -> None:
    assert applied(decide_sweep(sweep_job(*trials), *children)) == [f"FineTuneJob/{name}" for name in names]


def test_the_status_has_the_trials_and_the_best_one() -> None:
    decision = decide_sweep(
        sweep_job(),
        trial(1, "Succeeded", 0.9),
        trial(2, "Succeeded", 0.7),
        trial(3, "Failed"),
        trial(4, "Queued"),
    )
    assert decision.status.sweep is not None
    assert decision.status.sweep.to_json() == {
        "best": 2,
        "planned": 4,
        "trials": [
            {
                "n": 1,
                "parameters": {"training.learningRate": "0.0001"},
                "metric": 0.9,
                "step": 10,
                "phase": "Succeeded",
            },
            {
                "n": 2,
                "parameters": {"training.learningRate": "0.0002"},
                "metric": 0.7,
                "step": 10,
                "phase": "Succeeded",
            },
            {"n": 3, "parameters": {"training.learningRate": "0.0003"}, "step": 10, "phase": "Failed"},
            {"n": 4, "parameters": {"training.learningRate": "0.0004"}, "phase": "Queued"},
        ],
    }
    progress = decision.status.progress
    assert progress is not None
    assert (progress.summary, progress.percent, progress.eval_loss) == ("3/4, best 0.7", 75, 0.7)
    assert said(decision, ConditionType.TRAINED) == (
        "False",
        "Queued",
        "3 of 4 trials have ended; tune-4 runs; tune-2 is the best, with eval_loss 0.7 (training.learningRate 0.0002)",
    )


def test_of_equal_trials_the_first_is_the_best() -> None:
    decision = decide_sweep(sweep_job(), *(trial(number, "Succeeded", 0.5) for number in (1, 2, 3, 4)))
    assert decision.status.sweep is not None
    assert decision.status.sweep.best == 1
    assert said(decision, ConditionType.SUCCEEDED) is not None


def test_an_end_is_final_even_if_the_trial_is_deleted() -> None:
    ended = [record(number, metric=0.1 * number) for number in (1, 2, 3)]
    decision = decide_sweep(sweep_job(*ended, record(4, "Training")), trial(4, "Succeeded", 0.9))
    assert said(decision, ConditionType.TRAINED) == (
        "True",
        "Trained",
        "4 trials have ended; tune-1 is the best, with eval_loss 0.1 (training.learningRate 0.0001)",
    )


def test_more_failures_than_allowed_fail_the_job() -> None:
    why = condition_of(ConditionType.FAILED, "True", ConditionReason.FATAL_EXIT_CODE, "it broke")
    children = (trial(1, "Failed"), trial(2, "Failed", None, why), trial(3))
    decision = decide_sweep(sweep_job(), *children)
    assert failure_of(decision) == (
        "True",
        "TrialsFailed",
        "2 trials have failed, and spec.sweep.maxFailedTrials is 1; the last one is tune-2: it broke",
    )
    assert applied(decision) == []
    assert [(change.name, change.fields) for change in decision.changed] == [("tune-3", {"suspend": True})]


def test_trials_without_the_metric_fail_the_job() -> None:
    decision = decide_sweep(sweep_job(), *(trial(number, "Succeeded") for number in (1, 2, 3, 4)))
    assert failure_of(decision) == (
        "True",
        "TrialsFailed",
        "no trial has a value of eval_loss: correct the cause of the failed trials, or let data have a validation split, and create a "
        "FineTuneJob with another name",
    )


def test_a_trial_ends_with_its_accuracy() -> None:
    job = sweep_job(sweep=SWEEP | {"metric": "eval_reward_accuracy"}, objective={"type": "DPO"})
    children = {f"tune-{number}": trial(number, "Succeeded", 0.5, parent=job) for number in (1, 2, 3, 4)}
    before = conclude(job, Observed(children=children))
    # MLflow has not answered yet.
    assert before.status.sweep
    assert [item.phase for item in before.status.sweep.trials] == ["Pending"] * 4
    accuracies: dict[int, dict[int, float]] = {1: {10: 0.6}, 2: {10: 0.9}, 3: {10: 0.7}, 4: {}}
    decision = conclude(job, Observed(children=children, evaluations=accuracies))
    assert said(decision, ConditionType.TRAINED) == (
        "True",
        "Trained",
        "4 trials have ended; tune-2 is the best, with eval_reward_accuracy 0.9 (training.learningRate 0.0002)",
    )
    progress = decision.status.progress
    assert progress is not None
    assert (progress.summary, progress.eval_loss) == ("4/4, best 0.9", None)


# Phases of the trials that run, and the phase of the job.
PHASES: dict[str, tuple[tuple[str, ...], str]] = {
    "none yet": ((), "Pending"),
    "all queued": (("Queued", "Queued"), "Queued"),
    "one trains": (("Starting", "Training"), "Training"),
    "none trains": (("Starting", "Pending"), "Starting"),
}


@pytest.mark.parametrize(("phases", "phase"), PHASES.values(), ids=PHASES)
def test_the_phase_follows_the_trials(phases: tuple[str, ...], phase: str) -> None:
    prepared = condition_of(ConditionType.PREPARED, "True", ConditionReason.SPLITS_GIVEN, "splits")
    children = [trial(number, item, None, prepared) for number, item in enumerate(phases, start=1)]
    assert decide_sweep(sweep_job(), *children).status.phase == phase


def test_the_preparation_of_the_first_trial_is_that_of_the_job() -> None:
    preparing = condition_of(ConditionType.PREPARED, "False", ConditionReason.PREPARING, "it prepares")
    waiting = condition_of(
        ConditionType.PREPARED, "False", ConditionReason.WAITING_FOR_PREPARATION, "it waits"
    )
    decision = decide_sweep(
        sweep_job(), trial(1, "Pending", None, waiting), trial(2, "Preparing", None, preparing)
    )
    assert (decision.status.phase, said(decision, ConditionType.PREPARED)) == (
        "Preparing",
        ("False", "Preparing", "it prepares"),
    )
    prepared = condition_of(ConditionType.PREPARED, "True", ConditionReason.PREPARED, "splits")
    data = {"path": "/splits", "version": 3, "digest": "d"}
    decision = decide_sweep(
        sweep_job(), trial(1, "Training", None, prepared, data=data), trial(2, "Pending", None, waiting)
    )
    assert decision.status.data is not None
    assert decision.status.data.to_json() == data


def test_a_trial_with_other_rows_is_not_compared() -> None:
    first, changed = {"path": "/splits", "digest": "d1"}, {"path": "/splits", "digest": "d2"}
    prepared = condition_of(ConditionType.PREPARED, "True", ConditionReason.PREPARED, "splits")
    known = condition(ConditionType.PREPARED, "True", ConditionReason.PREPARED)
    job = sweep_job(conditions=(known,), fields={"data": DataStatus(digest="d1")})
    decision = decide_sweep(
        job,
        trial(1, "Succeeded", 0.9, prepared, data=first),
        trial(2, "Succeeded", 0.1, prepared, data=changed),
        trial(3, "Training", None, prepared, data=first),
    )
    assert decision.status.sweep is not None
    assert [(item.n, item.metric) for item in decision.status.sweep.trials][:2] == [(1, 0.9), (2, None)]
    trained = said(decision, ConditionType.TRAINED)
    assert trained
    assert trained[2].endswith(
        "; tune-2 read other rows, since the source has changed, and cannot be the best"
    )


def test_what_blocks_a_trial_is_reported_and_then_no_longer() -> None:
    blocked = condition_of(ConditionType.PODS_HEALTHY, "False", ConditionReason.UNSCHEDULABLE, "no GPU")
    decision = decide_sweep(sweep_job(), trial(1), trial(2, "Starting", None, blocked))
    assert said(decision, ConditionType.PODS_HEALTHY) == ("False", "Unschedulable", "tune-2: no GPU")
    assert said(decision, ConditionType.READY) == ("False", "Unschedulable", "tune-2: no GPU")
    condition = next(item for item in decision.status.conditions if item.type == ConditionType.PODS_HEALTHY)
    decision = decide_sweep(sweep_job(conditions=(condition,)), trial(1), trial(2))
    assert said(decision, ConditionType.PODS_HEALTHY) == ("True", "PodsRunning", "no trial is blocked")


def test_usage_is_the_sum_of_the_trials() -> None:
    usage = {"podHours": 1.5, "gpuHours": 3.0, "jobs": []}
    decision = decide_sweep(sweep_job(), trial(1, usage=usage), trial(2, usage=usage))
    assert decision.status.usage is not None
    assert decision.status.usage.to_json() == {"podHours": 3.0, "gpuHours": 6.0, "jobs": []}
