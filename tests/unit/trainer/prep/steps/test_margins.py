"""Margins of preferences, from a source to the table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from finetune_trainer.prep.steps import margins
from unit.trainer.prep.recipes import Preparer, table_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Json = dict[str, Any]
MARGINS: dict[str, list[tuple[Any, float | None]]] = {
    "double": [(0.5, 0.5), (-1.0, -1.0), (math.nan, None), (math.inf, None), (-math.inf, None), (None, None)],
    "int": [(3, 3.0), (None, None)],
    "string": [("0.5", 0.5), (" 2 ", 2.0), ("1e1", 10.0), ("much", None), ("NaN", None), ("", None)],
}


@pytest.mark.parametrize(("kind", "values"), MARGINS.items(), ids=MARGINS)
def test_margins_are_finite_numbers_or_nothing(
    spark: SparkSession, kind: str, values: list[tuple[Any, float | None]]
) -> None:
    frame = spark.createDataFrame([(value,) for value, _ in values], f"`how much` {kind}")
    numbers = frame.select(margins.as_number("how much")).collect()
    assert [row[0] for row in numbers] == [number for _, number in values]


def pair(number: int, **changes: Any) -> Json:
    return {
        "ask": f"Where is table {number}?",
        "good": f"In room {number}.",
        "bad": f"Nowhere {number}.",
        "gap": str(number / 4),
        **changes,
    }


def test_margins_go_to_the_table(prepare: Preparer) -> None:
    rows = [pair(number) for number in range(1, 9)]
    dirty = [pair(9, gap="much"), pair(1), pair(2, gap="9")]
    result = prepare(
        rows + dirty,
        columns={
            "type": "Preference", "prompt": "ask", "chosen": "good", "rejected": "bad", "margin": "gap",
        },
        objective={"type": "RewardModel"},
    )  # fmt: skip
    table_rows = table_of(result)
    # The same pair with another margin is another example.
    assert result.dropped == {"notNull": 1, "dedupe": 1}
    assert {(row["chosen"], row["margin"]) for row in table_rows} == {
        *((row["good"], float(row["gap"])) for row in rows),
        ("In room 2.", 9.0),
    }
    assert "chosen_input_ids" in table_rows[0]
