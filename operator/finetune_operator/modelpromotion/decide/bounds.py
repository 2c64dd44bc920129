"""Numbers and their bounds, and how messages show both."""

from __future__ import annotations

import math

# Relative to the numbers that are compared.
_MAX_ROUNDING_ERROR = 1e-9


def is_within(value: float, low: float | None, high: float | None) -> bool:
    """Whether a number is between two bounds; None for no bound."""
    return (low is None or _at_most(low, value)) and (high is None or _at_most(value, high))


def _at_most(low: float, high: float) -> bool:
    # NB: in floating point 0.3 - 0.1 is less than 0.2, but 0.2 must count as better than 0.3 by 0.1.
    return low <= high or math.isclose(low, high, rel_tol=_MAX_ROUNDING_ERROR)


def describe_bounds(low: float | None, high: float | None) -> str:
    """Two bounds as text, for example >= 0.1 and <= 2.5; None for no bound."""
    bounds = [f">= {format_number(low)}"] if low is not None else []
    bounds += [f"<= {format_number(high)}"] if high is not None else []
    return " and ".join(bounds)


def format_number(value: float | None) -> str:
    """A number in the format of messages and the status; empty for None."""
    return f"{value:.6g}" if value is not None else ""
