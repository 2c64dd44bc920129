"""Reads the rows of a split from files of JSON lines."""

from __future__ import annotations

import zlib
from itertools import islice
from typing import TYPE_CHECKING, Any

from finetune_trainer.examples import plain_text
from finetune_trainer.examples.chat_messages import are_fields_of_messages
from finetune_trainer.examples.columns import Column, Kind
from finetune_trainer.examples.encodings import parse_json
from finetune_trainer.examples.file_formats import STRUCTURES, explain_unreadable_line, find_other_format
from finetune_trainer.pod.exit_status import DataError, first_line
from finetune_trainer.train.data import split_columns
from finetune_trainer.train.data.split_columns import (
    Rows,
    check_names,
    column_type_error,
    null_value_error,
)
from finetune_trainer.train.data.split_files import format_address, is_corrupt, open_lines

if TYPE_CHECKING:
    from collections.abc import Container, Iterator
    from typing import BinaryIO

    from fsspec import AbstractFileSystem


def read_rows(
    files: AbstractFileSystem,
    file: str,
    columns: list[str],
    may_be_null: Container[str | None],
    label: str | None,
) -> Iterator[Rows]:
    """Yield the rows of a JSON lines file as batches of columns; the file's extension selects the compression.

    The last three arguments and the errors are those of `read.read`.
    """
    where = format_address(files, file)
    required = [name for name in columns if name not in may_be_null]
    with open_lines(files, file) as lines:
        rows = _parse_objects(lines, where)
        while batch := list(islice(rows, split_columns.BATCH_ROWS)):
            names_in_batch = dict.fromkeys(name for row in batch for name in row)
            check_names(required, columns, names_in_batch, where)
            converted: Rows = {}
            for column in columns:
                is_label = column == label
                values = [_convert_value(row.get(column), is_label=is_label) for row in batch]
                if None in values and column in required:
                    raise null_value_error(column, where)
                readable_types = str | bool | int if is_label else str | list
                for value in values:
                    if value is not None and not isinstance(value, readable_types):
                        type_name = STRUCTURES if isinstance(value, dict) else plain_text.name_type(value)
                        raise column_type_error(column, where, type_name, label)
                converted[column] = values
            yield converted


def infer_columns(files: AbstractFileSystem, paths: list[str]) -> list[Column]:
    """Return the columns in the first rows of each JSON lines file, each with the kind of its first value that is neither null nor []."""
    first_values: dict[str, Any] = {}
    for file in paths:
        with open_lines(files, file) as lines:
            for row in islice(_parse_objects(lines, format_address(files, file)), split_columns.BATCH_ROWS):
                for name, value in row.items():
                    if first_values.get(name) in (None, []):
                        first_values[name] = value
    return [
        Column(name, _classify_value(value), plain_text.name_type(value))
        for name, value in first_values.items()
    ]


def _parse_objects(lines: BinaryIO, where: str) -> Iterator[dict[str, Any]]:
    """Yield the object in each line that is not blank; raises DataError for a line that has none."""
    number, line = 1, b""
    try:
        for next_line in lines:
            line = next_line
            if line.strip():
                row = parse_json(line)
                if not isinstance(row, dict):
                    raise TypeError("it is not a JSON object")  # noqa: TRY301
                yield row
            # NB: in a truncated file, reading the next line fails: the content of this line must not explain that error.
            number, line = number + 1, b""
    except (ValueError, TypeError, RecursionError, EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and not is_corrupt(error):
            raise
        raise DataError(
            "CorruptData",
            explain_unreadable_line(number, where, find_other_format(line) or first_line(error)),
        ) from error


def _convert_value(value: Any, *, is_label: bool) -> Any:
    """Return a JSON value: labels, lists, objects and null unchanged, other values as text."""
    if is_label or not plain_text.is_plain(value):
        return value
    return plain_text.write(value)


def _classify_value(value: Any) -> Kind:
    if isinstance(value, str):
        return "text"
    if isinstance(value, bool | int):
        return "label"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        # `content` is added because a message that calls tools may lack it.
        fields = {*value[0], "content"}
        return "messages" if are_fields_of_messages(fields) else "other"
    return "other"
