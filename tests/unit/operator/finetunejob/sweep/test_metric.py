"""The value of a trial, and which trial is the best."""

from __future__ import annotations

import math
from typing import Any

import pytest

from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.sweep import Sweep, Trial
from finetune_operator.finetunejob.sweep import metric

Json = dict[str, Any]
RATES: Json = {
    "algorithm": "Grid",
    "parameters": [{"field": "training.learningRate", "values": [1e-4, 1e-3]}],
}
LOSS = Sweep.model_validate(RATES)
ACCURACY = Sweep.model_validate(RATES | {"metric": "eval_reward_accuracy"})
# The metric, which checkpoint the trial saves, its phase, the values at its evaluations, and its value.
VALUES: dict[str, tuple[Sweep, str, str, dict[int, float], float | None]] = {
    "the loss is that of its status": (LOSS, "Last", "Succeeded", {10: 0.9}, 0.5),
    "the loss before its end": (LOSS, "Last", "Training", {}, None),
    "the last accuracy": (ACCURACY, "Last", "Succeeded", {20: 0.7, 10: 0.8}, 0.7),
    "the accuracy of the best checkpoint": (ACCURACY, "Best", "Succeeded", {10: 0.8, 20: 0.7}, 0.8),
    "an accuracy that is no number": (ACCURACY, "Last", "Succeeded", {10: 0.8, 20: math.nan}, None),
    "the best checkpoint without such an accuracy": (
        ACCURACY,
        "Best",
        "Succeeded",
        {10: 0.8, 20: math.nan},
        0.8,
    ),
    "no checkpoint is better than the base": (ACCURACY, "Best", "Succeeded", {0: 0.8, 10: 0.8, 20: 0.7}, 0.7),
    "the accuracy of the base": (ACCURACY, "Last", "Succeeded", {0: 0.8}, None),
    "no accuracy": (ACCURACY, "Last", "Succeeded", {}, None),
    "the accuracy before its end": (ACCURACY, "Last", "Training", {10: 0.8}, None),
}


@pytest.mark.parametrize(("sweep", "select", "phase", "values", "value"), VALUES.values(), ids=VALUES)
def test_the_value_of_a_trial(
    sweep: Sweep, select: str, phase: str, values: dict[int, float], value: float | None
) -> None:
    spec = FineTuneJobSpec.model_validate({"training": {"select": select}})
    child: Json = {"status": {"phase": phase, "model": {"evalLoss": 0.5}}}
    assert metric.read_value(spec, sweep, child, values) == value


@pytest.mark.parametrize(("sweep", "best"), [(LOSS, 3), (ACCURACY, 2)], ids=["loss", "accuracy"])
def test_the_best_trial(sweep: Sweep, best: int) -> None:
    values = {1: None, 2: 0.9, 3: 0.1, 4: 0.1, 5: 0.9}
    trials = [Trial(n=n, parameters={}, metric=value) for n, value in values.items()]
    chosen = metric.get_best(sweep, trials)
    assert chosen
    assert chosen.n == best
    assert metric.get_best(sweep, trials[:1]) is None
