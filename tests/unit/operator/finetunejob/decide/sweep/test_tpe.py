"""TPE: values are requested when a trial can start, recorded, and used only then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from finetune_crds.sweep import SweepStatus
from finetune_operator.finetunejob.model import FineTuneJob, Observed
from fixtures.operator_in_memory.decisions import applied, conclude, ftj
from unit.operator.finetunejob.decide.sweep.children import CHECKPOINT, decide_sweep, record, sweep_job, trial

Json = dict[str, Any]
RATE: Json = {"field": "training.learningRate", "range": {"min": 1e-4, "max": 1e-2, "scale": "Log"}}
SWEEP: Json = {"parameters": [RATE], "algorithm": "TPE", "trials": 4, "parallel": 2}


def job(*trials: Any) -> FineTuneJob:
    return sweep_job(*trials, sweep=SWEEP)


def test_the_corners_are_checked_first() -> None:
    decision = conclude(ftj(sweep=SWEEP, checkpoint=CHECKPOINT), answer=None)
    rates = [body["spec"]["training"]["learningRate"] for body in decision.dry_runs]
    assert (rates, decision.suggestions) == ([1e-4, 1e-2], None)


def test_values_are_requested_for_the_trials_that_can_start() -> None:
    decision = decide_sweep(
        job(record(1, "Training"), record(2, metric=0.5)), trial(1), trial(2, "Succeeded", 0.5)
    )
    assert decision.suggestions is not None
    assert ([*decision.suggestions["seeds"]], applied(decision)) == (["3"], [])
    assert [item["state"] for item in decision.suggestions["trials"]] == ["Running", "Complete"]
    running = (record(1, "Training"), record(2, "Training"))
    assert decide_sweep(job(*running), trial(1), trial(2)).suggestions is None


def test_values_are_recorded_before_the_trial_exists() -> None:
    before = job(record(1, "Training"), record(2, metric=0.5))
    rates = {"3": {"training.learningRate": 3e-4}}
    decision = conclude(before, replace(Observed(children={"tune-1": trial(1)}), suggestions=rates))
    assert (applied(decision), decision.suggestions) == ([], None)
    assert decision.requeue_seconds == 0.1
    sweep = decision.status.sweep or SweepStatus()
    assert sweep.trials[-1].to_json() == {
        "n": 3,
        "parameters": {"training.learningRate": "0.0003"},
        "phase": "Pending",
    }
    after = conclude(replace(before, status=decision.status), Observed(children={"tune-1": trial(1)}))
    assert (applied(after), after.apply[0]["spec"]["training"]) == (
        ["FineTuneJob/tune-3"],
        {"learningRate": 3e-4},
    )
    assert after.suggestions is None


def test_values_stay_if_the_trial_is_deleted() -> None:
    decision = decide_sweep(job(record(1, "Training"), record(2, "Training")), trial(2))
    assert (applied(decision), decision.apply[0]["spec"]["training"]) == (
        ["FineTuneJob/tune-1"],
        {"learningRate": 1e-4},
    )
