"""Spark expressions that write numbers and other values as text, by the rule of `finetune_trainer.examples.plain_text`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as sf
from pyspark.sql.types import (
    ArrayType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    MapType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from finetune_trainer.prep.expressions.template import quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

_NUMBERS = (FloatType, DoubleType, DecimalType)
_TIMES = (DateType, TimestampType, TimestampNTZType)
# The beginning of a marked string, after its NUL.
_MARK = "finetune number "
# A JSON string, as a regular expression of Java. Possessive repetition keeps long texts from overflowing the stack.
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
# The beginning of a number with a point or an exponent; a string may have one, too.
_HAS_FRACTION = r"[:\[,]\s*-?[0-9]+[.eE]"
# Group 1: the text before the next number, outside strings, that has a point or an exponent. Group 2: that number.
_FRACTION = rf'\G((?:[^"0-9-]++|{_STRING}|-(?![0-9])|-?[0-9]++(?![.eE]))*+)(-?[0-9]++[.eE][0-9.eE+-]*+)'
# A string that `mark_numbers` or `_mark` made. Its NUL is an escape in JSON text, and a character in a string parsed from JSON.
# Group 1: the number.
_MARKED = rf'(?:"\\u0000|\x00){_MARK}([-+0-9.eE]+)"?'
# Group 1: the text before the next key with the value null. After the group: that key, its value and a comma.
_NULL = rf'\G((?:[^"]++|{_STRING}(?!\s*+:\s*+null\b))*+){_STRING}\s*+:\s*+null\s*+,?'
# Group 1: the text before the next trailing comma of an object. After the group: that comma. If `_NULL` removes the last key of an
# object, the comma before the key remains.
_LAST_COMMA = rf'\G((?:[^",]++|{_STRING}|,(?!\s*+\}}))*+),(?=\s*+\}})'
# The prefix of extra columns, see `written`.
_WRITTEN = "__finetune_written_"
# NB: a JVM before version 19 does not write the shortest decimal of each float. Of the decimals with these numbers of digits, the first
# that reads back as the same float is the shortest, apart from trailing zeros. If none does, the JVM's own decimal is the shortest.
_DIGITS = {DoubleType(): (15, 16), FloatType(): (6, 7, 8)}


def write(value: Column, kind: DataType) -> Column:
    """Return a value of a type as text."""
    if kind in _DIGITS:
        return _write_float(value, kind)
    text = value.cast("string")
    return evaluate_once(text, _without_exponent) if isinstance(kind, DecimalType) else text


def evaluate_once(value: Column, use: Callable[[Column], Column]) -> Column:
    """Return `use(value)`, which may use the value several times. NB: the argument of a lambda is evaluated once."""
    return sf.transform(sf.array(value), use)[0]


def write_json(value: Column, kind: DataType) -> Column:
    """Return the JSON text of a list or a structure, without keys whose value is null; numbers, dates and times are written as by `write`."""
    if not _differs_in_json(kind):
        return sf.to_json(value)
    return unmark_numbers(sf.to_json(_mark(value, kind)))


def has_fractions(text: Column) -> Column:
    """Whether JSON text may have numbers with a point or an exponent."""
    return text.rlike(_HAS_FRACTION)


def mark_numbers(text: Column) -> Column:
    r"""Turn numbers with a point or an exponent in JSON text into marked strings, for `unmark_numbers`.

    For example, `{"price": 1.50}` becomes `{"price": "\u0000finetune number 1.50"}`.

    NB: when Spark parses JSON, it does not keep how a number is written.
    """
    return sf.regexp_replace(text, _FRACTION, rf'$1"\\u0000{_MARK}$2"')


def unmark_numbers(text: Column) -> Column:
    """Turn marked strings back into numbers as they were written, in JSON text or in one of its strings."""
    return sf.regexp_replace(text, _MARKED, "$1")


def without_nulls(text: Column) -> Column:
    """Return the JSON text of lists and objects without keys whose value is null."""
    without_members = sf.regexp_replace(sf.regexp_replace(text, _NULL, "$1"), _LAST_COMMA, "$1")
    return sf.when(text.contains("null"), without_members).otherwise(text)


def _differs_in_json(kind: DataType) -> bool:
    """Whether a type has values that Spark's own JSON would show differently than `write`."""
    match kind:
        case StructType():
            return any(_differs_in_json(field.dataType) for field in kind)
        case ArrayType():
            return _differs_in_json(kind.elementType)
        case MapType():
            return _differs_in_json(kind.valueType)
        case _:
            return isinstance(kind, _NUMBERS + _TIMES)


