"""Writes numbers, dates and other values that are not text as the text that is learned.

Preparations (as Spark expressions, see `prep.expressions.plain_text`) follow the rule below, and so do splits that training and evaluation
read directly. A number in JSON lines is learned as it is written. Other formats do not show how a number was written, so there:

- An integer is its digits, and a decimal has as many digits after the point as its type.
- A float is the shortest decimal that reads back as the same float of its type: 18, 0.0005, 12500000. It has no exponent.
- NaN and the infinities are missing values: data frames write NaN for a missing value.
- A boolean is true or false.
- A date is 2026-11-25; a time has up to six digits of a second, 2026-11-25 21:04:05.5, in UTC.
- A duration is the integer in the file.

Numbers and durations in lists and structures stay numbers, with the digits of this rule: the float 18.0 becomes the integer 18. Dates and
times in them become texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa


MAX_DECIMAL_DIGITS = 38
"""The maximum number of digits of a decimal that all readers accept. Source: Spark, DecimalType.MAX_PRECISION."""


class WrittenFloat(float):
    """A number of JSON with a point or an exponent, and its text.

    written: its text, for example 1.50, even if the number is beyond the range of floats.
    """

    written: str

    def __new__(cls, written: str) -> Self:
        """Read a number from its text."""
        number = super().__new__(cls, written)
        number.written = written
        return number


def is_plain(value: Any) -> bool:
    """Return whether `write` accepts a value."""
    return value is None or isinstance(value, str | bool | int | float | Decimal | date)


def name_type(value: Any) -> str:
    """Return the name of the type of a value of JSON, for people."""
    return "float" if isinstance(value, WrittenFloat) else type(value).__name__


def write(value: Any) -> str | None:
    """Return the text of a value; None for a missing value.

    Args:
        value: `is_plain` must hold for it. A float of 32 bits or less must have its NumPy type, which determines the digits.
    """
    match value:
        case None | str():
            text = value
        case bool():
            text = "true" if value else "false"
        case WrittenFloat():
            text = value.written
        case float() | np.floating():
            text = np.format_float_positional(value, unique=True, trim="-") if math.isfinite(value) else None
        case Decimal():
            text = format(value, "f")
        case datetime():
            text = _write_time(value)
        case _:
            text = str(value)
    return text


def _write_time(time: datetime) -> str:
    in_utc = time.astimezone(UTC).replace(tzinfo=None) if time.tzinfo else time
    text = str(in_utc)
    return text.rstrip("0") if "." in text else text


def is_plain_type(kind: pa.DataType) -> bool:
    """Whether `write_column` has texts for the values of a type."""
    import pyarrow as pa

    types = pa.types
    return any(
        (
            types.is_null(kind),
            types.is_string(kind),
            types.is_large_string(kind),
            types.is_string_view(kind),
            types.is_integer(kind),
            types.is_float32(kind),
            types.is_float64(kind),
            types.is_decimal(kind) and kind.precision <= MAX_DECIMAL_DIGITS,
            types.is_boolean(kind),
            types.is_date(kind),
            types.is_timestamp(kind),
            types.is_duration(kind),
        )
    )


def find_stored_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the stored values, behind a dictionary encoding or an extension type such as JSON or UUID."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return find_stored_type(kind.value_type)
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def write_column(values: pa.Array) -> list[str | None]:
    """Return the texts of a column's values; `is_plain_type` must hold for the column's `find_stored_type`."""
    import pyarrow as pa

    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if isinstance(values.type, pa.BaseExtensionType):
        values = values.storage
    if pa.types.is_duration(values.type):
        values = values.cast(pa.int64())
    if _is_nanoseconds(values.type):
        values = _cut_nanoseconds(values)
    if pa.types.is_floating(values.type):
        floats = values.to_numpy(zero_copy_only=False)
        return [None if value is None else write(value) for value in floats]
    return [write(value) for value in values.to_pylist()]


def list_structures(values: pa.Array) -> list[Any]:
    """Return the values of a column of lists or structures, with numbers, dates and times by the rule of this module; a map is an object."""
    simplify = _find_simplification(values.type)
    listed: list[Any] = values.to_pylist()
    return listed if simplify is None else [value if value is None else simplify(value) for value in listed]


def _find_simplification(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """Return a function that makes values of a type plain; None if they are plain already. The function does not accept None."""
    import pyarrow as pa

    kind = find_stored_type(kind)
    if pa.types.is_struct(kind):
        fields = {field.name: _find_simplification(field.type) for field in kind}
        return _simplify_fields(fields) if any(fields.values()) else None
    if pa.types.is_map(kind):
        # Arrow returns a map as pairs, so a map is never plain.
        item = _find_simplification(kind.item_type)
        return lambda pairs: {key: _apply(item, value) for key, value in pairs}
    if is_list(kind):
        element = _find_simplification(kind.value_type)
        return None if element is None else lambda values: [_apply(element, value) for value in values]
    return _find_value_simplification(kind)


def _find_value_simplification(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """Return a function as `_find_simplification` does, for a type whose values have no parts."""
    import pyarrow as pa

    if pa.types.is_floating(kind):
        # The digits depend on the type, and `to_pylist` returns Python's floats.
        return lambda number: _read_number(write(kind.to_pandas_dtype()(number)))
    if pa.types.is_decimal(kind):
        return lambda number: _read_number(write(number))
    if pa.types.is_duration(kind):
        return lambda duration: pa.scalar(duration, kind).value
    if _is_nanoseconds(kind):
        return lambda time: write(_cut_nanoseconds(pa.scalar(time, kind)).as_py())
    return write if pa.types.is_date(kind) or pa.types.is_timestamp(kind) else None


def _is_nanoseconds(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_timestamp(kind) and kind.unit == "ns")


def _cut_nanoseconds(times: Any) -> Any:
    """Return times in microseconds, an array or a scalar: Python's times end with microseconds, and so do Spark's."""
    import pyarrow as pa

    return times.cast(pa.timestamp("us", times.type.tz), safe=False)


def is_list(kind: pa.DataType) -> bool:
    """Return whether values of a type are lists, in any layout."""
    import pyarrow as pa

    types = pa.types
    return any(
        (
            types.is_list(kind),
            types.is_large_list(kind),
            types.is_fixed_size_list(kind),
            types.is_list_view(kind),
            types.is_large_list_view(kind),
        )
    )


def _simplify_fields(fields: dict[str, Callable[[Any], Any] | None]) -> Callable[[Any], Any]:
    return lambda values: {name: _apply(fields[name], value) for name, value in values.items()}


def _apply(simplify: Callable[[Any], Any] | None, value: Any) -> Any:
    return value if value is None or simplify is None else simplify(value)


def _read_number(text: str | None) -> float | None:
    if text is None:
        return None
    return WrittenFloat(text) if "." in text else int(text)
