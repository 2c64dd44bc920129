"""Finds the file and the line of a refused row, by reading the files of the split again: the first read only counts the rows."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from finetune_trainer.examples.refused_rows import RowError, describe_place
from finetune_trainer.train.data import delta_table
from finetune_trainer.train.data.split_columns import SPLIT_COLUMN
from finetune_trainer.train.data.split_files import find_files, format_address, open_lines, open_parquet

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from finetune_crds.data import Splits


@contextmanager
def name_refused_row(splits: Splits, name: str, counts: Mapping[str, int]) -> Iterator[None]:
    """Name the place of a row that is refused while the rows of a split are read.

    Args:
        name: the split.
        counts: the counts of the encoder; `read` plus the error's offset is the number of the row.

    Raises:
        DataError: a row is refused; the message has its place.
    """
    try:
        yield
    except RowError as error:
        place = find_place(splits, name, counts["read"] + error.offset)
        if place is None:
            raise
        raise error.at(place) from error


def find_place(splits: Splits, name: str, number: int) -> str | None:
    """Return the place of a row of a split, by its number from 0 in the order of `read.read`; None if there are fewer."""
    list_places = _list_places_in_table if splits.are_delta_tables else _list_places
    places = list_places(splits, name)
    place = next(islice(places, number, None), None)
    if place is None:
        return None
    number_in_file, where = place
    return describe_place(number_in_file, where, splits.type)


def _list_places(splits: Splits, name: str) -> Iterator[tuple[int, str]]:
    """Yield, for each row, its number in its file, from 1, and the address of the file; in JSON lines the number is that of the line."""
    files, paths = find_files(getattr(splits, name), splits.type)
    for path in paths:
        where = format_address(files, path)
        if splits.type == "JSONLines":
            with open_lines(files, path) as lines:
                yield from ((number, where) for number, line in enumerate(lines, start=1) if line.strip())
        else:
            with open_parquet(partial(files.open, path), where, "write it again") as parquet:
                yield from ((number, where) for number in range(1, parquet.metadata.num_rows + 1))


def _list_places_in_table(splits: Splits, name: str) -> Iterator[tuple[int, str]]:
    """Yield the number and the file of each row of a split in a Delta table; the number, from 1, counts the rows of other splits too."""
    only = name if splits.type == "Delta" else None
    dataset = delta_table.open_dataset(splits, name)
    for fragment in delta_table.list_fragments(dataset, only):
        where = f"{fragment.path} of the Delta table {delta_table.describe_table(splits, name)}"
        with open_parquet(fragment.open, where, "restore the table") as parquet:
            # In a table that is partitioned by split, a file has the rows of one split, and no split column.
            if only is None or SPLIT_COLUMN not in parquet.schema_arrow.names:
                yield from ((number, where) for number in range(1, parquet.metadata.num_rows + 1))
                continue
            split_names = parquet.read(columns=[SPLIT_COLUMN])[SPLIT_COLUMN].to_pylist()
            yield from ((number, where) for number, split in enumerate(split_names, start=1) if split == name)
