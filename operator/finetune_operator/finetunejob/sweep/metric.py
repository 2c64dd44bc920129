"""The metric of a sweep: the value of a trial, and which of two values is better."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from finetune_crds.base import Json
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.sweep import Sweep, Trial
from finetune_operator.finetunejob.model import FINISHED_PHASES
from finetune_operator.finetunejob.sweep import trial_state

EVAL_LOSS = "eval_loss"


def needs_evaluations(sweep: Sweep) -> bool:
    """Whether trials are compared by their evaluations in MLflow: at rungs, or because the status has the evaluation loss alone."""
    return sweep.rungs is not None or sweep.metric != EVAL_LOSS


def is_undecided(sweep: Sweep, trial: Trial | None, child: Json) -> bool:
    """Whether a trial has succeeded, and only its evaluations say how well: the child's status has the evaluation loss alone."""
    is_recorded = trial is not None and trial.phase in FINISHED_PHASES
    return sweep.metric != EVAL_LOSS and not is_recorded and trial_state.read_phase(child) == "Succeeded"


def read_value(spec: FineTuneJobSpec, sweep: Sweep, child: Json, values: Mapping[int, float]) -> float | None:
    """The value of a trial that has succeeded: that of the weights it saved; None without a finite one.

    Args:
        values: the values at the evaluations of the trial, by step; not used for the evaluation loss.
    """
    if sweep.metric == EVAL_LOSS:
        return trial_state.read_loss(child)
    # The evaluation at step 0 is that of the base model.
    trained = {step: value for step, value in values.items() if step > 0}
    if trial_state.read_phase(child) != "Succeeded" or not trained:
        return None
    saved = trained[max(trained)]
    if spec.training.select == "Best":
        # NB: the schema requires that select decides by the metric. A checkpoint that is not better than the base is not kept.
        finite = [value for value in trained.values() if math.isfinite(value)]
        best = max(finite, default=-math.inf)
        saved = best if best > values.get(0, -math.inf) else saved
    return saved if math.isfinite(saved) else None


def rank(sweep: Sweep, value: float | None, number: int) -> tuple[float, int]:
    """A key to sort trials by, the best one first: by their values and, of equal ones, by their numbers.

    Args:
        value: the value of the metric; None if it is not a finite number.
        number: the number of the trial.
    """
    if value is None:
        return math.inf, number
    return (value if sweep.metric == EVAL_LOSS else -value), number


def get_best(sweep: Sweep, trials: Sequence[Trial]) -> Trial | None:
    """The trial with the best value, of equal ones the first; None if no trial has a value."""
    measured = [trial for trial in trials if trial.metric is not None]
    return min(measured, key=lambda trial: rank(sweep, trial.metric, trial.n), default=None)
