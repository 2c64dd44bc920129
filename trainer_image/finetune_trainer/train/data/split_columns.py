"""The columns of a split: their kinds, and whether training can read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune_trainer.examples import plain_text
from finetune_trainer.examples.chat_messages import are_fields_of_messages
from finetune_trainer.examples.columns import Column, Kind
from finetune_trainer.examples.file_formats import (
    BYTES,
    HALF_FLOATS,
    LONG_DECIMALS,
    MAPS,
    STRUCTURES,
    TIMES_OF_DAY,
    explain_label_type,
    explain_missing,
    explain_twins,
    explain_type,
    find_twins,
)
from finetune_trainer.pod.exit_status import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import pyarrow as pa

Rows = dict[str, list[Any]]
"""A batch of rows: the values of each column."""
BATCH_ROWS = 1024
SPLIT_COLUMN = "split"
# Arrow's name for the type of a column that has only nulls.
NO_TYPE = "null"


def describe_columns(schema: pa.Schema) -> list[Column]:
    """Return the name, the kind and the type of each column of an Arrow schema."""
    return [Column(field.name, _classify_type(field.type), str(field.type)) for field in schema]


def _classify_type(kind: pa.DataType) -> Kind:
    import pyarrow as pa

    kind = plain_text.find_stored_type(kind)
    if any(is_kind(kind) for is_kind in _list_text_checks()):
        return "text"
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        return "label"
    if plain_text.is_list(kind) and pa.types.is_struct(kind.value_type):
        fields = {field.name for field in kind.value_type}
        return "messages" if are_fields_of_messages(fields) else "other"
    return "other"


def check_columns(schema: pa.Schema, columns: list[str], where: str, label: str | None) -> None:
    """Check that the columns exist and have types that training reads.

    Raises:
        DataError: a column is missing, ambiguous, or has another type.
    """
    import pyarrow as pa

    check_names(columns, columns, schema.names, where)
    label_checks = (*_list_text_checks(), pa.types.is_null, pa.types.is_boolean, pa.types.is_integer)
    for column in columns:
        kind = plain_text.find_stored_type(schema.field(column).type)
        # A column that has only nulls has no type and is readable; whether it may have nulls is checked later.
        readable = label_checks if column == label else (plain_text.is_plain_type, plain_text.is_list)
        if not any(is_kind(kind) for is_kind in readable):
            raise column_type_error(column, where, _name_type(kind), label)


def check_names(required: list[str], columns: list[str], names: Collection[str], where: str) -> None:
    """Check that a file has the `required` columns, and none of `columns` in another case, alone or in addition.

    Raises:
        DataError: a column is missing or ambiguous.
    """
    missing = [column for column in required if column not in names]
    # An optional column is missing too if the file has its name in another case.
    missing += [
        column for column in columns if column not in [*names, *missing] and find_twins(column, names)
    ]
    if missing:
        raise DataError("MissingColumn", explain_missing(missing, where, names))
    for column in columns:
        if ambiguous := explain_twins(column, where, names):
            raise DataError("ColumnsAmbiguous", ambiguous)


def _list_text_checks() -> tuple[Callable[[pa.DataType], bool], ...]:
    import pyarrow as pa

    return pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view


def _name_type(kind: pa.DataType) -> str:
    """Return the name of a type that training cannot read, as `explain_type` expects it."""
    import pyarrow as pa

    types = pa.types
    names = {
        BYTES: any(
            (
                types.is_binary(kind),
                types.is_large_binary(kind),
                types.is_binary_view(kind),
                types.is_fixed_size_binary(kind),
            )
        ),
        HALF_FLOATS: types.is_float16(kind),
        LONG_DECIMALS: types.is_decimal(kind),
        TIMES_OF_DAY: types.is_time(kind),
        MAPS: types.is_map(kind),
        STRUCTURES: types.is_struct(kind),
    }
    return next((name for name, matches in names.items() if matches), str(kind))


def null_value_error(column: str, where: str) -> DataError:
    """Return the error for a column that has no value in some rows."""
    return DataError("NullValue", f"column {column} has rows without a value in {where}: remove these rows")


def column_type_error(column: str, where: str, kind: str, label: str | None) -> DataError:
    """Return the error for a column whose type training cannot read."""
    explain_column = explain_label_type if column == label else explain_type
    return DataError("ColumnType", explain_column(column, where, kind))
