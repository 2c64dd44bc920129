"""What a preparation counts of its table: by Spark, and as the quick preparations of tests count it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import pytest

from finetune_trainer.prep import totals
from finetune_trainer.prep.report import lengths
from finetune_trainer.prep.totals import Totals
from unit.trainer.prep.recipes import CollectedRows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Counting(Protocol):
    """Counts the rows of a table."""

    def __call__(self, prepared: DataFrame, *, is_mix: bool) -> Totals: ...


ROWS = [
    ("train", 1, "chat"),
    ("train", 4, "chat"),
    ("train", 7, "code"),
    ("validation", 8, "code"),
    ("validation", 2**30, "chat"),
]
BINS = {0: 1, 2: 2, 3: 1, len(lengths.EDGES) - 1: 1}
TOTALS = Totals(
    rows={"train": 3, "validation": 2},
    tokens={"train": 12, "validation": 8 + 2**30},
    lengths=[BINS.get(number, 0) for number in range(len(lengths.EDGES))],
    sources={"chat": 3, "code": 2},
)
COUNTS: dict[str, Counting] = {
    "with Spark": totals.count_rows,
    "in quick preparations": CollectedRows().count,
}


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
def test_rows_and_tokens_of_each_split_and_source(spark: SparkSession, count: Counting) -> None:
    frame = spark.createDataFrame(ROWS, "split string, tokens int, source string").repartition(2)
    assert count(frame, is_mix=True) == TOTALS


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
def test_without_a_mix_no_source_is_counted(spark: SparkSession, count: Counting) -> None:
    frame = spark.createDataFrame([("test", 3)], "split string, tokens int")
    assert count(frame, is_mix=False) == Totals(
        {"test": 1}, {"test": 3}, [0, 1, *[0] * (len(lengths.EDGES) - 2)], {}
    )
