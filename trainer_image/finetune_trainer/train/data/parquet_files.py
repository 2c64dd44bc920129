"""Reads the rows of a split from Parquet files, a batch at a time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from finetune_trainer.examples import plain_text
from finetune_trainer.examples.file_formats import CODECS_NOT_READ, explain_codec
from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.train.data import split_columns
from finetune_trainer.train.data.split_columns import (
    SPLIT_COLUMN,
    Rows,
    check_columns,
    check_names,
    null_value_error,
)
from finetune_trainer.train.data.split_files import format_address, name_corruption, open_parquet

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterator, Mapping

    import pyarrow as pa
    import pyarrow.parquet as pq
    from fsspec import AbstractFileSystem

# What to do about a corrupt file of a split, for messages.
_REMEDY = "write it again"


def find_columns(files: AbstractFileSystem, paths: list[str], nullable: set[str]) -> set[str]:
    """Return which of the `nullable` columns a Parquet file may lack: those that at least one file has.

    A column that no file has is thus reported as missing by `read_rows`, even if it may be null.
    """
    # The only file cannot lack a column that it has.
    if len(paths) == 1 or not nullable:
        return set()
    return nullable & {name for schema in read_schemas(files, paths) for name in schema.names}


def read_schemas(files: AbstractFileSystem, paths: list[str]) -> Iterator[pa.Schema]:
    """Yield the schema of each file."""
    for path in paths:
        with open_parquet(partial(files.open, path), format_address(files, path), _REMEDY) as parquet:
            yield parquet.schema_arrow


def read_rows(
    files: AbstractFileSystem,
    file: str,
    columns: list[str],
    may_be_null: Container[str | None],
    label: str | None,
    *,
    optional: Collection[str],
) -> Iterator[Rows]:
    """Yield the rows of a Parquet file as batches of columns.

    optional: columns that the file may lack; their values are then None. The other arguments and the errors are those of `read.read`.
    """
    where = format_address(files, file)
    batches = read_batches(
        lambda: files.open(file),
        columns,
        where,
        _REMEDY,
        label=label,
        absent=dict.fromkeys(optional),
    )
    for batch in batches:
        yield from convert_batch(batch, where, _REMEDY, may_be_null, label)


def read_batches(
    opening: Callable[[], Any],
    columns: list[str],
    where: str,
    remedy: str,
    *,
    label: str | None,
    only: str | None = None,
    absent: Mapping[str, Any] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield some columns of a Parquet file, a batch of rows at a time.

    Args:
        opening: opens the file.
        where: the address of the file for messages.
        remedy: what to do about a corrupt file, for messages.
        label: the column whose values may also be booleans and integers.
        only: yield only the rows of this split, if the file has a split column.
        absent: the columns that the file may lack, and the value that each row then has.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    with open_parquet(opening, where, remedy) as parquet:
        file_columns = parquet.schema_arrow.names
        constants = {name: value for name, value in (absent or {}).items() if name not in file_columns}
        # No column is required here, but the file must not have the name of a column in another case.
        check_names([], columns, file_columns, where)
        stored_columns = [name for name in columns if name not in constants]
        check_columns(parquet.schema_arrow, stored_columns, where, label)
        _check_codecs(parquet.metadata, columns, where)
        is_filtered = only is not None and SPLIT_COLUMN in file_columns
        read_columns = [*stored_columns, SPLIT_COLUMN] if is_filtered else stored_columns
        for batch in parquet.iter_batches(split_columns.BATCH_ROWS, columns=read_columns):
            rows = batch.filter(pc.equal(batch.column(SPLIT_COLUMN), only)) if is_filtered else batch
            arrays = [
                pa.array([constants[name]] * rows.num_rows) if name in constants else rows.column(name)
                for name in columns
            ]
            yield pa.RecordBatch.from_arrays(arrays, names=columns)


def _check_codecs(metadata: pq.FileMetaData, columns: list[str], where: str) -> None:
    """Check that Spark and Arrow can decompress the columns.

    Only the first row group is read: a writer compresses a column in the same way in all row groups.
    """
    if not metadata.num_row_groups:
        return
    group = metadata.row_group(0)
    for column in map(group.column, range(metadata.num_columns)):
        codec = str(column.compression).capitalize()
        if codec in CODECS_NOT_READ and column.path_in_schema.split(".")[0] in columns:
            raise DataError("CorruptData", explain_codec(where, codec))


def convert_batch(
    batch: pa.RecordBatch, where: str, remedy: str, may_be_null: Container[str | None], label: str | None
) -> Iterator[Rows]:
    """Yield a batch as lists of Python values, unless it is empty.

    Args:
        batch: the rows.
        where: the address of the rows for messages.
        remedy: what to do about a corrupt file, for messages.
        may_be_null: columns in which a row may have no value.
        label: the column whose values stay as they are.

    Raises:
        DataError: a value is null in a column that is not in `may_be_null`, a date or a time is out of range, or the file is corrupt.
    """
    if batch.num_rows:
        with name_corruption(where, remedy):
            columns = {
                name: _convert_column(batch, name, where, is_label=name == label)
                for name in batch.schema.names
            }
        for column, values in columns.items():
            # `_convert_array` returns None for NaN too.
            if None in values and column not in may_be_null:
                raise null_value_error(column, where)
        yield columns


def _convert_column(batch: pa.RecordBatch, name: str, where: str, *, is_label: bool) -> list[Any]:
    try:
        return _convert_array(batch.column(name), is_label=is_label)
    except OverflowError as error:
        # NB: Python's dates and times have the years 1 to 9999, and a time may leave them when it is converted to UTC.
        raise DataError(
            "InvalidTime",
            f"column {name} of {where} has a date or a time outside of the years 1 to 9999 in UTC: correct or remove such rows",
        ) from error


def _convert_array(array: pa.Array, *, is_label: bool) -> list[Any]:
    """Return the values of a column: labels and lists unchanged, others as text."""
    if is_label:
        labels: list[Any] = array.to_pylist()
        return labels
    is_text = plain_text.is_plain_type(plain_text.find_stored_type(array.type))
    return plain_text.write_column(array) if is_text else plain_text.list_structures(array)
