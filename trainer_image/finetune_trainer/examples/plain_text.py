"""What columns of examples may hold besides text, and the text that is learned of it.

This is the rule for preparations, whose expressions for Spark are in `prep.plain_text`, and for splits that training and evaluation read
directly. A number of JSON lines is learned as it is written. Other formats do not say how a number was written:

- An integer is its digits, and a decimal has the digits after the point that its type has.
- A float is the shortest decimal that reads back as the same float of its type: 18, 0.0005, 12500000. It has no exponent.
- NaN and the infinities are no values: data frames write NaN where they have none.
- A boolean is true or false.
- A date is 2026-11-25; a time has up to six digits of a second, 2026-11-25 21:04:05.5, in UTC.
"""

from __future__ import annotations

import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa


class WrittenFloat(float):
    """A number of JSON with a point or an exponent, and how it is written.

    written: its text, such as 1.50; that of a number beyond the range of floats too.
    """

    written: str

    def __new__(cls, written: str) -> Self:
        """Read a number from its text."""
        number = super().__new__(cls, written)
        number.written = written
        return number


def is_plain(value: Any) -> bool:
    """Whether `write` has a text for a value, or knows that it is none."""
    return value is None or isinstance(value, str | bool | int | float | Decimal | date)


def name_type(value: Any) -> str:
    """Return the name of the type of a value of JSON, for people."""
    return "float" if isinstance(value, WrittenFloat) else type(value).__name__


def write(value: Any) -> str | None:
    """Return the text of a value; None for no value.

    Args:
        value: one for which `is_plain` holds. A float of 32 bits or less has its NumPy type.
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

    is_kind = pa.types
    return any(
        (
            is_kind.is_null(kind),
            is_kind.is_string(kind),
            is_kind.is_large_string(kind),
            is_kind.is_string_view(kind),
            is_kind.is_integer(kind),
            is_kind.is_floating(kind),
            is_kind.is_decimal(kind),
            is_kind.is_boolean(kind),
            is_kind.is_date(kind),
            is_kind.is_timestamp(kind),
        )
    )


def write_column(values: pa.Array) -> list[str | None]:
    """Return the texts of the values of a column, for whose type, or that of its dictionary, `is_plain_type` holds."""
    import pyarrow as pa

    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_timestamp(values.type) and values.type.unit == "ns":
        # NB: Python's times end with microseconds, and so do Spark's.
        values = values.cast(pa.timestamp("us", values.type.tz), safe=False)
    if pa.types.is_floating(values.type):
        floats = values.to_numpy(zero_copy_only=False)
        return [None if value is None else write(value) for value in floats]
    return [write(value) for value in values.to_pylist()]
