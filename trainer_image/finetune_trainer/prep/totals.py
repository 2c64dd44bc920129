"""Counts the rows and the tokens of a table before it is written."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from finetune_trainer.prep.report import lengths
from finetune_trainer.prep.steps import steps

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class Totals:
    """The totals of a table.

    rows, tokens: rows and tokens of each split, by split.
    lengths: rows in each bin of `report.lengths`.
    sources: rows of each source of a mix, by source; empty without a mix.
    """

    rows: dict[str, int]
    tokens: dict[str, int]
    lengths: list[int]
    sources: dict[str, int]


def count_rows(prepared: DataFrame, *, is_mix: bool) -> Totals:
    """Count the rows of a table; for a mix, also the rows of each source."""
    source = [sf.col(steps.SOURCE)] if is_mix else []
    length_bin = lengths.index(sf.col(steps.TOKENS)).alias("bin")
    groups = prepared.groupBy(steps.SPLIT, length_bin, *source).agg(
        sf.count(sf.lit(1)).alias("rows"), sf.sum(steps.TOKENS).alias("tokens")
    )
    rows: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    bins = [0] * len(lengths.EDGES)
    for group in groups.collect():
        rows[group[steps.SPLIT]] += group["rows"]
        tokens[group[steps.SPLIT]] += group["tokens"]
        bins[group["bin"]] += group["rows"]
        if is_mix:
            sources[group[steps.SOURCE]] += group["rows"]
    return Totals(dict(rows), dict(tokens), bins, dict(sources))
