"""Assigns each example to a split: by a seeded hash of its group, or by the position of its group in the stratum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as sf

from finetune_trainer.prep.steps.steps import GROUP, SPLIT, STRATUM, hash_column

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from finetune_crds.prepare import SplitRatios

_BUCKETS = 10_000
_RANK = "rank"


def with_split(frame: DataFrame, ratios: SplitRatios) -> DataFrame:
    """Add the column `split`. Examples of one group are in one split."""
    if ratios.stratify_by is None:
        return frame.withColumn(SPLIT, _split_name(_bucket(ratios.seed, "split", GROUP), ratios))
    return _stratify(frame, ratios)


def _stratify(frame: DataFrame, ratios: SplitRatios) -> DataFrame:
    """Give each split its share of every stratum, in the order of the groups' hashes.

    A group whose examples have several strata belongs to the stratum that sorts first. The n groups of a stratum have the positions
    (0 + offset) / n, (1 + offset) / n, ..., and the ratios divide the positions from 0 to 1 among the splits. The offset is a hash of
    the stratum: without it, the few groups of small strata would all be in the same split.
    """
    # NB: all examples of a stratum are sorted in one task, on disk if they do not fit into memory.
    frame = frame.withColumn(STRATUM, sf.min(STRATUM).over(Window.partitionBy(GROUP)))
    stratum = Window.partitionBy(STRATUM)
    rank = sf.dense_rank().over(stratum.orderBy(hash_column(ratios.seed, "split", GROUP), GROUP))
    frame = frame.withColumn(_RANK, rank)
    offset = _bucket(ratios.seed, "stratum", STRATUM) / _BUCKETS
    position = (sf.col(_RANK) - 1 + offset) / sf.max(_RANK).over(stratum)
    return frame.withColumn(SPLIT, _split_name(position * _BUCKETS, ratios)).drop(_RANK)


def _bucket(seed: int, purpose: str, column: str) -> Column:
    return sf.pmod(hash_column(seed, purpose, column), sf.lit(_BUCKETS))


def _split_name(bucket: Column, ratios: SplitRatios) -> Column:
    train, validation = (
        round(share * _BUCKETS) for share in (ratios.train, ratios.train + ratios.validation)
    )
    return sf.when(bucket < train, "train").when(bucket < validation, "validation").otherwise("test")
