"""Splits: by the hash of a group, and with the same share of each stratum."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from finetune_crds.prepare import SplitRatios
from finetune_trainer.prep.steps import split

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Group and stratum of 10,000 examples: five strata, from half of the examples down to one in a hundred.
RATIOS = {"train": 0.9, "validation": 0.05, "test": 0.05}
SHARES = {"en": 0.5, "de": 0.3, "fr": 0.15, "it": 0.04, "": 0.01}
MANY = [
    (f"text {name} {number}", name)
    for name, share in SHARES.items()
    for number in range(round(10_000 * share))
]


def splits_of(
    spark: SparkSession, rows: list[tuple[str, str]], partitions: int = 4, **ratios: Any
) -> dict[tuple[str, str], str]:
    """The split of each group and stratum."""
    groups, strata = (pa.array(values) for values in zip(*rows, strict=True))
    # NB: from Arrow, since Spark checks each value of a list.
    frame = spark.createDataFrame(pa.table({"group": groups, "stratum": strata})).repartition(partitions)
    frame = frame.selectExpr("*", "stratum AS own")
    frame_with_split = split.with_split(
        frame, SplitRatios.model_validate({"stratifyBy": "language", **ratios})
    )
    assert frame_with_split.columns == ["group", "stratum", "own", "split"]
    return {(row["group"], row["own"]): row["split"] for row in frame_with_split.collect()}


def test_strata_have_their_shares_in_each_split_on_any_partitions(spark: SparkSession) -> None:
    splits = splits_of(spark, MANY)
    same = {partitions: splits_of(spark, MANY[::-1], partitions) == splits for partitions in (1, 16)}
    assert same == {1: True, 16: True}
    sizes, strata = Counter(splits.values()), Counter((name, key[1]) for key, name in splits.items())
    wrong = {
        (name, stratum): strata[name, stratum] / sizes[name]
        for name in sizes
        for stratum, share in SHARES.items()
        if abs(strata[name, stratum] / sizes[name] - share) > 0.01
    }
    assert wrong == {}
    # A stratum is rounded up or down once in each split.
    assert {name: abs(sizes[name] - 10_000 * share) <= len(SHARES) for name, share in RATIOS.items()} == {
        "train": True,
        "validation": True,
        "test": True,
    }


def test_small_strata_do_not_all_end_in_one_split(spark: SparkSession) -> None:
    pairs = [(f"{stratum} {number}", f"stratum {stratum}") for stratum in range(500) for number in range(2)]
    sizes = Counter(splits_of(spark, pairs, train=0.6, validation=0.2, test=0.2).values())
    # Four standard deviations of 500 draws that decide on two examples each.
    assert {
        name: abs(sizes[name] - 1000 * share) < 90 for name, share in {"train": 0.6, "test": 0.2}.items()
    } == {
        "train": True,
        "test": True,
    }


def test_a_group_stays_in_one_split_also_with_several_strata(spark: SparkSession) -> None:
    rows = [(f"thread {number % 300}", ("en", "de", "fr")[number % 7 % 3]) for number in range(3000)]
    # Of another stratum are some groups only, which stand elsewhere among these.
    rows += [(f"thread {number}", "it") for number in range(0, 300, 3)]
    splits: dict[str, set[str]] = {}
    for (group, _), name in splits_of(spark, rows, train=0.4, validation=0.3, test=0.3).items():
        splits.setdefault(group, set()).add(name)
    assert {len(names) for names in splits.values()} == {1}
    assert set.union(*splits.values()) == {"train", "validation", "test"}


def test_another_seed_splits_otherwise(spark: SparkSession) -> None:
    assert splits_of(spark, MANY[:200], seed=1) != splits_of(spark, MANY[:200], seed=2)
