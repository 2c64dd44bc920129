"""Streams the rows of a split from a Delta table, Parquet or JSON lines."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from finetune_crds.data import parse_table
from finetune_trainer.examples.columns import Column
from finetune_trainer.examples.split_origin import SplitOrigin
from finetune_trainer.examples.token_columns import ENCODING
from finetune_trainer.pod.exit_status import TrainingError
from finetune_trainer.train.data import delta_table, json_lines, parquet_files
from finetune_trainer.train.data.split_columns import NO_TYPE, Rows, describe_columns
from finetune_trainer.train.data.split_files import (
    find_files,
)

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping

    from finetune_crds.data import Splits


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
        may_be_null: columns in which a row may have no value. A JSON lines file may lack them; a Parquet file only if another file of the
            split has them.
        label: column whose values may also be booleans and integers.

    Raises:
        DataError: the table, a file or a column is missing or corrupt, or a value is null in a column that is not in `may_be_null`.
    """
    place = splits.path or getattr(splits, name)
    if place is None:
        return
    if splits.are_delta_tables:
        yield from delta_table.read_rows(splits, name, columns, may_be_null, label)
        return
    files, paths = find_files(place, splits.type)
    if splits.type == "JSONLines":
        for file in paths:
            yield from json_lines.read_rows(files, file, columns, may_be_null, label)
        return
    optional = parquet_files.find_columns(
        files, paths, {column for column in columns if column in may_be_null}
    )
    for file in paths:
        yield from parquet_files.read_rows(files, file, columns, may_be_null, label, optional=optional)


def read_schema(splits: Splits) -> list[Column]:
    """Return the columns of the training split, from the schema of its table or its files, or from the first rows of each JSON lines file.

    Raises:
        DataError: the table or the file is missing or corrupt.
    """
    if splits.are_delta_tables:
        return describe_columns(delta_table.open_dataset(splits, "train").schema)
    assert splits.train is not None  # noqa: S101 - the schema demands it
    files, paths = find_files(splits.train, splits.type)
    if splits.type == "JSONLines":
        return json_lines.infer_columns(files, paths)
    columns: dict[str, Column] = {}
    for schema in parquet_files.read_schemas(files, paths):
        file_columns = {column.name: column for column in describe_columns(schema)}
        # The first file in which a column has values decides on its type.
        columns = file_columns | {name: column for name, column in columns.items() if column.type != NO_TYPE}
    return list(columns.values())


def has_token_ids(splits: Splits, encoding: str) -> bool:
    """Whether the splits are a table with the token ids of an encoding (`Documents.encoding`), unchanged since its preparation.

    Raises:
        DataError: the table is missing or corrupt.
    """
    if splits.type != "Delta":
        return False
    # NB: the preparation writes the encoding into its own commit. Read only the newest commit: if another commit came after the
    # preparation, it may have changed texts without their token ids.
    for commit in delta_table.open_table(splits, "train").history(1):
        with suppress(LookupError, ValueError, TypeError):
            return bool(json.loads(commit["userMetadata"])[ENCODING] == encoding)
    return False


def pin_versions(splits: Splits) -> Splits:
    """Return the splits with the versions of their Delta tables that are the newest now; versions in the recipe stay. Files have none.

    Raises:
        DataError: a table or its version does not exist, or its log is corrupt.
        TrainingError: the newest versions of the tables are of different preparations.
    """
    if splits.type == "Delta":
        return splits.pin(str(delta_table.open_table(splits, "train").version()))
    unpinned_splits = [split for split, name in splits.tables.items() if parse_table(name)[1] is None]
    tables = {split: delta_table.open_table(splits, split) for split in unpinned_splits}
    origins = {split: _find_origin(table) for split, table in tables.items()}
    _check_origins(splits, origins)
    return splits.pin(",".join(f"{split}={table.version()}" for split, table in tables.items()))


def _find_origin(table: Any) -> SplitOrigin | None:
    """Return the origin of the rows of an open table; None if the commit of its version is not of a preparation."""
    commits = (commit for commit in table.history(1) if commit.get("version") == table.version())
    return next((SplitOrigin.parse(commit.get("userMetadata")) for commit in commits), None)


def _check_origins(splits: Splits, origins: Mapping[str, SplitOrigin | None]) -> None:
    """Check that tables of splits are of the same version of a preparation's output, so that their rows are disjoint.

    A preparation saves its tables one after another.

    Raises:
        TrainingError: they are of different versions, or of different outputs.
    """
    saved = [(split, origin) for split, origin in origins.items() if origin is not None]
    for split, origin in saved[1:]:
        first_split, first_origin = saved[0]
        if (origin.path, origin.version) != (first_origin.path, first_origin.version):
            raise TrainingError(
                "MixedPreparations",
                f"data.splits.{first_split} {splits.tables[first_split]} is of version {first_origin.version} of {first_origin.path}, "
                f"and data.splits.{split} {splits.tables[split]} of version {origin.version} of {origin.path}: wait until the "
                "preparation has saved its tables, or name the versions to read with @v",
            )
