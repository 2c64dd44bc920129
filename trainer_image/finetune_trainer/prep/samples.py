"""Some of the examples that a step drops, chosen by a hash of their text, in the pass that counts them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sf

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import Column

_CHARACTERS = 600


def drawn(step: str, number: int, text: Column, dropped: Column) -> dict[str, Column]:
    """Return the aggregates that draw `number` examples of a step, by name.

    Args:
        text: the text of an example, of which the beginning is kept.
        dropped: whether the step drops it.
    """
    beginning = sf.substring(text, 1, _CHARACTERS)
    return {
        _name(step, draw): sf.min_by(beginning, sf.when(dropped, sf.xxhash64(text, sf.lit(draw))))
        for draw in range(number)
    }


def found(step: str, number: int, row: Mapping[str, Any]) -> list[str]:
    """Return the examples of a step from the values of `drawn`, each once."""
    values = [row[_name(step, draw)] for draw in range(number)]
    return [*dict.fromkeys(value for value in values if value is not None)]


def _name(step: str, draw: int) -> str:
    return f"{step}_sample{draw}"
