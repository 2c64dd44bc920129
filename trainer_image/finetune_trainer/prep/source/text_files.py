"""Refuses text files that Spark would misread: not UTF-8, JSON lines with arrays or halves of characters, pointers of Git LFS.

NB: Spark silently reads bytes that are not UTF-8 as U+FFFD, and half of a surrogate pair as a question mark.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

import numpy as np
from pyspark.sql import functions as sf

from finetune_trainer.examples.encodings import HALF_CHARACTER, NOT_UTF8
from finetune_trainer.examples.file_formats import (
    ARRAY,
    BEGINNING_OF_POINTER,
    POINTER,
    explain_unreadable_line,
)
from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.prep.source.location import as_named

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark.sql import Column, DataFrame, Row, SparkSession

# Columns of frames of lines: the text, the file, where the line's block of the file begins, the size of the file, a number that ascends with
# the lines of a block, and why the line is unreadable.
_VALUE, _FILE, _BLOCK, _BYTES, _NUMBER, _REASON = "value", "file", "block", "bytes", "number", "reason"
# A pointer of Git LFS is smaller than this. Source: git-lfs, docs/spec.md.
_POINTER_LIMIT_BYTES = 1024
# White space of JSON.
_JSON_BLANKS = " \t\r\n"
# An escaped half of a surrogate pair, after an even number of backslashes, without the other half after or before it.
_HALF_ESCAPED = (
    r"(?<!\\)(?:\\\\)*\\u(?:"
    r"[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    r"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u)[dD][c-fC-F][0-9a-fA-F]{2})"
)


class TextFiles(NamedTuple):
    """The files of a source of JSON Lines or CSV, for `check`."""

    kind: str
    paths: list[str]
    settings: Mapping[str, str]


@contextmanager
def checking_on_failure(spark: SparkSession, files: TextFiles | None) -> Iterator[None]:
    """If the columns of files are refused, check whether unreadable lines are the cause.

    Raises:
        DataError: the error of the first unreadable line; if all lines are readable, the error of the columns.
    """
    try:
        yield
    except DataError:
        if files is not None:
            check(spark, files.kind, files.paths, files.settings)
        raise


def check(
    spark: SparkSession, kind: str, paths: Sequence[str], settings: Mapping[str, str] | None = None
) -> None:
    """Read the lines of text files, and check that Spark reads them correctly.

    Args:
        kind: JSONLines or CSV.
        settings: settings of the reader.

    Raises:
        DataError: a file is a pointer of Git LFS, or a line is unreadable; the message names it.
    """
    lines = _read_lines(spark, [*paths], settings)
    pointer = _find_pointer(lines)
    if pointer is not None:
        raise DataError("UnreadableSource", explain_unreadable_line(1, as_named(unquote(pointer)), POINTER))
    unreadable = lines.where(_find_reason(kind).isNotNull()).select(_FILE).head()
    if unreadable is None:
        return
    file = str(unreadable[_FILE])
    number, reason = _find_line(lines.where(sf.col(_FILE) == file), kind)
    raise DataError("UnreadableSource", explain_unreadable_line(number, as_named(unquote(file)), reason))


def is_pointer(spark: SparkSession, file: str, settings: Mapping[str, str]) -> bool:
    """Return whether a file, of any kind, is a pointer of Git LFS."""
    first = _read_lines(spark, [file], settings).head()
    return first is not None and str(first[_VALUE]).startswith(BEGINNING_OF_POINTER)


def find_line(spark: SparkSession, file: str, settings: Mapping[str, str], row: int) -> int:
    """Return the line number of a row of JSON lines, where blank lines are not rows. Both numbers begin with 1."""
    lines = spark.read.options(**settings).option("lineSep", "\n").text(file)
    is_row = lines.select((sf.trim(sf.col(_VALUE), sf.lit(_JSON_BLANKS)) != "").alias(_VALUE)).toArrow()
    return int(np.flatnonzero(is_row[_VALUE].to_numpy())[row - 1]) + 1


def _find_pointer(lines: DataFrame) -> str | None:
    """Return a file that is a pointer of Git LFS, by its first line: a later line may be a value that quotes a pointer.

    NB: Spark selects the small files from its list of files, and opens only them.
    """
    small = lines.where(sf.col(_BYTES) < _POINTER_LIMIT_BYTES)
    candidates = small.where(sf.col(_VALUE).startswith(BEGINNING_OF_POINTER)).select(_FILE).distinct()
    for (file,) in candidates.collect():
        first = small.where(sf.col(_FILE) == file).head()
        if first is not None and str(first[_VALUE]).startswith(BEGINNING_OF_POINTER):
            return str(file)
    return None


def _read_lines(spark: SparkSession, paths: list[str], settings: Mapping[str, str] | None) -> DataFrame:
    # NB: by default, Spark also ends a line at a carriage return; the numbers of lines count only line feeds.
    rows = spark.read.options(**settings or {}).option("lineSep", "\n").text(paths)
    return rows.select(
        _VALUE,
        sf.col("_metadata.file_path").alias(_FILE),
        sf.col("_metadata.file_block_start").alias(_BLOCK),
        sf.col("_metadata.file_size").alias(_BYTES),
    )


def _find_reason(kind: str) -> Column:
    """Return why a line cannot be read, or null."""
    value = sf.col(_VALUE)
    reason = sf.when(~sf.is_valid_utf8(value), NOT_UTF8)
    if kind != "JSONLines":
        return reason
    # `contains` is cheaper than the regular expression, and false for most lines.
    has_half = value.contains("\\u") & value.rlike(_HALF_ESCAPED)
    return reason.when(value.rlike(r"^\s*\["), ARRAY).when(has_half, HALF_CHARACTER)


def _find_line(lines: DataFrame, kind: str) -> tuple[int, str]:
    """Return the number of the first unreadable line of a file, from 1, and the reason."""
    numbered = lines.select(
        _BLOCK,
        sf.monotonically_increasing_id().alias(_NUMBER),
        _find_reason(kind).alias(_REASON),
    )
    first = numbered.where(sf.col(_REASON).isNotNull()).orderBy(_BLOCK, _NUMBER).head()
    assert first is not None  # noqa: S101 - the file has an unreadable line
    return count_up_to(numbered, _BLOCK, _NUMBER, first), str(first[_REASON])


def count_up_to(rows: DataFrame, block: str, number: str, last: Row) -> int:
    """Return the number of a row among the rows of its file, from 1.

    NB: Spark reads the blocks of a large file in any order, but the rows of a block in order. So it is the count of the rows in earlier
    blocks, and of the rows in the same block up to this one.

    Args:
        rows: of the file.
        block: the column with the place of each row's block in the file.
        number: the column with a number that grows within a block.
        last: the row.
    """
    is_in_earlier_block = sf.col(block) < last[block]
    is_up_to_last = (sf.col(block) == last[block]) & (sf.col(number) <= last[number])
    count: int = rows.where(is_in_earlier_block | is_up_to_last).count()
    return count
