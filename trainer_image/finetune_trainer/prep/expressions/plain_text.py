"""The texts of numbers and of other values that are no text, by the rule of `finetune_trainer.examples.plain_text`, as Spark expressions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as sf
from pyspark.sql.types import DecimalType, DoubleType, FloatType

from finetune_trainer.prep.expressions.template import quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

_WRITTEN = "__finetune_written_"
# NB: a JVM before version 19 does not write the shortest decimal of each float. One of the first two of these numbers of digits is the
# shortest, but for trailing zeros, or else the JVM's own is.
_DIGITS = {DoubleType(): (15, 16), FloatType(): (6, 7, 8)}


def write(value: Column, kind: DataType) -> Column:
    """Return the text of a value of a type."""
    if kind in _DIGITS:
        return _write_float(value, kind)
    text = value.cast("string")
    return _without_exponent_once(text) if isinstance(kind, DecimalType) else text


def written(column: str) -> str:
    """Return the name of the column beside a column of numbers that holds them as the source has written them."""
    return f"{_WRITTEN}{column}"


def is_written(column: str) -> bool:
    """Whether a column is one of those that `written` names."""
    return column.startswith(_WRITTEN)


def with_numbers(frame: DataFrame, columns: Mapping[str, DataType]) -> DataFrame:
    """Make numbers of columns of texts, and keep each text beside its number.

    Args:
        columns: the types of the numbers, by column.
    """
    texts = {name: sf.col(quoted(name)) for name in columns}
    numbers = {name: text.try_cast(columns[name]) for name, text in texts.items()}
    # NB: JSON has no numbers such as NaN, but readers take them.
    kept = {written(name): sf.when(text.rlike("^-?[0-9]"), text) for name, text in texts.items()}
    return frame.withColumns(kept).withColumns(numbers)


def with_texts(frame: DataFrame, columns: Iterable[str]) -> DataFrame:
    """Replace the values of columns by their texts; as they are written, where the source says how."""
    return frame.withColumns({name: text_of(frame, name) for name in columns})


def text_of(frame: DataFrame, name: str) -> Column:
    """Return the texts of the values of a column."""
    text = write(sf.col(quoted(name)), frame.schema[name].dataType)
    return sf.coalesce(sf.col(quoted(written(name))), text) if written(name) in frame.columns else text


def _write_float(value: Column, kind: DataType) -> Column:
    def exact(digits: int) -> Column:
        text = sf.format_string(f"%.{digits - 1}e", value)
        return sf.when(text.cast(kind) == value, text)

    text = sf.coalesce(*map(exact, _DIGITS[kind]), value.cast("string"))
    is_number = ~sf.isnan(value) & (sf.abs(value) != sf.lit(float("inf")))
    return sf.when(is_number, _without_exponent_once(text))


def _without_exponent_once(text: Column) -> Column:
    # NB: a lambda's argument is evaluated once.
    return sf.transform(sf.array(text), _without_exponent)[0]


def _without_exponent(text: Column) -> Column:
    """A decimal without an exponent; one that has an exponent loses the zeros at its end too."""
    sign = sf.regexp_extract(text, "^-?", 0)
    whole = sf.regexp_extract(text, r"^-?(\d+)", 1)
    fraction = sf.regexp_extract(text, r"\.(\d*?)0*(?:[eE]|$)", 1)
    exponent = sf.regexp_extract(text, r"[eE]\+?(-?\d+)$", 1).try_cast("int")
    digits = sf.concat(whole, fraction)
    # Where the point is in the digits; it may be before the first one and behind the last one.
    point = sf.length(whole) + exponent
    padded = sf.concat(
        sf.repeat(sf.lit("0"), sf.greatest(-point + 1, sf.lit(0))),
        digits,
        sf.repeat(sf.lit("0"), sf.greatest(point - sf.length(digits), sf.lit(0))),
    )
    at = sf.greatest(point, sf.lit(1))
    before, after = sf.substring(padded, sf.lit(1), at), sf.substring(padded, at + 1, sf.length(padded))
    plain = sf.concat(sign, before, sf.when(after == "", sf.lit("")).otherwise(sf.concat(sf.lit("."), after)))
    return sf.when(text.rlike("[eE]"), plain).otherwise(text)
