"""Whatever happens to a promotion, in whatever order: a fixed few sequences of the thousands of `make test-long`."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, example, given, settings

from fixtures.operator_in_memory.promotion_sequences import (
    EVEN_MINUTES,
    LOOSE,
    ON_REGRESSION,
    SEQUENCES,
    SPECS,
    STRICT,
    Json,
    check,
)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(SPECS, SEQUENCES)
@example(
    {"soakSeconds": 60},
    [
        (("wait", 1), 4),
        (("wait", 30), 0),
        (("stage", "2"), 0),
        (("stage", "1"), 0),
        (("wait", 30), 4),
    ],
)
@example(
    {"rollbackTo": {"type": "Version", "version": "7"}, "onDrift": "Repair"},
    [
        (("wait", 1), 1),
        (("register", 3.0, "d1"), 0),
        (("seize", "7"), 1),
        (("seize", "1"), 0),
        (("settle",), 0),
    ],
)
@example(
    {"gates": LOOSE, "soakSeconds": 60},
    [
        (("stage", "4"), 3),
        (("wait", 30), 1),
        (("edit", {"gates": STRICT}), 2),
        (("edit", {"gates": LOOSE}), 2),
        (("wait", 30), 4),
    ],
)
@example(
    {},
    [
        (("stage", "1"), 4),
        (("stage", "2"), 4),
        (("edit", {"rollbackTo": {"type": "Previous"}}), 4),
        (("settle",), 0),
        (("edit", {"rollbackTo": {"type": "Version", "version": "3"}}), 4),
        (("stage", "4"), 4),
        (("settle",), 0),
    ],
)
@example(
    {"onDrift": "Repair"},
    [
        (("settle",), 0),
        (("require", 2), 0),
        (("edit", {"rollbackTo": {"type": "Version", "version": "2"}}), 4),
        (("seize", "2"), 4),
        (("approve", "ana"), 2),
        (("edit", {"rollbackTo": None}), 4),
    ],
)
@example({"gates": STRICT}, [(("stage", "6"), 4), (("settle",), 0)])
@example({"gates": LOOSE}, [(("stage", "6"), 4), (("settle",), 0)])
@example(
    {"gates": None},
    [
        (("register", 2.0, None), 0),
        (("stage", "7"), 4),
        (("edit", {"gates": STRICT}), 2),
        (("stage", "2"), 4),
        (("settle",), 0),
    ],
)
@example(
    {"gates": STRICT},
    [
        (("stage", "1"), 4),
        (("register", 2.0, None), 0),
        (("stage", "7"), 4),
        (("settle",), 0),
    ],
)
@example(
    {"gates": STRICT},
    [
        (("settle",), 0),
        (("edit", {"onDrift": "Adopt"}), 0),
        (("unset",), 0),
        (("settle",), 0),
        (("stage", "2"), 1),
        (("stage", "1"), 0),
    ],
)
# A version waits for a window, which opens in the next minute.
@example(
    {"gates": None},
    [
        (("settle",), 0),
        (("edit", {"windows": EVEN_MINUTES}), 0),
        (("wait", 30), 0),
        (("wait", 30), 1),
        (("stage", "2"), 4),
        (("wait", 30), 4),
        (("wait", 30), 4),
    ],
)
# A version regresses, and is staged again after another one.
@example(
    {"gates": None},
    [
        (("settle",), 0),
        (("edit", {"onRegression": ON_REGRESSION}), 0),
        (("stage", "2"), 4),
        (("measure", 1.0), 4),
        (("wait", 1), 4),
        (("measure", 0.0), 0),
        (("stage", "4"), 4),
        (("stage", "2"), 4),
        (("settle",), 0),
    ],
)
def test_the_alias_is_always_right(spec: Json, steps: list[tuple[tuple[Any, ...], int]]) -> None:
    check(spec, steps)
