"""Reads the rows of a split from a Delta table: one with a split column at a path, or a table of the split by its name."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune_crds.data import parse_table
from finetune_trainer.pod.exit_status import DataError, TrainingError, first_line
from finetune_trainer.storage import filesystems
from finetune_trainer.train.data.parquet_files import convert_batch, read_batches
from finetune_trainer.train.data.split_columns import SPLIT_COLUMN, Rows, check_columns

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping

    from finetune_crds.data import Splits

_MAX_MESSAGE_CHARS = 300
# The code of S3 for temporary credentials that are no longer valid.
_EXPIRED = "ExpiredToken"
# Age from which credentials of a catalog, which are valid for about an hour, are renewed before the next file.
_MAX_CREDENTIALS_SECONDS = 30 * 60
# Parts of Delta's messages about a log in which a file is corrupt or missing.
_BROKEN_LOG = ("Json error", "Parquet error", "Expected contiguous commit files", "found in delta log")
# What to do about a corrupt file of a table, for messages.
_REMEDY = "restore the table"


class _TableVersion(NamedTuple):
    """A version of a table.

    field: the recipe's field that names the table.
    address: the path or the name of the table, as the recipe has it.
    version: None for the newest.
    options: the options with which deltalake reads the URI.
    """

    field: str
    address: str
    version: int | None
    uri: str
    options: Mapping[str, str]

    @property
    def label(self) -> str:
        """The table, for messages."""
        return f"the Delta table {self.address}"


def _locate(splits: Splits, name: str) -> _TableVersion:
    """Return the table of a split.

    Raises:
        DataError, TrainingError: as in `unity_tables.locate`.
    """
    if splits.type == "Delta":
        assert splits.path is not None  # noqa: S101 - the schema demands it
        path = splits.path.replace("s3a://", "s3://", 1)
        options = filesystems.build_delta_options(path)
        return _TableVersion("data.splits.path", splits.path, splits.version, path, options)
    # The SDK takes half a second to import.
    from finetune_trainer.storage import unity_tables

    table, version = parse_table(splits.tables[name])
    field = f"data.splits.{name}"
    files = unity_tables.locate(table, field)
    return _TableVersion(field, table, version, files.uri, files.options)


def open_table(splits: Splits, name: str) -> Any:
    """Open the table of a split, at the version that the recipe names, or the newest.

    Raises:
        DataError: the table or its version does not exist, its log is corrupt, or it uses features that the trainer cannot read.
        TrainingError: the object store or the catalog failed.
    """
    return _open(_locate(splits, name))


def _open(table: _TableVersion) -> Any:
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError, TableNotFoundError

    try:
        return DeltaTable(table.uri, version=table.version, storage_options=dict(table.options))
    except TableNotFoundError as error:
        raise DataError(
            "MissingTable",
            f"{table.field} {table.address} is not a Delta table: correct the {'path' if table.field.endswith('path') else 'name'}",
        ) from error
    except Exception as error:
        # NB: only a DeltaError: an OSError may quote XML of the object store, in which the words occur too.
        text = str(error) if isinstance(error, DeltaError) else ""
        if "Unsupported" in text:
            raise _build_feature_error(table.label, error) from error
        if any(mark in text for mark in _BROKEN_LOG):
            raise DataError(
                "CorruptData",
                f"the log of {table.label} cannot be read ({_shorten(error)}): restore the table",
            ) from error
        if table.version is not None and "version" in text.lower():
            raise DataError(
                "MissingVersion",
                f"{table.label} has no version {table.version}: set an existing version",
            ) from error
        if filesystems.is_object_store(table.uri):
            raise TrainingError(
                "DataUnreadable",
                f"{table.label} cannot be read: {first_line(error)[:_MAX_MESSAGE_CHARS]}",
            ) from error
        raise


def open_dataset(splits: Splits, name: str) -> Any:
    """Open the table of a split as an Arrow dataset.

    Raises:
        DataError: as in `open_table`.
    """
    table = _locate(splits, name)
    return _convert_to_dataset(_open(table), table.label)


def _convert_to_dataset(delta: Any, label: str) -> Any:
    """Return an open table as an Arrow dataset.

    Raises:
        DataError: it uses features that the trainer cannot read.
    """
    from deltalake.exceptions import DeltaProtocolError

    try:
        return delta.to_pyarrow_dataset()
    except DeltaProtocolError as error:
        raise _build_feature_error(label, error) from error


def _build_feature_error(label: str, error: Exception) -> DataError:
    return DataError(
        "UnsupportedTable",
        f"{label} uses features that the trainer cannot read ({_shorten(error)}): rewrite it without them",
    )


def _shorten(error: Exception) -> str:
    """Return the first line of Delta's message, without the internal representation of a file."""
    return first_line(error).partition(": ParsedLogPath")[0][:_MAX_MESSAGE_CHARS]


