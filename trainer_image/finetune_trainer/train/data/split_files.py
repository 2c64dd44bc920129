"""Finds and opens the files of a split, and names the file that cannot be read."""

from __future__ import annotations

import io
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from finetune_trainer.examples.file_formats import (
    BEGINNING_OF_POINTER,
    POINTER,
    explain_compression,
    explain_unreadable_line,
    find_compression,
)
from finetune_trainer.pod.exit_status import DataError, TrainingError, first_line
from finetune_trainer.storage import filesystems

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

    from fsspec import AbstractFileSystem

# The size of a read buffer; a Parquet file has one for each column.
_BUFFER_BYTES = 1 << 20
# Parts of the messages of decompressors about a file that is damaged or truncated, or that is not compressed at all.
_CORRUPTION_MESSAGES = (
    "Not a gzipped file",
    "CRC check failed",
    "Invalid data stream",
    "ZSTD",
    "Truncated compressed stream",
)


def find_files(place: str, kind: str) -> tuple[AbstractFileSystem, list[str]]:
    """Return the paths of the files of a split, sorted, at least one, and the filesystem that has them.

    Args:
        place: the URI or the path of the split's file or folder.
        kind: the format of the files: JSONLines or Parquet.

    Raises:
        DataError: the split has no files, or a file has an unsupported compression.
        TrainingError: the storage does not answer.
    """
    try:
        files, path = filesystems.open_filesystem(place)
        paths = _list_visible_files(files, path) if files.exists(path) else None
    except Exception as error:
        reason = filesystems.describe_failure(error)
        if reason is None:
            raise
        raise TrainingError("DataUnreadable", f"{place} cannot be read: {reason}") from error
    if paths is None:
        raise DataError("MissingFile", f"{place} does not exist: mount the volume or correct data.splits")
    if not paths:
        raise DataError("MissingFile", f"{place} has no files: check how the splits were written")
    for file in paths:
        if sentence := explain_compression(format_address(files, file), kind):
            raise DataError("CorruptData", sentence)
    return files, paths


def format_address(files: AbstractFileSystem, file: str) -> str:
    """Return the address of a file for error messages."""
    return str(files.unstrip_protocol(file)).removeprefix("file://")


def _list_visible_files(files: AbstractFileSystem, path: str) -> list[str]:
    """Return the files at a path, sorted, without the hidden files that Spark writes."""
    root = files._strip_protocol(path)  # noqa: SLF001 - fsspec has no public name for it

    def is_visible(file: str) -> bool:
        # NB: a part is empty if a web console made a folder as an object whose name ends in a slash.
        parts = file.removeprefix(root).lstrip("/").split("/")
        return all(part and not part.startswith(("_", ".")) for part in parts)

    # A file that the recipe names is read whatever its name.
    return sorted(file for file in files.find(path) if file == root or is_visible(file))


@contextmanager
def open_lines(files: AbstractFileSystem, file: str) -> Iterator[BinaryIO]:
    """Open a text file; its extension selects the compression."""
    compression = find_compression(file)
    if compression != "zstd":
        with files.open(file, "rb", compression=compression) as opened:
            yield opened
        return
    import pyarrow as pa

    with (
        files.open(file, "rb") as opened,
        pa.CompressedInputStream(pa.PythonFile(opened), compression) as decompressed,
        io.BufferedReader(decompressed, _BUFFER_BYTES) as lines,
    ):
        yield lines


def is_corrupt(error: OSError) -> bool:
    """Whether an error comes from a corrupt compressed file, not from its storage."""
    return any(part in str(error) for part in _CORRUPTION_MESSAGES)


@contextmanager
def open_parquet(opening: Callable[[], Any], where: str, remedy: str) -> Iterator[Any]:
    """Open a Parquet file; errors inside the block are raised as errors of this file (`name_corruption`).

    opening: opens the file; called again to find the cause of an error.
    """
    import pyarrow.parquet as pq

    with (
        name_corruption(where, remedy, lambda: _read_through(opening())),
        _name_pointer(opening, where),
        opening() as opened,
        # NB: not a scan of a pyarrow.dataset, which keeps a whole row group in memory, of any size.
        pq.ParquetFile(opened, buffer_size=_BUFFER_BYTES, pre_buffer=False) as parquet,
    ):
        yield parquet


@contextmanager
def _name_pointer(opening: Callable[[], Any], where: str) -> Iterator[None]:
    """Raise DataError for a file that Arrow cannot read because it is a pointer of Git LFS."""
    import pyarrow as pa

    try:
        yield
    except pa.ArrowInvalid as error:
        with opening() as opened:
            beginning = opened.read(len(BEGINNING_OF_POINTER))
        if beginning != BEGINNING_OF_POINTER.encode():
            raise
        raise DataError("CorruptData", explain_unreadable_line(1, where, POINTER)) from error


@contextmanager
def name_corruption(
    where: str, remedy: str, read_through: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Raise DataError for a corrupt or missing file; storage failures, which a retry may solve, pass through.

    where: the address of the file for messages.
    remedy: what to do about the file.
    read_through: reads every byte of the file; raises the storage's error, if any. Not needed if the block reads nothing from the storage.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise DataError("CorruptData", f"{where} is missing from the storage: {remedy}") from error
    except (ValueError, OSError) as error:
        # NB: Arrow raises OSError both for corrupt pages and for failed reads; for the latter, `read_through` raises the storage's error.
        if isinstance(error, OSError):
            read_through()
        raise DataError("CorruptData", f"{where} cannot be read ({first_line(error)}): {remedy}") from error


def _read_through(opened: Any) -> None:
    with opened:
        while opened.read(_BUFFER_BYTES):
            pass
