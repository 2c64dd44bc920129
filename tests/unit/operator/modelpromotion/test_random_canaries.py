"""Whatever happens to a promotion with an endpoint: a fixed few sequences of the hundreds of `make test-long`."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, example, given, settings

from fixtures.operator_in_memory.serving_sequences import ALIAS_MOVES, BAD, EDITS, SEQUENCES, check


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(EDITS["onDrift"], ALIAS_MOVES, SEQUENCES)
@example("Warn", "BeforeCanary", [("seize", "3"), ("judge", "2", BAD)])
@example("Repair", "BeforeCanary", [("stage", "3"), ("wait", 1), ("judge", "2", BAD), ("judge", "3", BAD)])
@example("Warn", "AfterCanary", [("seize", "3"), ("judge", "2", BAD)])
def test_alias_and_endpoint_are_always_right(
    on_drift: str, alias_moves: str, steps: list[tuple[Any, ...]]
) -> None:
    check(on_drift, alias_moves, steps)
