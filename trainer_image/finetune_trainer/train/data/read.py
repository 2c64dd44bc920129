"""Streams the rows of a split from a Delta table, Parquet or JSON lines."""

from __future__ import annotations

import gzip
import json
import zlib
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from finetune_trainer import storage
from finetune_trainer.columns import Column, Kind
from finetune_trainer.documents import ENCODING
from finetune_trainer.outcome import DataError, TrainingError, first_line
from finetune_trainer.turns import are_fields_of_messages

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator
    from typing import BinaryIO

    import pyarrow as pa
    from fsspec import AbstractFileSystem

    from finetune_crds.data import Splits

SPLIT_COLUMN = "split"
_BATCH_ROWS = 1024
# A Parquet file is read through a buffer of this size for each column.
_BUFFER_BYTES = 1 << 20

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
        label: column whose values may be booleans and integers, besides text.

    Raises:
        DataError: the table, a file or a column is missing or corrupt, or a value is null.
    """
    if splits.type == "Delta":
        yield from _delta(splits, name, columns, may_be_null, label)
        return
    place = getattr(splits, name)
    if place is None:
        return
    files, found = _files(place)
    rows_of = _parquet if splits.type == "Parquet" else _json_lines
    for file in found:
        yield from rows_of(files, file, columns, may_be_null, label)


def schema(splits: Splits) -> list[Column]:
    """Return the columns of the training split: of a table, of its first Parquet file, or of its first JSON lines.

    Raises:
        DataError: the table or the file is missing or corrupt.
    """
    if splits.type == "Delta":
        return _arrow_columns(_delta_dataset(splits).schema)
    assert splits.train is not None  # noqa: S101 - the schema demands it
    files, found = _files(splits.train)
    if splits.type == "JSONLines":
        return _json_columns(files, found)
    where = _shown(files, found[0])
    with _opened_parquet(lambda: files.open(found[0]), where, "write it again") as parquet:
        return _arrow_columns(parquet.schema_arrow)


def has_token_ids(splits: Splits, encoding: str) -> bool:
    """Whether the splits are a table as a preparation wrote it, with the token ids of an encoding, see `Documents.encoding`.

    Raises:
        DataError: the table is missing or corrupt.
    """
    if splits.type != "Delta":
        return False
    # NB: a later commit that changes texts leaves the token ids of the old ones in the table.
    for commit in _delta_table(splits).history(1):
        with suppress(LookupError, ValueError, TypeError):
            return bool(json.loads(commit["userMetadata"])[ENCODING] == encoding)
    return False


def _arrow_columns(schema: pa.Schema) -> list[Column]:
    return [Column(field.name, _kind(field.type), str(field.type)) for field in schema]


def _kind(kind: pa.DataType) -> Kind:
    import pyarrow as pa

    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "text"
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        return "label"
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if is_list and pa.types.is_struct(kind.value_type):
        fields = {field.name for field in kind.value_type}
        return "messages" if are_fields_of_messages(fields) else "other"
    return "other"


def _json_columns(files: AbstractFileSystem, found: list[str]) -> list[Column]:
    """The columns of the first rows of JSON lines: each with the kind of its first value."""
    first: dict[str, Any] = {}
    for file in found:
        with files.open(file, "rb", compression="infer") as opened:
            for row in islice(_objects(opened, _shown(files, file)), _BATCH_ROWS):
                first |= {name: value for name, value in row.items() if first.get(name) in (None, [])}
        if first:
            break
    return [Column(name, _kind_of_value(value), type(value).__name__) for name, value in first.items()]


def _kind_of_value(value: Any) -> Kind:
    if isinstance(value, str):
        return "text"
    if isinstance(value, bool | int):
        return "label"
    is_structures = isinstance(value, list) and value and isinstance(value[0], dict)
    # A message that calls tools may have no content.
    return "messages" if is_structures and are_fields_of_messages({*value[0], "content"}) else "other"


def _files(place: str) -> tuple[AbstractFileSystem, list[str]]:
    """The files of a split, sorted; at least one."""
    try:
        files, path = storage.filesystem(place)
        found = _visible_files(files, path) if files.exists(path) else None
    except Exception as error:
        reason = storage.failure(error)
        if reason is None:
            raise
        raise TrainingError("DataUnreadable", f"{place} cannot be read: {reason}") from error
    if found is None:
        raise DataError("MissingFile", f"{place} does not exist: mount the volume or correct data.splits")
    if not found:
        raise DataError("MissingFile", f"{place} has no files: check how the splits were written")
    return files, found


def _shown(files: AbstractFileSystem, file: str) -> str:
    """A file's name, for errors."""
    return str(files.unstrip_protocol(file)).removeprefix("file://")


