"""Bins of lengths, counted in the two ways that the preparation counts them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from finetune_trainer.prep.report import lengths

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LENGTHS = [0, 1, 2, 3, 4, 7, 8, 1023, 1024, 2**21 - 1, 2**21, 2**25]
BINS = [0, 0, 1, 1, 2, 2, 3, 9, 10, 20, 21, 21]


def test_a_length_is_in_the_bin_that_begins_at_or_below_it(spark: SparkSession) -> None:
    frame = spark.createDataFrame([(length,) for length in LENGTHS], "length int")
    row = (
        frame.select(sf.col("length"), lengths.index(sf.col("length")).alias("bin"))
        .orderBy("length")
        .collect()
    )
    assert [cell["bin"] for cell in row] == BINS
    counted = frame.agg(
        *(count.alias(name) for name, count in lengths.bins(sf.col("length")).items())
    ).first()
    assert counted is not None
    assert lengths.counts(counted.asDict()) == [Counter(BINS)[number] for number in range(len(lengths.EDGES))]
