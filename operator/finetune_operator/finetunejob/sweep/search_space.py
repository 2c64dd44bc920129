"""The search space of a sweep that chooses values from earlier results, as the sampler's process takes it."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from finetune_crds.base import Json
from finetune_crds.sweep import MAX_TRIALS, Sweep, SweepParameter, Trial
from finetune_operator.finetunejob.sweep import metric, values
from finetune_operator.finetunejob.sweep.values import Values

_STATES = {"Succeeded": "Complete", "Failed": "Failed"}
_MAX_STARTUP_TRIALS, _MIN_STARTUP_TRIALS = 10, 3
"""Optuna's default is 10, which would leave little of a short sweep to the sampler."""


def build_request(sweep: Sweep, trials: Sequence[Trial], numbers: Sequence[int]) -> Json:
    """Build a request for `sampler`.

    Args:
        trials: the trials that have started.
        numbers: the numbers of the trials to suggest.
    """
    count = sweep.trials or 1
    return {
        "distributions": {item.field: _build_distribution(item) for item in sweep.parameters},
        "trials": [_describe_trial(sweep, trial) for trial in trials],
        "startup_trials": min(_MAX_STARTUP_TRIALS, max(_MIN_STARTUP_TRIALS, count // 4)),
        "seeds": {str(number): _derive_seed(sweep.seed, number) for number in numbers},
    }


def decode(sweep: Sweep, suggestion: Mapping[str, Any]) -> Values:
    """The values of a trial, from the sampler's suggestion."""
    return {item.field: _decode(item, suggestion[item.field]) for item in sweep.parameters}


def read_values(sweep: Sweep, trial: Trial) -> Values:
    """The values of a trial that the status records."""
    return {item.field: _read(item, trial.parameters[item.field]) for item in sweep.parameters}


def list_corners(sweep: Sweep) -> list[Values]:
    """Combinations of the ends of all ranges and of all values: every one or, if there are too many, each value beside the first ones."""
    choices = [_list_extremes(item) for item in sweep.parameters]
    fields = [item.field for item in sweep.parameters]
    if math.prod(map(len, choices)) <= MAX_TRIALS:
        return [dict(zip(fields, corner, strict=True)) for corner in itertools.product(*choices)]
    first = {field: options[0] for field, options in zip(fields, choices, strict=True)}
    last = {field: options[-1] for field, options in zip(fields, choices, strict=True)}
    changed = (
        {**first, field: option}
        for field, options in zip(fields, choices, strict=True)
        for option in options[1:]
    )
    return [first, *changed, last]


def _derive_seed(seed: int, number: int) -> int:
    digest = hashlib.sha256(f"{seed}:{number}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def _build_distribution(parameter: SweepParameter) -> Json:
    interval = parameter.range
    if interval is None:
        return {"type": "Choice", "choices": [values.format_value(item) for item in parameter.values or ()]}
    if interval.step is not None:
        # The number of the step: Optuna knows no steps on a logarithmic scale.
        return {"type": "Integer", "low": 0, "high": values.count_steps(interval) - 1, "log": False}
    is_log = interval.scale == "Log"
    if values.is_whole_number(parameter.field):
        low, high = math.ceil(interval.min), math.floor(interval.max)
        return {"type": "Integer", "low": low, "high": high, "log": is_log}
    return {"type": "Float", "low": interval.min, "high": interval.max, "log": is_log}


def _describe_trial(sweep: Sweep, trial: Trial) -> Json:
    state = _STATES.get(trial.phase or "", "Running")
    if state == "Complete" and trial.metric is None:
        state = "Failed"
    described = {item.field: _encode(item, trial.parameters[item.field]) for item in sweep.parameters}
    # The sampler minimizes.
    key = {"metric": metric.rank(sweep, trial.metric, trial.n)[0]} if state == "Complete" else {}
    return {"state": state, "parameters": described, **key}


def _decode(parameter: SweepParameter, suggestion: Any) -> Any:
    interval = parameter.range
    if interval is None:
        return _read(parameter, suggestion)
    if interval.step is not None:
        return values.take_step(parameter, suggestion)
    return values.round_value(parameter, suggestion)


def _encode(parameter: SweepParameter, text: str) -> Any:
    """A recorded value as the sampler suggested it."""
    interval = parameter.range
    if interval is None:
        return text
    if interval.step is not None:
        steps = range(values.count_steps(interval))
        return next(step for step in steps if values.format_value(values.take_step(parameter, step)) == text)
    return json.loads(text)


def _read(parameter: SweepParameter, text: str) -> Any:
    """A recorded value. NB: the status cuts long values, of which `values.find_mistake` refuses those that would be equal."""
    if parameter.range is not None:
        return json.loads(text)
    return next(item for item in parameter.values or () if values.format_value(item) == text)


def _list_extremes(parameter: SweepParameter) -> list[Any]:
    interval = parameter.range
    if interval is None:
        return list(parameter.values or ())
    if interval.step is not None:
        return [values.take_step(parameter, step) for step in (0, values.count_steps(interval) - 1)]
    return [values.round_value(parameter, bound) for bound in (interval.min, interval.max)]
