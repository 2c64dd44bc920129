"""Thousands of random sequences of events around a promotion, other ones in each run; CI runs a fixed few of them."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings

from worlds.memory import promotion_sequences, serving_sequences

Json = dict[str, Any]


@settings(max_examples=3000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(promotion_sequences.SPECS, promotion_sequences.SEQUENCES)
def test_the_alias_is_always_right(spec: Json, steps: list[tuple[tuple[Any, ...], int]]) -> None:
    promotion_sequences.check(spec, steps)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(serving_sequences.EDITS["onDrift"], serving_sequences.SEQUENCES)
def test_alias_and_endpoint_are_always_right(on_drift: str, steps: list[tuple[Any, ...]]) -> None:
    serving_sequences.check(on_drift, steps)
