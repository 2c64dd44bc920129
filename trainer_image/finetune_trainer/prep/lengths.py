"""Lengths of examples in tokens, counted in bins whose edges grow by the square root of two."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sf

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import Column

EDGES = (0, *(math.ceil(2 ** (half / 2)) for half in range(2, 43)))
"""Bin i counts lengths from EDGES[i] to EDGES[i + 1], without that; the last bin has no end."""


def bins(length: Column) -> dict[str, Column]:
    """Return the aggregates that count the lengths of each bin, by name."""
    ends = [*EDGES[1:], None]
    inside = [
        (length >= begin) & (length < end) if end is not None else length >= begin
        for begin, end in zip(EDGES, ends, strict=True)
    ]
    return {_name(index): sf.count_if(found) for index, found in enumerate(inside)}


def counts(row: Mapping[str, Any]) -> list[int]:
    """Return the count of each bin from the values of `bins`."""
    return [int(row[_name(index)] or 0) for index in range(len(EDGES))]


def together(several: Sequence[Sequence[int]]) -> list[int]:
    """Return the sums of counts, bin by bin."""
    return [sum(found[index] for found in several) for index in range(len(EDGES))]


def _name(index: int) -> str:
    return f"bin{index}"
