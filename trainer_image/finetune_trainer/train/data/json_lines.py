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
    """Yield the rows of a JSON lines file; its extension selects the compression."""
    where = format_address(files, file)
    with open_lines(files, file) as lines:
        rows = _parse_objects(lines, where)
        while batch := list(islice(rows, split_columns.BATCH_ROWS)):
            names = dict.fromkeys(name for row in batch for name in row)
            check_names([name for name in columns if name not in may_be_null], columns, names, where)
            converted: Rows = {}
            for column in columns:
                converted[column] = values = [
                    _convert_value(row.get(column), is_label=column == label) for row in batch
                ]
                if None in values and column not in may_be_null:
                    raise null_value_error(column, where)
                present_values = (value for value in values if value is not None)
                readable_types = str | bool | int if column == label else str | list
                unreadable_value = next(
                    (value for value in present_values if not isinstance(value, readable_types)), None
                )
                if unreadable_value is not None:
                    kind = (
                        STRUCTURES
                        if isinstance(unreadable_value, dict)
                        else plain_text.name_type(unreadable_value)
                    )
                    raise column_type_error(column, where, kind, label)
            yield converted


def infer_columns(files: AbstractFileSystem, paths: list[str]) -> list[Column]:
    """Return the columns in the first rows of each JSON lines file, each with the kind of its first value that is neither null nor []."""
    first: dict[str, Any] = {}
    for file in paths:
        with open_lines(files, file) as opened:
            for row in islice(_parse_objects(opened, format_address(files, file)), split_columns.BATCH_ROWS):
                first |= {name: value for name, value in row.items() if first.get(name) in (None, [])}
    return [
        Column(name, _classify_value(value), plain_text.name_type(value)) for name, value in first.items()
    ]


def _parse_objects(lines: BinaryIO, where: str) -> Iterator[dict[str, Any]]:
    number, line = 1, b""
    try:
        for next_line in lines:
            line = next_line
            if line.strip():
                row = parse_json(line)
                if not isinstance(row, dict):
                    raise TypeError("it is not a JSON object")  # noqa: TRY301
                yield row
            # NB: reading the next line can fail too, in a file that is cut off: the error must not quote this line.
            number, line = number + 1, b""
    except (ValueError, TypeError, RecursionError, EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and not is_corrupt(error):
            raise
        raise DataError(
            "CorruptData",
            explain_unreadable_line(number, where, find_other_format(line) or first_line(error)),
        ) from error


def _convert_value(value: Any, *, is_label: bool) -> Any:
    """Return a JSON value: labels, lists and objects unchanged, other values as text."""
    return plain_text.write(value) if not is_label and plain_text.is_plain(value) else value


def _classify_value(value: Any) -> Kind:
    if isinstance(value, str):
        return "text"
    if isinstance(value, bool | int):
        return "label"
    is_structures = isinstance(value, list) and value and isinstance(value[0], dict)
    # `content` counts as present: a message that calls tools may have none.
    return "messages" if is_structures and are_fields_of_messages({*value[0], "content"}) else "other"
