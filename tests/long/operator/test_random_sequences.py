"""Thousands of random sequences of events, other ones in each run; the unit tests run a fixed few of them."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings

from fixtures.operator_in_memory import finetunejob_sequences, promotion_sequences, serving_sequences
from long.amounts import SEQUENCES

Json = dict[str, Any]
RANDOM = settings(
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example],
)


@settings(RANDOM, max_examples=SEQUENCES)
@given(finetunejob_sequences.JOBS, finetunejob_sequences.STORIES)
def test_a_job_comes_to_its_end_whatever_happened(parts: Json, story: finetunejob_sequences.Story) -> None:
    world = finetunejob_sequences.told(parts, story)
    finetunejob_sequences.check_it_comes_to_its_end(world)


@settings(RANDOM, max_examples=SEQUENCES)
@given(promotion_sequences.SPECS, promotion_sequences.SEQUENCES)
def test_the_alias_is_always_right(spec: Json, steps: list[tuple[tuple[Any, ...], int]]) -> None:
    promotion_sequences.check(spec, steps)


@settings(RANDOM, max_examples=SEQUENCES // 10)
@given(serving_sequences.EDITS["onDrift"], serving_sequences.ALIAS_MOVES, serving_sequences.SEQUENCES)
def test_alias_and_endpoint_are_always_right(
    on_drift: str, alias_moves: str, steps: list[tuple[Any, ...]]
) -> None:
    serving_sequences.check(on_drift, alias_moves, steps)
