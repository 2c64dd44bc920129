"""Formats of files and columns that preparation, training and evaluation read, and the messages about unsupported formats."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from finetune_crds.base import join_names
from finetune_trainer.examples.encodings import NOT_UTF8

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

BEGINNING_OF_POINTER = "version https://git-lfs.github.com/spec/"
"""The beginning of a Git LFS pointer. Source: git-lfs, docs/spec.md."""
POINTER = "the file is a Git LFS pointer"
ARRAY = "it starts a JSON array, but JSON lines are objects"
"""Reasons why a line cannot be read, in addition to those of `encodings`."""

_REMEDIES = {
    POINTER: "run git lfs pull, and copy the file again",
    ARRAY: "convert the file with jq -c '.[]'",
    NOT_UTF8: "convert the file to UTF-8, for example with iconv -f CP1252 -t UTF-8",
}

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
"""Compressions of text files, by the ending of the name in any case."""
_ARCHIVES = (".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".zip", ".7z", ".rar")
_OTHER_COMPRESSIONS = (".xz", ".lzma", ".lz4", ".snappy", ".sz", ".deflate", ".br", ".lzo", ".z")
CODECS_NOT_READ = ("Brotli", "Lzo")
"""Compressions of columns in Parquet that not all readers support."""

BYTES = "bytes"
HALF_FLOATS = "floats of 16 bits"
LONG_DECIMALS = "decimals of more than 38 digits"
MAPS = "maps"
STRUCTURES = "structures"
TIMES_OF_DAY = "times of day"
"""Kinds of values that are not learned, as messages name them."""
_TYPE_REMEDIES = {
    BYTES: "write them as text",
    HALF_FLOATS: "write floats of 32 or 64 bits",
    LONG_DECIMALS: "write them with at most 38 digits, or as text",
    TIMES_OF_DAY: "write them as text",
}
EXPECTED_LABELS = "labels are booleans, 1 and 0, or the texts true and false"
"""The values that are allowed in a column of labels, as the end of a sentence."""
_EXAMPLES = "examples are text, numbers, booleans, dates or times, or lists of {role, content}"


def find_other_format(line: bytes) -> str | None:
    """Return why a first line is not JSON, if it begins a file of another well-known format; otherwise None."""
    if line.startswith(BEGINNING_OF_POINTER.encode()):
        return POINTER
    return ARRAY if line.lstrip().startswith(b"[") else None


def explain_unreadable_line(number: int, file: str, reason: str) -> str:
    """Return the sentence for a line that cannot be read, by its number from 1."""
    remedy = _REMEDIES.get(reason, "correct the line, or write the file again")
    return f"line {number} of {file} cannot be read ({reason}): {remedy}"


def find_compression(file: str) -> str | None:
    """Return the compression of a text file, as fsspec and Arrow call it."""
    return COMPRESSIONS.get(PurePosixPath(file).suffix.lower())


def explain_compression(file: str, kind: str) -> str | None:
    """Return the sentence for a file whose name ends in a compression that is not read; None for any other file.

    Args:
        kind: the format of the file: JSONLines, CSV or Parquet.
    """
    # The last two endings, for example .tar and .gz; an ending that the name does not have is empty.
    *_, before_last, last = ("", "", *(ending.lower() for ending in PurePosixPath(file).suffixes))
    why = f"{file} cannot be read (its name ends in {{}})"
    if last in _ARCHIVES or (last in COMPRESSIONS and before_last in _ARCHIVES):
        return f"{why.format(before_last if before_last in _ARCHIVES else last)}: unpack the archive"
    if kind == "Parquet" and last in (*COMPRESSIONS, *_OTHER_COMPRESSIONS):
        return f"{why.format(last)}: decompress the file, since Parquet compresses its columns itself"
    if last in _OTHER_COMPRESSIONS:
        endings = ", ".join(COMPRESSIONS)
        return f"{why.format(last)}: decompress the file, or compress it with one of {endings}"
    return None


def explain_codec(file: str, codec: str) -> str:
    """Return the sentence for a Parquet file whose columns have a compression of `CODECS_NOT_READ`."""
    return f"{file} is compressed with {codec}: write the file with Snappy, gzip, Zstandard or LZ4"


def explain_type(column: str, where: str, kind: str) -> str:
    """Return the sentence for a column of a type that is not learned.

    Args:
        kind: a kind of values such as BYTES, or the name of another type.
    """
    return f"column {column} of {where} holds {kind}: {_TYPE_REMEDIES.get(kind, _EXAMPLES)}"


def explain_label_type(column: str, where: str, kind: str) -> str:
    """Return the sentence for a column of labels whose type is not supported."""
    return f"column {column} of {where} holds {kind}: {EXPECTED_LABELS}"


def explain_lists(column: str) -> str:
    """Return the sentence for a column that contains lists where texts are required."""
    return f"column {column} contains lists, but text is required: name the column in data.columns.messages if the lists are conversations"


def find_twins(column: str, columns: Iterable[str]) -> list[str]:
    """Return the columns whose names differ from a column's name only in case."""
    return sorted(name for name in columns if name != column and name.lower() == column.lower())


def explain_missing(missing: Collection[str], where: str, columns: Collection[str]) -> str:
    """Return the message for columns that a source or a file does not have.

    NB: all readers distinguish names by case.
    """
    for column in missing:
        if twins := find_twins(column, columns):
            return f"{where} has column {join_names(twins)}, not {column}: write the name with the same case in both places"
    return f"{where} has no column {join_names([*missing])}: it has {join_names(sorted(columns))}"


def explain_twins(column: str, where: str, columns: Collection[str]) -> str | None:
    """Return the sentence for a column if others have its name in another case; None if there are none.

    NB: two writers may have named one column in two ways, and a reader of one name would miss the values under the other.
    """
    twins = find_twins(column, columns)
    if not twins:
        return None
    return f"{where} has the columns {join_names(sorted([column, *twins]))}, which differ only in case: rename all but {column}"
