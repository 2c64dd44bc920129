"""What an evaluation pod found: the numbers of the built-in evaluation, or those that a command of your own wrote."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping

from finetune_crds import contract
from finetune_crds.evaluation import (
    BASE,
    MAX_METRIC_NAME,
    MAX_METRICS,
    METRIC_NAME,
    EvaluatedMetric,
    EvaluationResult,
    EvaluationStatus,
)
from finetune_operator.text import short

# Tags that the trainer and the operator write begin with one of these.
_OWN_TAGS = ("finetune_", "promoted_")
# How many numbers a message names.
_NAMED = 8


class WrongNumbersError(ValueError):
    """What a command wrote is no JSON object of numbers; the message says what it is and what is needed."""


def of_built_in(result: EvaluationResult) -> EvaluationStatus:
    """What the built-in evaluation reports, as the status has it."""
    metrics = [
        EvaluatedMetric(name=name, value=value, base=result.base.get(name))
        for name, value in result.metrics.items()
    ]
    return EvaluationStatus(rows=result.rows, digest=result.digest, metrics=metrics)


def of_command(text: str, digest: str) -> EvaluationStatus:
    """What a command of your own wrote, as the status has it.

    Args:
        text: the termination message of its container.
        digest: what the numbers depend on.

    Raises:
        WrongNumbersError: the text is no JSON object of finite numbers, or a name is not allowed.
    """
    metrics = [EvaluatedMetric(name=name, value=value) for name, value in _numbers(text).items()]
    return EvaluationStatus(digest=digest, metrics=metrics)


def _numbers(text: str) -> dict[str, float]:
    if not text.strip():
        raise WrongNumbersError(f"nothing was there: {_NEEDED}")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WrongNumbersError(f"{_shown(text)} is not JSON: {_NEEDED}") from error
    if not isinstance(found, dict) or not found:
        raise WrongNumbersError(f"{_shown(text)} is not an object with numbers: {_NEEDED}")
    if len(found) > MAX_METRICS:
        raise WrongNumbersError(f"there were {len(found)} numbers: write at most {MAX_METRICS}")
    for name, value in found.items():
        _check_name(name)
        _check_value(name, value)
    return {name: float(value) for name, value in found.items()}


_NEEDED = (
    f'write a JSON object of numbers such as {{"accuracy": 0.9}}, of at most {contract.TERMINATION_MAX_BYTES} bytes, to the '
    f"file that the variable {contract.ENV_METRICS_PATH} names"
)


def _check_name(name: str) -> None:
    if len(name) > MAX_METRIC_NAME or not re.fullmatch(METRIC_NAME, name):
        raise WrongNumbersError(
            f"the name {_shown(name)} is not allowed: use at most {MAX_METRIC_NAME} letters, digits and underscores, and no digit "
            "first"
        )
    if name in contract.TRAINING_METRICS or name.startswith(_OWN_TAGS):
        raise WrongNumbersError(
            f"the name {name} is taken by the training or the operator: use another one, such as my_{name}"
        )


def _check_value(name: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(float(str(value))):
        raise WrongNumbersError(f"{name} is {_shown(json.dumps(value))}, which is not a finite number")


def _shown(text: str) -> str:
    return short(repr(text) if text.isprintable() else json.dumps(text))


def tags(found: EvaluationStatus) -> dict[str, str]:
    """The tags of the version; the digest last, so that a version with a digest has its numbers."""
    written = {name: f"{value:.15g}" for name, value in numbers(found).items()}
    return {**written, contract.TAG_EVALUATION_DATA: found.digest}


def numbers(found: EvaluationStatus) -> Mapping[str, float]:
    """The numbers of both models, by the names that they have in MLflow."""
    base = {f"{BASE}{item.name}": item.base for item in found.metrics if item.base is not None}
    return {**{item.name: item.value for item in found.metrics}, **base}


def told(found: EvaluationStatus) -> str:
    """The first numbers, as a part of a sentence."""
    parts = [
        f"{item.name} {item.value:.6g}{f' (base model {item.base:.6g})' if item.base is not None else ''}"
        for item in found.metrics[:_NAMED]
    ]
    more = len(found.metrics) - len(parts)
    return ", ".join(parts) + (f" and {more} more" if more else "")
