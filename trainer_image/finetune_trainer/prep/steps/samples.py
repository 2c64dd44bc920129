"""Samples the examples that a step drops, by a hash of their text, in the pass that counts them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sf

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyspark.sql import Column, DataFrame

CHARACTERS = 600
"""The characters of an example that a sample shows."""


def sample_aggregates(step: str, number: int, text: Column, dropped: Column) -> dict[str, Column]:
    """Return the aggregates that draw `number` examples of a step, by name.

    Each draw is the dropped example with the least hash; the draws have different seeds, but may draw the same example.

    Args:
        text: the text of an example; its beginning is kept.
        dropped: whether the step drops it.
    """
    # NB: without this condition, the aggregates would compute the text of every row, not only of dropped rows.
    beginning = sf.when(dropped, sf.substring(text, 1, CHARACTERS))
    return {
        _name(step, draw): sf.min_by(beginning, sf.when(dropped, sf.xxhash64(text, sf.lit(draw))))
        for draw in range(number)
    }


def read_samples(step: str, number: int, row: Mapping[str, Any]) -> list[str]:
    """Return the examples of a step from the values of `sample_aggregates`, each once."""
    values = [row[_name(step, draw)] for draw in range(number)]
    return [*dict.fromkeys(value for value in values if value is not None)]


def beginnings(
    frame: DataFrame, text: str, ids: Iterable[str], characters: int = CHARACTERS
) -> dict[str, str]:
    """Return the beginnings of the texts of examples, by id, in ascending order of the ids.

    Args:
        frame: examples with the column `id`.
        text: the column with their texts.
    """
    chosen_ids = [*ids]
    if not chosen_ids:
        return {}
    shown = frame.where(sf.col("id").isin(chosen_ids)).select(
        "id", sf.substring(text, 1, characters).alias("text")
    )
    return dict(sorted((row["id"], row["text"]) for row in shown.collect()))


def _name(step: str, draw: int) -> str:
    return f"{step}_sample{draw}"
