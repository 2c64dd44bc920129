"""The metrics of an evaluation pod, from the built-in evaluation or from a custom command."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping

from finetune_crds import contract
from finetune_crds.evaluation import (
    BASE_PREFIX,
    MAX_METRIC_NAME,
    MAX_METRICS,
    METRIC_NAME,
    EvaluatedMetric,
    EvaluationResult,
    EvaluationStatus,
)
from finetune_operator.text import shorten

# Tags of the trainer and the operator begin with one of these. Metrics become tags too, so no name of a metric may begin with one.
_RESERVED_PREFIXES = ("finetune_", "promoted_")
# Metrics beyond this number are only counted in the message.
_MAX_METRICS_IN_MESSAGE = 8
_FORMAT_HINT = (
    f'write a JSON object of numbers, for example {{"accuracy": 0.9}}, of at most {contract.TERMINATION_MAX_BYTES} bytes, to the '
    f"file that the variable {contract.ENV_METRICS_PATH} names"
)


class InvalidMetricsError(ValueError):
    """An evaluation pod reported no metrics, or invalid metrics; the message says what to correct."""


def from_built_in(result: EvaluationResult) -> EvaluationStatus:
    """Convert the result of the built-in evaluation to its form in the status."""
    metrics = [
        EvaluatedMetric(name=name, value=value, base=result.base.get(name))
        for name, value in result.metrics.items()
    ]
    return EvaluationStatus(rows=result.rows, digest=result.digest, metrics=metrics)


def from_command(text: str, digest: str) -> EvaluationStatus:
    """Convert the output of a custom command to its form in the status.

    Args:
        text: the termination message of its container.
        digest: a hash of what the metrics depend on.

    Raises:
        InvalidMetricsError: the text is not a JSON object of finite numbers, or a name is not allowed.
    """
    metrics = [EvaluatedMetric(name=name, value=value) for name, value in _parse_metrics(text).items()]
    return EvaluationStatus(digest=digest, metrics=metrics)


def _parse_metrics(text: str) -> dict[str, float]:
    """The metrics in the output of a custom command, by name."""
    if not text.strip():
        raise InvalidMetricsError(f"the file is empty; {_FORMAT_HINT}")
    try:
        metrics = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidMetricsError(f"{_quote(text)} is not JSON; {_FORMAT_HINT}") from error
    if not isinstance(metrics, dict) or not metrics:
        raise InvalidMetricsError(f"{_quote(text)} is not an object with numbers; {_FORMAT_HINT}")
    if len(metrics) > MAX_METRICS:
        raise InvalidMetricsError(f"the file has {len(metrics)} metrics: write at most {MAX_METRICS}")
    for name, value in metrics.items():
        _check_name(name)
        _check_value(name, value)
    return {name: float(value) for name, value in metrics.items()}


def _check_name(name: str) -> None:
    if len(name) > MAX_METRIC_NAME or not re.fullmatch(METRIC_NAME, name):
        raise InvalidMetricsError(
            f"the name {_quote(name)} is not allowed: use at most {MAX_METRIC_NAME} letters, digits and underscores, and do not "
            "start with a digit"
        )
    if name in contract.TRAINING_METRICS or name.startswith(_RESERVED_PREFIXES):
        raise InvalidMetricsError(
            f"the name {name} is reserved for the trainer or the operator: use another name, for example my_{name}"
        )


def _check_value(name: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # NB: float() raises an error for a huge int, but returns infinity for its text.
    if not is_number or not math.isfinite(float(str(value))):
        raise InvalidMetricsError(f"{name} is {_quote(json.dumps(value))}, which is not a finite number")


def _quote(text: str) -> str:
    return shorten(repr(text) if text.isprintable() else json.dumps(text))


def version_tags(evaluation: EvaluationStatus) -> dict[str, str]:
    """The tags of the version, in the order in which they are set: a version with the digest, the last tag, has all its metrics."""
    metrics = {name: f"{value:.15g}" for name, value in mlflow_metrics(evaluation).items()}
    return {**metrics, contract.TAG_EVALUATION_DATA: evaluation.digest}


def mlflow_metrics(evaluation: EvaluationStatus) -> Mapping[str, float]:
    """The metrics of the evaluated and of the base model, by their names in MLflow."""
    base = {f"{BASE_PREFIX}{item.name}": item.base for item in evaluation.metrics if item.base is not None}
    return {**{item.name: item.value for item in evaluation.metrics}, **base}


def summarize(evaluation: EvaluationStatus) -> str:
    """The first metrics, as a part of a sentence."""
    parts = [
        f"{item.name} {item.value:.6g}{f' (base model {item.base:.6g})' if item.base is not None else ''}"
        for item in evaluation.metrics[:_MAX_METRICS_IN_MESSAGE]
    ]
    more = len(evaluation.metrics) - len(parts)
    return ", ".join(parts) + (f" and {more} more" if more else "")
