"""Streams the rows of a split from a Delta table, Parquet or JSON lines."""

from __future__ import annotations

import json
import zlib
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from finetune_trainer.examples import plain_text
from finetune_trainer.examples.chat_messages import are_fields_of_messages
from finetune_trainer.examples.columns import Column, Kind
from finetune_trainer.examples.documents import ENCODING
from finetune_trainer.examples.encodings import parse_json
from finetune_trainer.examples.file_formats import (
    BYTES,
    CODECS_NOT_READ,
    HALF_FLOATS,
    LONG_DECIMALS,
    MAPS,
    STRUCTURES,
    TIMES_OF_DAY,
    explain_codec,
    explain_label_type,
    explain_missing,
    explain_twins,
    explain_type,
    explain_unreadable_line,
    find_other_format,
    find_twins,
)
from finetune_trainer.pod.exit_status import DataError, TrainingError, first_line
from finetune_trainer.storage import filesystems
from finetune_trainer.train.data.split_files import (
    find_files,
    format_address,
    is_corrupt,
    name_corruption,
    open_lines,
    open_parquet,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterator, Mapping
    from typing import BinaryIO

    import pyarrow as pa
    import pyarrow.parquet as pq
    from fsspec import AbstractFileSystem

    from finetune_crds.data import Splits

SPLIT_COLUMN = "split"
_BATCH_ROWS = 1024
# Arrow's name for the type of a column that has only nulls.
_NO_TYPE = "null"

Rows = dict[str, list[Any]]


def read(
    splits: Splits,
    name: str,
    columns: list[str],
    *,
    may_be_null: Container[str | None] = (),
    label: str | None = None,
) -> Iterator[Rows]:
    """Yield the rows of a split as batches of columns; nothing when the recipe names no files for it.

    Memory holds one batch of rows and the read buffers. Files and subfolders whose name starts with `_` or `.` are
    ignored.

    Args:
        may_be_null: columns in which a row may have no value.
        label: column whose values may also be booleans and integers.

    Raises:
        DataError: the table, a file or a column is missing or corrupt, or a value is null.
    """
    if splits.type == "Delta":
        yield from _read_delta(splits, name, columns, may_be_null, label)
        return
    place = getattr(splits, name)
    if place is None:
        return
    files, paths = find_files(place, splits.type)
    if splits.type == "JSONLines":
        for file in paths:
            yield from _read_json_lines(files, file, columns, may_be_null, label)
        return
    optional = _find_columns(files, paths, {column for column in columns if column in may_be_null})
    for file in paths:
        yield from _read_parquet(files, file, columns, may_be_null, label, optional=optional)


def _find_columns(files: AbstractFileSystem, paths: list[str], columns: set[str]) -> set[str]:
    """Return the optional columns that at least one Parquet file has; the other files may lack them."""
    if len(paths) == 1 or not columns:
        return set()
    return columns & {name for schema in _read_parquet_schemas(files, paths) for name in schema.names}


def _read_parquet_schemas(files: AbstractFileSystem, paths: list[str]) -> Iterator[pa.Schema]:
    for path in paths:
        with open_parquet(
            partial(files.open, path), format_address(files, path), "write it again"
        ) as parquet:
            yield parquet.schema_arrow


def read_schema(splits: Splits) -> list[Column]:
    """Return the columns of the training split: of a table, of its Parquet files, or of the first JSON lines of each file.

    Raises:
        DataError: the table or the file is missing or corrupt.
    """
    if splits.type == "Delta":
        return _describe_arrow_columns(_open_delta_dataset(splits).schema)
    assert splits.train is not None  # noqa: S101 - the schema demands it
    files, paths = find_files(splits.train, splits.type)
    if splits.type == "JSONLines":
        return _infer_json_columns(files, paths)
    columns: dict[str, Column] = {}
    for of_file in _read_parquet_schemas(files, paths):
        new = {column.name: column for column in _describe_arrow_columns(of_file)}
        columns = new | {name: column for name, column in columns.items() if column.type != _NO_TYPE}
    return list(columns.values())


def has_token_ids(splits: Splits, encoding: str) -> bool:
    """Whether the splits are a table as a preparation wrote it, with the token ids of an encoding, see `Documents.encoding`.

    Raises:
        DataError: the table is missing or corrupt.
    """
    if splits.type != "Delta":
        return False
    # NB: a later commit that changes texts leaves the token ids of the old ones in the table.
    for commit in _open_delta_table(splits).history(1):
        with suppress(LookupError, ValueError, TypeError):
            return bool(json.loads(commit["userMetadata"])[ENCODING] == encoding)
    return False


def _describe_arrow_columns(schema: pa.Schema) -> list[Column]:
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


def _infer_json_columns(files: AbstractFileSystem, paths: list[str]) -> list[Column]:
    """Return the columns in the first rows of each JSON lines file, with the kind of their first value."""
    first: dict[str, Any] = {}
    for file in paths:
        with open_lines(files, file) as opened:
            for row in islice(_parse_objects(opened, format_address(files, file)), _BATCH_ROWS):
                first |= {name: value for name, value in row.items() if first.get(name) in (None, [])}
    return [
        Column(name, _classify_value(value), plain_text.name_type(value)) for name, value in first.items()
    ]


def _list_text_checks() -> tuple[Callable[[pa.DataType], bool], ...]:
    import pyarrow as pa

    return pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view


def _classify_value(value: Any) -> Kind:
    if isinstance(value, str):
        return "text"
    if isinstance(value, bool | int):
        return "label"
    is_structures = isinstance(value, list) and value and isinstance(value[0], dict)
    # A message that calls tools may have no content.
    return "messages" if is_structures and are_fields_of_messages({*value[0], "content"}) else "other"


def read_delta_version(splits: Splits) -> int | None:
    """Return the version of the Delta table to read; None for files.

    Raises:
        DataError: the table or its version does not exist, or its log is corrupt.
    """
    return _open_delta_table(splits).version() if splits.type == "Delta" else None


def _open_delta_table(splits: Splits) -> Any:
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError, TableNotFoundError

    assert splits.path is not None  # noqa: S101 - the schema demands it
    path = splits.path.replace("s3a://", "s3://", 1)
    try:
        return DeltaTable(path, version=splits.version, storage_options=filesystems.build_delta_options(path))
    except TableNotFoundError as error:
        raise DataError(
            "MissingTable", f"data.splits.path {splits.path} is not a Delta table: correct the path"
        ) from error
    except Exception as error:
        if splits.version is not None and "version" in str(error).lower():
            raise DataError(
                "MissingVersion",
                f"the Delta table {splits.path} has no version {splits.version}: set an existing version",
            ) from error
        if isinstance(error, DeltaError) and "Json error" in str(error):
            raise DataError(
                "CorruptData",
                f"the log of the Delta table {splits.path} cannot be read ({first_line(error)}): restore the table",
            ) from error
        if filesystems.is_object_store(path):
            raise TrainingError(
                "DataUnreadable", f"the Delta table {splits.path} cannot be read: {first_line(error)[:300]}"
            ) from error
        raise


def _read_delta(
    splits: Splits, name: str, columns: list[str], may_be_null: Container[str | None], label: str | None
) -> Iterator[Rows]:
    import pyarrow.dataset as ds

    table = f"the Delta table {splits.path}"
    dataset = _open_delta_dataset(splits)
    _check_columns(dataset.schema, [SPLIT_COLUMN, *columns], table, label)
    for fragment in dataset.get_fragments(filter=ds.field(SPLIT_COLUMN) == name):
        where = f"{fragment.path} of {table}"
        # Columns of the table that the file lacks: partition values, and null for columns that were added later.
        partition = ds.get_partition_keys(fragment.partition_expression)
        absent = {column: partition.get(column) for column in columns}
        batches = _read_parquet_batches(
            fragment.open, columns, where, "restore the table", label=label, only=name, absent=absent
        )
        for batch in batches:
            yield from _convert_batch(batch, f"the split {name} of {splits.path}", may_be_null, label)


def _open_delta_dataset(splits: Splits) -> Any:
    from deltalake.exceptions import DeltaProtocolError

    try:
        return _open_delta_table(splits).to_pyarrow_dataset()
    except DeltaProtocolError as error:
        raise DataError(
            "UnsupportedTable",
            f"the Delta table {splits.path} uses features that the trainer cannot read ({first_line(error)}): rewrite it "
            "without them",
        ) from error


def _read_parquet(
    files: AbstractFileSystem,
    file: str,
    columns: list[str],
    may_be_null: Container[str | None],
    label: str | None,
    *,
    optional: Collection[str],
) -> Iterator[Rows]:
    where = format_address(files, file)
    batches = _read_parquet_batches(
        lambda: files.open(file),
        columns,
        where,
        "write it again",
        label=label,
        absent=dict.fromkeys(optional),
    )
    for batch in batches:
        yield from _convert_batch(batch, where, may_be_null, label)


def _read_parquet_batches(
    opening: Callable[[], Any],
    columns: list[str],
    where: str,
    remedy: str,
    *,
    label: str | None,
    only: str | None = None,
    absent: Mapping[str, Any] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield some columns of a Parquet file.

    Args:
        only: the rows of this split, if the file has a split column.
        absent: the value in each row of a column that the file may lack.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    with open_parquet(opening, where, remedy) as parquet:
        file_columns = parquet.schema_arrow.names
        constants = {name: value for name, value in (absent or {}).items() if name not in file_columns}
        _check_names([], columns, file_columns, where)
        _check_columns(
            parquet.schema_arrow, [name for name in columns if name not in constants], where, label
        )
        _check_codecs(parquet.metadata, columns, where)
        is_filtered = only is not None and SPLIT_COLUMN in file_columns
        read_columns = [name for name in columns if name not in constants] + [SPLIT_COLUMN] * is_filtered
        for batch in parquet.iter_batches(_BATCH_ROWS, columns=read_columns):
            rows = batch.filter(pc.equal(batch.column(SPLIT_COLUMN), only)) if is_filtered else batch
            arrays = [
                pa.array([constants[name]] * rows.num_rows) if name in constants else rows.column(name)
                for name in columns
            ]
            yield pa.RecordBatch.from_arrays(arrays, names=columns)


def _check_codecs(metadata: pq.FileMetaData, columns: list[str], where: str) -> None:
    """Check that the columns have a compression that all readers have; a writer uses one for a file."""
    if not metadata.num_row_groups:
        return
    group = metadata.row_group(0)
    for column in map(group.column, range(metadata.num_columns)):
        codec = str(column.compression).capitalize()
        if codec in CODECS_NOT_READ and column.path_in_schema.split(".")[0] in columns:
            raise DataError("CorruptData", explain_codec(where, codec))


def _convert_batch(
    batch: pa.RecordBatch, where: str, may_be_null: Container[str | None], label: str | None
) -> Iterator[Rows]:
    if batch.num_rows:
        with name_corruption(where, "write it again"):
            columns = {
                name: _convert_array(batch.column(name), is_label=name == label)
                for name in batch.schema.names
            }
        for column, values in columns.items():
            # NaN is no value.
            if None in values and column not in may_be_null:
                raise _null_value_error(column, where)
        yield columns


def _convert_array(array: pa.Array, *, is_label: bool) -> list[Any]:
    """The values of a column: labels and lists as they are, and others as text."""
    if is_label:
        labels: list[Any] = array.to_pylist()
        return labels
    is_text = plain_text.is_plain_type(plain_text.find_stored_type(array.type))
    return plain_text.write_column(array) if is_text else plain_text.list_structures(array)


def _read_json_lines(
    files: AbstractFileSystem,
    file: str,
    columns: list[str],
    may_be_null: Container[str | None],
    label: str | None,
) -> Iterator[Rows]:
    """Yield the rows of a JSON lines file; its extension selects the compression."""
    where = format_address(files, file)
    with open_lines(files, file) as lines:
        rows = _parse_objects(lines, where)
        while batch := list(islice(rows, _BATCH_ROWS)):
            names = dict.fromkeys(name for row in batch for name in row)
            _check_names([name for name in columns if name not in may_be_null], columns, names, where)
            texts: Rows = {}
            for column in columns:
                texts[column] = values = [
                    _convert_value(row.get(column), is_label=column == label) for row in batch
                ]
                if None in values and column not in may_be_null:
                    raise _null_value_error(column, where)
                present_values = (value for value in values if value is not None)
                readable = str | bool | int if column == label else str | list
                unreadable_value = next(
                    (value for value in present_values if not isinstance(value, readable)), None
                )
                if unreadable_value is not None:
                    kind = (
                        STRUCTURES
                        if isinstance(unreadable_value, dict)
                        else plain_text.name_type(unreadable_value)
                    )
                    raise _column_type_error(column, where, kind, label)
            yield texts


def _convert_value(value: Any, *, is_label: bool) -> Any:
    """A value of JSON: labels, lists and objects as they are, and others as text."""
    return plain_text.write(value) if not is_label and plain_text.is_plain(value) else value


def _parse_objects(lines: BinaryIO, where: str) -> Iterator[dict[str, Any]]:
    number, line = 0, b""
    try:
        for number, line in enumerate(lines, start=1):  # noqa: B007 - the number is for the error
            if line.strip():
                row = parse_json(line)
                if not isinstance(row, dict):
                    raise TypeError("it is not a JSON object")  # noqa: TRY301
                yield row
    except (ValueError, TypeError, RecursionError, EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and not is_corrupt(error):
            raise
        raise DataError(
            "CorruptData",
            explain_unreadable_line(max(number, 1), where, find_other_format(line) or first_line(error)),
        ) from error


def _check_columns(schema: pa.Schema, columns: list[str], where: str, label: str | None) -> None:
    import pyarrow as pa

    _check_names(columns, columns, schema.names, where)
    labels = (*_list_text_checks(), pa.types.is_null, pa.types.is_boolean, pa.types.is_integer)
    for column in columns:
        kind = plain_text.find_stored_type(schema.field(column).type)
        # A column of nulls alone has no type; whether it may be null is another question.
        readable = labels if column == label else (plain_text.is_plain_type, plain_text.is_list)
        if not any(is_kind(kind) for is_kind in readable):
            raise _column_type_error(column, where, _name_type(kind), label)


def _check_names(required: list[str], columns: list[str], names: Collection[str], where: str) -> None:
    """Check that columns are among those of a file, and none of them beside one whose name differs in case alone."""
    missing = [column for column in required if column not in names]
    missing += [
        column for column in columns if column not in [*names, *missing] and find_twins(column, names)
    ]
    if missing:
        raise DataError("MissingColumn", explain_missing(missing, where, names))
    for column in columns:
        if ambiguous := explain_twins(column, where, names):
            raise DataError("ColumnsAmbiguous", ambiguous)


def _name_type(kind: pa.DataType) -> str:
    """The name of a type that is not learned, as `explain_type` takes it."""
    import pyarrow as pa

    is_kind = pa.types
    names = {
        BYTES: any(
            (
                is_kind.is_binary(kind),
                is_kind.is_large_binary(kind),
                is_kind.is_binary_view(kind),
                is_kind.is_fixed_size_binary(kind),
            )
        ),
        HALF_FLOATS: is_kind.is_float16(kind),
        LONG_DECIMALS: is_kind.is_decimal(kind),
        TIMES_OF_DAY: is_kind.is_time(kind),
        MAPS: is_kind.is_map(kind),
        STRUCTURES: is_kind.is_struct(kind),
    }
    return next((name for name, is_it in names.items() if is_it), str(kind))


def _null_value_error(column: str, where: str) -> DataError:
    return DataError("NullValue", f"column {column} has rows without a value in {where}: remove these rows")


def _column_type_error(column: str, where: str, kind: str, label: str | None) -> DataError:
    explain_column = explain_label_type if column == label else explain_type
    return DataError("ColumnType", explain_column(column, where, kind))
