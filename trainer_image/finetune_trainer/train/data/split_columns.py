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
"""A batch of rows: the values of each column, for example {"prompt": ["a", "b"], "label": [True, False]}."""
BATCH_ROWS = 1024
SPLIT_COLUMN = "split"
# Arrow's name for the type of a column that has only nulls.
NO_TYPE = "null"


def describe_columns(schema: pa.Schema) -> list[Column]:
    """Return the name, the kind and the type of each column of an Arrow schema."""
    return [Column(field.name, _classify_type(field.type), str(field.type)) for field in schema]


def _classify_type(arrow_type: pa.DataType) -> Kind:
    import pyarrow as pa

    stored_type = plain_text.find_stored_type(arrow_type)
    if any(is_text(stored_type) for is_text in _list_text_checks()):
        return "text"
    if pa.types.is_boolean(stored_type) or pa.types.is_integer(stored_type):
        return "label"
    if plain_text.is_list(stored_type) and pa.types.is_struct(stored_type.value_type):
        fields = {field.name for field in stored_type.value_type}
        return "messages" if are_fields_of_messages(fields) else "other"
    return "other"


def check_columns(schema: pa.Schema, columns: list[str], where: str, label: str | None) -> None:
    """Check that the columns exist and have types that training reads.

    Raises:
        DataError: a column is missing or ambiguous, or has a type that training cannot read.
    """
    import pyarrow as pa

    check_names(columns, columns, schema.names, where)
    # Both lists accept the null type of columns that have only nulls (`is_plain_type` does so too): nulls are checked in the rows.
    label_checks = (*_list_text_checks(), pa.types.is_null, pa.types.is_boolean, pa.types.is_integer)
    value_checks = (plain_text.is_plain_type, plain_text.is_list)
    for column in columns:
        stored_type = plain_text.find_stored_type(schema.field(column).type)
        checks = label_checks if column == label else value_checks
        if not any(is_readable(stored_type) for is_readable in checks):
            raise column_type_error(column, where, _name_type(stored_type), label)


def check_names(required: list[str], columns: list[str], names: Collection[str], where: str) -> None:
    """Check that a file has the `required` columns, and no column whose name differs from one of `columns` only in case.

    Args:
        columns: the columns to read, required or not.
        names: the columns of the file.

    Raises:
        DataError: a column is missing or ambiguous.
    """
    missing = [column for column in required if column not in names]
    # A column that is not required counts as missing if the file has its name in another case.
    for column in columns:
        if column not in [*names, *missing] and find_twins(column, names):
            missing.append(column)
    if missing:
        raise DataError("MissingColumn", explain_missing(missing, where, names))
    for column in columns:
        if sentence := explain_twins(column, where, names):
            raise DataError("ColumnsAmbiguous", sentence)


def _list_text_checks() -> tuple[Callable[[pa.DataType], bool], ...]:
    import pyarrow as pa

    return pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view


def _name_type(stored_type: pa.DataType) -> str:
    """Return the name of a type that training cannot read, as `explain_type` expects it."""
    import pyarrow as pa

    types = pa.types
    names = {
        BYTES: any(
            (
                types.is_binary(stored_type),
                types.is_large_binary(stored_type),
                types.is_binary_view(stored_type),
                types.is_fixed_size_binary(stored_type),
            )
        ),
        HALF_FLOATS: types.is_float16(stored_type),
        LONG_DECIMALS: types.is_decimal(stored_type),
        TIMES_OF_DAY: types.is_time(stored_type),
        MAPS: types.is_map(stored_type),
        STRUCTURES: types.is_struct(stored_type),
    }
    return next((name for name, matches in names.items() if matches), str(stored_type))


def null_value_error(column: str, where: str) -> DataError:
    """Return the error for a column that has no value in some rows."""
    return DataError("NullValue", f"column {column} has rows without a value in {where}: remove these rows")


def column_type_error(column: str, where: str, type_name: str, label: str | None) -> DataError:
    """Return the error for a column whose type training cannot read."""
    explain_column = explain_label_type if column == label else explain_type
    return DataError("ColumnType", explain_column(column, where, type_name))
