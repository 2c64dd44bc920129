"""The values of each trial of a sweep. Those of all algorithms but TPE follow from the spec alone, so each pass computes the same trials."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, get_args

from finetune_crds.base import ApiModel
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.sweep import MAX_TRIALS, Sweep, SweepParameter, SweepRange

Values = dict[str, Any]
"""By path of a field: its value in a trial, as JSON."""

# Random draws a combination that an earlier trial has again, so often at most.
_MAX_DRAWS = 100
# Significant digits of numbers, of which binary fractions would otherwise show about 17.
_GRID_DIGITS = 12
_SAMPLED_DIGITS = 6
# Steps that end this share of a step above `max` belong to the range: min + k x step is not exact.
_STEP_TOLERANCE = 1e-6
_MAX_TEXT_CHARS = 256


def list_trials(sweep: Sweep) -> list[Values]:
    """The values of all trials of Grid, Random and ASHA, in the order of their numbers, which begin with 1.

    Of a grid, there is at most one more than the limit.
    """
    return list(_list_grid(sweep) if sweep.algorithm == "Grid" else _draw_trials(sweep))


def find_mistake(sweep: Sweep) -> str | None:
    """Explain why a sweep cannot be run, whatever its values are; None if it can."""
    if sweep.algorithm == "Grid" and len(list_trials(sweep)) > MAX_TRIALS:
        return (
            f"spec.sweep.parameters have more than {MAX_TRIALS} combinations: remove values, or set spec.sweep.algorithm to Random "
            "and spec.sweep.trials"
        )
    for parameter in sweep.parameters:
        texts = [format_value(value) for value in parameter.values or ()]
        if len(set(texts)) < len(texts):
            return (
                f"spec.sweep.parameters have the same value twice for {parameter.field}: remove one of them"
            )
    return None


def format_value(value: object) -> str:
    """A value as JSON, for the status; long values are cut."""
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= _MAX_TEXT_CHARS else f"{text[: _MAX_TEXT_CHARS - 1]}…"


@lru_cache(maxsize=256)
def is_whole_number(field: str) -> bool:
    """Whether a field of the spec, by its path, is a whole number."""
    part: type[ApiModel] = FineTuneJobSpec
    annotation: object = None
    for name in field.split("."):
        model_field = next((item for item in part.model_fields.values() if item.alias == name), None)
        if model_field is None:
            return False
        annotation = model_field.annotation
        models = (
            item for item in _flatten(annotation) if isinstance(item, type) and issubclass(item, ApiModel)
        )
        part = next(models, ApiModel)
    types = set(_flatten(annotation))
    return int in types and float not in types


def _flatten(annotation: object) -> Iterator[object]:
    """The types of an annotation, such as int and NoneType of `Annotated[int, ...] | None`."""
    nested = get_args(annotation)
    if not nested:
        yield annotation
    for item in nested:
        yield from _flatten(item)


def _list_grid(sweep: Sweep) -> Iterator[Values]:
    choices = [_list_choices(parameter) for parameter in sweep.parameters]
    fields = [parameter.field for parameter in sweep.parameters]
    combinations = itertools.product(*choices)
    for combination in itertools.islice(combinations, MAX_TRIALS + 1):
        yield dict(zip(fields, combination, strict=True))


def _list_choices(parameter: SweepParameter) -> list[Any]:
    """The values of a parameter; of a range, those of its steps."""
    if parameter.range is None:
        return list(parameter.values or ())
    count = min(count_steps(parameter.range), MAX_TRIALS + 1)
    return [take_step(parameter, index) for index in range(count)]


def count_steps(interval: SweepRange) -> int:
    """The number of values of a range with a step."""
    step = interval.step or 1.0
    steps = (
        math.log(interval.max / interval.min) / math.log(step)
        if interval.scale == "Log"
        else (interval.max - interval.min) / step
    )
    return math.floor(steps + _STEP_TOLERANCE) + 1


def take_step(parameter: SweepParameter, index: int) -> float:
    """The value of a range after some steps from its minimum."""
    interval = _range_of(parameter)
    step = interval.step or 1.0
    value = interval.min * step**index if interval.scale == "Log" else interval.min + index * step
    return round_value(parameter, value, _GRID_DIGITS)


def _draw_trials(sweep: Sweep) -> Iterator[Values]:
    """Draw the values of each trial from the seed and its number. If no new combination is left, there are fewer trials."""
    texts: set[str] = set()
    for number in range(1, (sweep.trials or 1) + 1):
        for draw in range(_MAX_DRAWS):
            # NB: of a generator with a text as seed, only `random` gives the same numbers in all versions of Python.
            uniform = random.Random(f"{sweep.seed}:{number}:{draw}").random  # noqa: S311 - no secret
            values = {parameter.field: _draw(parameter, uniform()) for parameter in sweep.parameters}
            text = format_values(values)
            if text not in texts:
                texts.add(text)
                yield values
                break


def format_values(values: Values) -> str:
    """The values of a trial as part of a sentence, such as `training.learningRate 0.0002, method.lora.rank 16`."""
    return ", ".join(f"{field} {format_value(value)}" for field, value in values.items())


def _draw(parameter: SweepParameter, share: float) -> Any:
    """The value of a parameter at a share of its choices or of its range.

    Args:
        share: at least 0, and below 1.
    """
    interval = parameter.range
    if interval is None:
        choices = parameter.values or [None]
        return choices[int(share * len(choices))]
    if interval.step is not None:
        return take_step(parameter, int(share * count_steps(interval)))
    if interval.scale == "Log":
        ratio = math.log(interval.max / interval.min)
        return round_value(parameter, interval.min * math.exp(share * ratio))
    if is_whole_number(parameter.field):
        low, high = math.ceil(interval.min), math.floor(interval.max)
        return low + int(share * (high - low + 1))
    return round_value(parameter, interval.min + share * (interval.max - interval.min))


def round_value(parameter: SweepParameter, value: float, digits: int = _SAMPLED_DIGITS) -> float:
    """A value of a range as its field takes it: a whole number, or a number with few digits; never outside of the range."""
    interval = _range_of(parameter)
    if is_whole_number(parameter.field):
        return min(max(round(value), math.ceil(interval.min)), math.floor(interval.max))
    return min(max(float(f"{value:.{digits}g}"), interval.min), interval.max)


def _range_of(parameter: SweepParameter) -> SweepRange:
    if parameter.range is None:
        raise ValueError(f"{parameter.field} has no range")
    return parameter.range
