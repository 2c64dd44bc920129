"""The text that is learned of values that are no text."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from finetune_trainer.examples import plain_text
from finetune_trainer.examples.plain_text import WrittenFloat

TEXTS: dict[str, tuple[Any, str | None]] = {
    "no value": (None, None),
    "a text": ("1.50", "1.50"),
    "a boolean": (True, "true"),
    "an integer": (12_500_000, "12500000"),
    "a whole float": (18.0, "18"),
    "a large float": (12_500_000.0, "12500000"),
    "a float that Python writes with an exponent": (1e22, "10000000000000000000000"),
    "a small float": (0.00005, "0.00005"),
    "a float of 32 bits": (np.float32(0.1), "0.1"),
    "no number": (float("nan"), None),
    "a number of JSON": (WrittenFloat("1.50"), "1.50"),
    "a number of JSON with an exponent": (WrittenFloat("5E-4"), "5E-4"),
    "a decimal": (Decimal("1E+3"), "1000"),
    "a date": (date(2026, 11, 25), "2026-11-25"),
    "a time": (datetime(2026, 11, 25, 21, 4, 5, 500_000, tzinfo=UTC), "2026-11-25 21:04:05.5"),
    "a time elsewhere": (
        datetime(2026, 11, 25, 22, 4, 5, tzinfo=timezone(timedelta(hours=1))),
        "2026-11-25 21:04:05",
    ),
}


@pytest.mark.parametrize(("value", "expected"), TEXTS.values(), ids=TEXTS)
def test_what_is_written(value: Any, expected: str | None) -> None:
    assert plain_text.is_plain(value) or isinstance(value, np.floating)
    assert plain_text.write(value) == expected


# Integers of a type in lists and structures, and what is learned of them.
NESTED: dict[str, tuple[pa.DataType, list[int], list[Any]]] = {
    "nanoseconds": (
        pa.timestamp("ns"),
        [1_500_000_001, -1_999],
        ["1970-01-01 00:00:01.5", "1969-12-31 23:59:59.999999"],
    ),
    "nanoseconds elsewhere": (pa.timestamp("ns", "Asia/Tokyo"), [1_500_000_001], ["1970-01-01 00:00:01.5"]),
    "microseconds": (pa.timestamp("us"), [1_500_000], ["1970-01-01 00:00:01.5"]),
    **{
        f"durations in {unit}": (pa.duration(unit), [1_500_000_001, -1], [1_500_000_001, -1])
        for unit in ("s", "ms", "us", "ns")
    },
}


@pytest.mark.parametrize(("kind", "stored", "expected"), NESTED.values(), ids=NESTED)
def test_times_and_durations_in_lists_and_structures(
    kind: pa.DataType, stored: list[int], expected: list[Any]
) -> None:
    """They are the same at any depth, and the texts of a column of the type are the same too."""
    values = pa.array([*stored, None], kind)
    lists = pa.ListArray.from_arrays([0, len(values)], values)
    structures = pa.StructArray.from_arrays([values, lists.take([0] * len(values))], ["each", "all"])
    assert plain_text.list_structures(structures) == [
        {"each": value, "all": [*expected, None]} for value in [*expected, None]
    ]
    assert plain_text.write_column(values) == [*map(str, expected), None]