def delta_version(splits: Splits) -> int | None:
    """Return the version of the Delta table to read; None for files.

    Raises:
        DataError: the table or its version does not exist, or its log is corrupt.
    """
    return _delta_table(splits).version() if splits.type == "Delta" else None


def _visible_files(files: AbstractFileSystem, path: str) -> list[str]:
    """Return the files at a path, sorted, without the hidden files that Spark writes."""
    root = files._strip_protocol(path)  # noqa: SLF001 - fsspec has no public name for it
    return sorted(
        file
        for file in files.find(path)
        if file == root
        or not any(
            part.startswith(("_", ".")) or not part for part in file.removeprefix(root).lstrip("/").split("/")
        )
    )


def _delta_table(splits: Splits) -> Any:
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError, TableNotFoundError

    assert splits.path is not None  # noqa: S101 - the schema demands it
    path = splits.path.replace("s3a://", "s3://", 1)
    try:
        return DeltaTable(path, version=splits.version, storage_options=storage.delta_options(path))
    except TableNotFoundError as error:
        raise DataError(
            "MissingTable", f"data.splits.path {splits.path} is not a Delta table: correct the path"
        ) from error
    except Exception as error:
        if splits.version is not None and "version" in str(error).lower():
            raise DataError(
                "MissingVersion",
                f"the Delta table {splits.path} has no version {splits.version}: name one that it has",
            ) from error
        if isinstance(error, DeltaError) and "Json error" in str(error):
            raise DataError(
                "CorruptData",
                f"the log of the Delta table {splits.path} cannot be read ({first_line(error)}): restore the table",
            ) from error
        if storage.is_object_store(path):
            raise TrainingError(
                "DataUnreadable", f"the Delta table {splits.path} cannot be read: {first_line(error)[:300]}"
            ) from error
        raise


def _delta(
    splits: Splits, name: str, columns: list[str], may_be_null: Container[str | None], label: str | None
) -> Iterator[Rows]:
    import pyarrow.dataset as ds

    table = f"the Delta table {splits.path}"
    dataset = _delta_dataset(splits)
    _require(dataset.schema, [SPLIT_COLUMN, *columns], table, label)
    for fragment in dataset.get_fragments(filter=ds.field(SPLIT_COLUMN) == name):
        where = f"{fragment.path} of {table}"
        batches = _parquet_batches(fragment.open, columns, where, "restore the table", label=label, only=name)
        for batch in batches:
            yield from _columns_of(batch, f"the split {name} of {splits.path}", may_be_null)


def _delta_dataset(splits: Splits) -> Any:
    from deltalake.exceptions import DeltaProtocolError

    try:
        return _delta_table(splits).to_pyarrow_dataset()
    except DeltaProtocolError as error:
        raise DataError(
            "UnsupportedTable",
            f"the Delta table {splits.path} has features that cannot be read here ({first_line(error)}): write it "
            "without them",
        ) from error


def _parquet(
    files: AbstractFileSystem,
    file: str,
    columns: list[str],
    may_be_null: Container[str | None],
    label: str | None,
) -> Iterator[Rows]:
    where = _shown(files, file)
    for batch in _parquet_batches(lambda: files.open(file), columns, where, "write it again", label=label):
        yield from _columns_of(batch, where, may_be_null)