def read_rows(
    splits: Splits,
    name: str,
    columns: list[str],
    may_be_null: Container[str | None],
    label: str | None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Rows]:
    """Yield the rows of a split as batches of columns; the arguments and errors are the same as in `read.read`.

    Args:
        clock: returns seconds.
    """
    address = describe_table(splits, name)
    table = f"the Delta table {address}"
    located_seconds = clock()
    delta = open_table(splits, name)
    dataset = _convert_to_dataset(delta, table)
    # The table of one split has no split column.
    only = name if splits.type == "Delta" else None
    check_columns(dataset.schema, [*([SPLIT_COLUMN] if only else []), *columns], table, label)
    # NB: a table that is opened again must be at the same version, whose files these are.
    pinned_splits = splits.pin(f"{name}={delta.version()}")
    fragments = {fragment.path: fragment for fragment in list_fragments(dataset, only)}
    for path in list(fragments):
        if pinned_splits.tables and clock() - located_seconds > _MAX_CREDENTIALS_SECONDS:
            located_seconds = clock()
            dataset = open_dataset(pinned_splits, name)
            fragments = {fragment.path: fragment for fragment in list_fragments(dataset, only)}
        fragment = fragments[path]
        where = f"{path} of {table}"
        # The value of each column if the file lacks it: that of the partition, or null if the column was added after the file.
        partition = get_partition_values(fragment)
        absent = {column: partition.get(column) for column in columns}
        with _name_expiry(table):
            batches = read_batches(
                fragment.open, columns, where, _REMEDY, label=label, only=only, absent=absent
            )
            for batch in batches:
                yield from convert_batch(batch, f"the split {name} of {address}", _REMEDY, may_be_null, label)


@contextmanager
def _name_expiry(table: str) -> Iterator[None]:
    """Raise TrainingError for credentials that expire while a file is read; the next attempt gets others."""
    try:
        yield
    except OSError as error:
        if _EXPIRED not in str(error):
            raise
        raise TrainingError(
            "CredentialsExpired",
            f"the credentials for {table} expired while a file was read: give the pods more CPU, or write the table in more files",
        ) from error


def describe_table(splits: Splits, name: str) -> str:
    """Return the path or the name of the table of a split, for messages."""
    return splits.path or parse_table(splits.tables[name])[0]


def list_fragments(dataset: Any, only: str | None) -> Iterator[Any]:
    """Yield the files of a dataset: those that can have rows of the split `only`, or all files."""
    import pyarrow.dataset as ds

    fragments: Iterator[Any] = dataset.get_fragments(
        filter=None if only is None else ds.field(SPLIT_COLUMN) == only
    )
    return fragments


def get_partition_values(fragment: Any) -> dict[str, Any]:
    """Return the values of the columns that a table is partitioned by, in the rows of a file."""
    import pyarrow.dataset as ds

    values: dict[str, Any] = ds.get_partition_keys(fragment.partition_expression)
    return values
