"""Lengths of examples in tokens, counted in bins whose edges are powers of two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sf

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import Column

EDGES = (0, *(2**power for power in range(1, 22)))
"""Bin i counts lengths from EDGES[i] up to, but not including, EDGES[i + 1]; the last bin has no upper limit."""


def bins(length: Column) -> dict[str, Column]:
    """Return the aggregates that count the lengths of each bin, by name."""
    ends = [*EDGES[1:], None]
    conditions = [
        (length >= begin) & (length < end) if end is not None else length >= begin
        for begin, end in zip(EDGES, ends, strict=True)
    ]
    return {_name(number): sf.count_if(is_inside) for number, is_inside in enumerate(conditions)}


def counts(row: Mapping[str, Any]) -> list[int]:
    """Return the count of each bin from the values of `bins`."""
    return [int(row[_name(number)] or 0) for number in range(len(EDGES))]


def index(length: Column) -> Column:
    """Return the number of the bin of a length: one less than the length has binary digits, but at most that of the last bin.

    For example, 2 for the lengths 4 to 7, which have three binary digits.
    """
    return sf.least(sf.length(sf.bin(length)) - 1, sf.lit(len(EDGES) - 1))


def _name(number: int) -> str:
    return f"bin{number}"
