"""Reads the rows of a split from a Delta table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune_trainer.pod.exit_status import DataError, TrainingError, first_line
from finetune_trainer.storage import filesystems
from finetune_trainer.train.data.parquet_files import convert_batch, read_batches
from finetune_trainer.train.data.split_columns import SPLIT_COLUMN, Rows, check_columns

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from finetune_crds.data import Splits

_MAX_MESSAGE_CHARS = 300
# Parts of Delta's messages about a log in which a file is corrupt or missing.
_BROKEN_LOG = ("Json error", "Parquet error", "Expected contiguous commit files", "found in delta log")
# What to do about a corrupt file of a table, for messages.
_REMEDY = "restore the table"


def open_table(splits: Splits) -> Any:
    """Open the version of the table that the recipe names, or the newest.

    Raises:
        DataError: the table or its version does not exist, its log is corrupt, or it uses features that the trainer cannot read.
        TrainingError: the object store failed.
    """
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
        # NB: only a DeltaError: an OSError may quote XML of the object store, in which the words occur too.
        text = str(error) if isinstance(error, DeltaError) else ""
        if "Unsupported" in text:
            raise _build_feature_error(splits, error) from error
        if any(mark in text for mark in _BROKEN_LOG):
            raise DataError(
                "CorruptData",
                f"the log of the Delta table {splits.path} cannot be read ({_shorten(error)}): restore the table",
            ) from error
        if splits.version is not None and "version" in text.lower():
            raise DataError(
                "MissingVersion",
                f"the Delta table {splits.path} has no version {splits.version}: set an existing version",
            ) from error
        if filesystems.is_object_store(path):
            raise TrainingError(
                "DataUnreadable",
                f"the Delta table {splits.path} cannot be read: {first_line(error)[:_MAX_MESSAGE_CHARS]}",
            ) from error
        raise


def open_dataset(splits: Splits) -> Any:
    """Open the table as an Arrow dataset.

    Raises:
        DataError: as in `open_table`.
    """
    from deltalake.exceptions import DeltaProtocolError

    try:
        return open_table(splits).to_pyarrow_dataset()
    except DeltaProtocolError as error:
        raise _build_feature_error(splits, error) from error


def _build_feature_error(splits: Splits, error: Exception) -> DataError:
    return DataError(
        "UnsupportedTable",
        f"the Delta table {splits.path} uses features that the trainer cannot read ({_shorten(error)}): rewrite it "
        "without them",
    )


def _shorten(error: Exception) -> str:
    """Return the first line of Delta's message, without the internal representation of a file."""
    return first_line(error).partition(": ParsedLogPath")[0][:_MAX_MESSAGE_CHARS]


def read_rows(
    splits: Splits, name: str, columns: list[str], may_be_null: Container[str | None], label: str | None
) -> Iterator[Rows]:
    """Yield the rows of a split as batches of columns; the arguments and errors are the same as in `read.read`."""
    import pyarrow.dataset as ds

    table = f"the Delta table {splits.path}"
    dataset = open_dataset(splits)
    check_columns(dataset.schema, [SPLIT_COLUMN, *columns], table, label)
    for fragment in dataset.get_fragments(filter=ds.field(SPLIT_COLUMN) == name):
        where = f"{fragment.path} of {table}"
        # The value of each column if the file lacks it: that of the partition, or null if the column was added after the file.
        partition = ds.get_partition_keys(fragment.partition_expression)
        absent = {column: partition.get(column) for column in columns}
        batches = read_batches(fragment.open, columns, where, _REMEDY, label=label, only=name, absent=absent)
        for batch in batches:
            yield from convert_batch(batch, f"the split {name} of {splits.path}", _REMEDY, may_be_null, label)