def _mark(value: Column, kind: DataType) -> Column:
    """Return a value with marked strings in place of its floats and decimals, and texts in place of its dates and times."""
    match kind:
        case StructType():
            fields = (_mark(value[field.name], field.dataType).alias(field.name) for field in kind)
            marked = sf.when(value.isNotNull(), sf.struct(*fields))
        case ArrayType():
            marked = sf.transform(value, lambda item: _mark(item, kind.elementType))
        case MapType():
            marked = sf.transform_values(value, lambda _, item: _mark(item, kind.valueType))
        case FloatType() | DoubleType() | DecimalType():
            marked = sf.concat(sf.lit(f"\0{_MARK}"), write(value, kind))
        case _:
            marked = write(value, kind) if isinstance(kind, _TIMES) else value
    return marked


def written(column: str) -> str:
    """Return the name of the extra column that holds the numbers or lists of a column as the source wrote them."""
    return f"{_WRITTEN}{column}"


def is_written(column: str) -> bool:
    """Whether the name of a column comes from `written`."""
    return column.startswith(_WRITTEN)


def with_numbers(frame: DataFrame, columns: Mapping[str, DataType]) -> DataFrame:
    """Convert columns of texts to numbers, and keep the texts in the columns that `written` names.

    Args:
        columns: the type of the numbers of each column.
    """
    texts = {name: sf.col(quoted(name)) for name in columns}
    numbers = {name: text.try_cast(columns[name]) for name, text in texts.items()}
    # NB: readers accept NaN, which JSON does not have: its text does not begin like a number, and is not kept.
    number_columns = {written(name): sf.when(text.rlike("^-?[0-9]"), text) for name, text in texts.items()}
    return frame.withColumns(number_columns).withColumns(numbers)


def with_texts(frame: DataFrame, columns: Iterable[str]) -> DataFrame:
    """Replace the values of columns by their texts, see `text_of`."""
    return frame.withColumns({name: text_of(frame, name) for name in columns})


def text_of(frame: DataFrame, name: str) -> Column:
    """Return the texts of the values of a column, as the source wrote them if that is known."""
    text = write(sf.col(quoted(name)), frame.schema[name].dataType)
    return sf.coalesce(sf.col(quoted(written(name))), text) if written(name) in frame.columns else text


def _write_float(value: Column, kind: DataType) -> Column:
    """Return the shortest decimal of a float; null for NaN and the infinities."""

    def write_exactly(digits: int) -> Column:
        """Return the float with this number of digits; null if the text reads back as another float."""
        text = sf.format_string(f"%.{digits - 1}e", value)
        return sf.when(text.cast(kind) == value, text)

    text = sf.coalesce(*map(write_exactly, _DIGITS[kind]), value.cast("string"))
    is_number = ~sf.isnan(value) & (sf.abs(value) != sf.lit(float("inf")))
    return sf.when(is_number, evaluate_once(text, _without_exponent))


def _without_exponent(text: Column) -> Column:
    """Return a decimal without its exponent, for example 1250 for 1.250E3; a decimal that had one also loses its trailing zeros."""
    sign = sf.regexp_extract(text, "^-?", 0)
    integer = sf.regexp_extract(text, r"^-?(\d+)", 1)
    fraction = sf.regexp_extract(text, r"\.(\d*?)0*(?:[eE]|$)", 1)
    exponent = sf.regexp_extract(text, r"[eE]\+?(-?\d+)$", 1).try_cast("int")
    digits = sf.concat(integer, fraction)
    # The position of the point in the digits; it may be before the first digit or after the last digit.
    point = sf.length(integer) + exponent
    padded = sf.concat(
        sf.repeat(sf.lit("0"), sf.greatest(-point + 1, sf.lit(0))),
        digits,
        sf.repeat(sf.lit("0"), sf.greatest(point - sf.length(digits), sf.lit(0))),
    )
    integer_length = sf.greatest(point, sf.lit(1))
    before = sf.substring(padded, sf.lit(1), integer_length)
    after = sf.substring(padded, integer_length + 1, sf.length(padded))
    plain = sf.concat(sign, before, sf.when(after == "", sf.lit("")).otherwise(sf.concat(sf.lit("."), after)))
    return sf.when(text.rlike("[eE]"), plain).otherwise(text)
