"""Whatever happens to a promotion, in whatever order: a fixed few sequences of the thousands of `make test-long`."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, example, given, settings

from worlds.memory.promotion_sequences import SEQUENCES, SPECS, Json, check


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(SPECS, SEQUENCES)
@example(
    {"rollbackTo": "4", "onDrift": "Repair"},
    [("look",), ("register", 3.0, "d1"), ("seize", "4"), ("look",), ("seize", "1"), ("settle",)],
)
def test_the_alias_is_always_right(spec: Json, steps: list[tuple[Any, ...]]) -> None:
    check(spec, steps)