def _parquet_batches(
    opening: Callable[[], Any],
    columns: list[str],
    where: str,
    remedy: str,
    *,
    label: str | None,
    only: str | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield some columns of a Parquet file; `only`: the rows of this split, if the file has a split column.

    Files of a Delta table omit the columns that it is partitioned by.
    """
    import pyarrow.compute as pc

    with _opened_parquet(opening, where, remedy) as parquet:
        _require(parquet.schema_arrow, columns, where, label)
        if only is None or SPLIT_COLUMN not in parquet.schema_arrow.names:
            yield from parquet.iter_batches(_BATCH_ROWS, columns=columns)
            return
        for batch in parquet.iter_batches(_BATCH_ROWS, columns=[*columns, SPLIT_COLUMN]):
            yield batch.filter(pc.equal(batch.column(SPLIT_COLUMN), only)).select(columns)


@contextmanager
def _opened_parquet(opening: Callable[[], Any], where: str, remedy: str) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with (
        _corruption_named(where, remedy, lambda: _read_through(opening())),
        opening() as opened,
        # NB: a scan of a pyarrow.dataset holds a whole row group, of any size.
        pq.ParquetFile(opened, buffer_size=_BUFFER_BYTES, pre_buffer=False) as parquet,
    ):
        yield parquet


def _columns_of(batch: pa.RecordBatch, where: str, may_be_null: Container[str | None]) -> Iterator[Rows]:
    for column in batch.schema.names:
        if batch.column(column).null_count and column not in may_be_null:
            raise _null_value(column, where)
    if batch.num_rows:
        with _corruption_named(where, "write it again"):
            columns = batch.to_pydict()
        yield columns


def _json_lines(
    files: AbstractFileSystem,
    file: str,
    columns: list[str],
    may_be_null: Container[str | None],
    label: str | None,
) -> Iterator[Rows]:
    """Yield the rows of a JSON lines file; its extension selects the compression."""
    where = _shown(files, file)
    with files.open(file, "rb", compression="infer") as opened:
        rows = _objects(opened, where)
        while batch := list(islice(rows, _BATCH_ROWS)):
            for column in columns:
                if column not in may_be_null and not any(column in row for row in batch):
                    raise _missing_column([column], list(batch[0]), where)
                values = [row.get(column) for row in batch]
                if None in values and column not in may_be_null:
                    raise _null_value(column, where)
                given = (value for value in values if value is not None)
                readable = str | bool | int if column == label else str | list
                other = next((value for value in given if not isinstance(value, readable)), None)
                if other is not None:
                    raise _column_type(column, where, type(other).__name__, label)
            yield {column: [row.get(column) for row in batch] for column in columns}


def _objects(lines: BinaryIO, where: str) -> Iterator[dict[str, Any]]:
    number = 0
    try:
        for number, line in enumerate(lines, start=1):  # noqa: B007 - the number is for the error
            if line.strip():
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise TypeError("it is not a JSON object")  # noqa: TRY301
                yield row
    except (ValueError, TypeError, RecursionError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            "CorruptData",
            f"line {max(number, 1)} of {where} cannot be read ({first_line(error)}): correct it, or write the file "
            "again",
        ) from error


@contextmanager
def _corruption_named(
    where: str, remedy: str, read_through: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Raise DataError for a corrupt or missing file; storage failures, which a retry may solve, pass through.

    read_through: reads every byte of the file; raises the storage's error, if any.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise DataError("CorruptData", f"{where} is missing from the storage: {remedy}") from error
    except (ValueError, OSError) as error:
        # NB: Arrow raises OSError both for corrupt pages and for failed reads.
        if isinstance(error, OSError):
            read_through()
        raise DataError("CorruptData", f"{where} cannot be read ({first_line(error)}): {remedy}") from error


def _read_through(opened: Any) -> None:
    with opened:
        while opened.read(_BUFFER_BYTES):
            pass


def _require(schema: pa.Schema, columns: list[str], where: str, label: str | None) -> None:
    import pyarrow as pa

    missing = [column for column in columns if column not in schema.names]
    if missing:
        raise _missing_column(missing, schema.names, where)
    texts, lists = (pa.types.is_string, pa.types.is_large_string), (pa.types.is_list, pa.types.is_large_list)
    labels = (pa.types.is_boolean, pa.types.is_integer)
    for column in columns:
        kind = schema.field(column).type
        readable = texts + (labels if column == label else lists)
        if not any(is_kind(kind) for is_kind in readable):
            raise _column_type(column, where, str(kind), label)


def _missing_column(missing: list[str], known: list[str], where: str) -> DataError:
    return DataError(
        "MissingColumn", f"{where} has no column {', '.join(missing)}: it has {', '.join(sorted(known))}"
    )


def _null_value(column: str, where: str) -> DataError:
    return DataError("NullValue", f"column {column} has rows without a value in {where}: filter them out")


def _column_type(column: str, where: str, kind: str, label: str | None) -> DataError:
    wanted = "examples are text, or lists of {role, content}"
    if column == label:
        wanted = "labels are booleans, 1 and 0, or the texts true and false"
    return DataError("ColumnType", f"column {column} of {where} holds {kind}: {wanted}")
