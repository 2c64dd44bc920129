"""Errors of single rows and the places of rows, in the same words for preparation, training and evaluation."""

from __future__ import annotations

import re

from finetune_trainer.pod.exit_status import DataError

TEMPLATE_FAILED = "TemplateFailed"
"""The reason of an error about a row on which a template fails."""
A_ROW = "a row"
"""What a message calls the row until `RowError.at` replaces it with the place."""
_MARK = "finetune refuses "
_TEXT = re.compile(rf"{_MARK}(\w+): (.*)")


class RowError(DataError):
    """A row of the data is invalid; the first `A_ROW` of the message stands for the row.

    offset: the number of rows between those that the encoder has counted and the invalid row; 0: it is the next row. A function that
        reads a whole batch before its rows are counted, such as `parse_labels`, sets it to the index of the row in the batch.
    """

    def __init__(self, reason: str, message: str, *, offset: int = 0) -> None:
        super().__init__(reason, message)
        self.offset = offset

    def at(self, place: str) -> DataError:
        """Return the error with the place of the row."""
        return DataError(self.reason, self.message.replace(A_ROW, place, 1))


def describe_place(number: int, file: str, kind: str) -> str:
    """Return the place of a row, by its number from 1.

    Args:
        file: the address of the file as the recipe writes it; in a table, the name of the file and the table.
        kind: the format of the file. The number is the line number in JSON lines; in CSV, it excludes the header.
    """
    return f"{'line' if kind == 'JSONLines' else 'row'} {number} of {file}"


def write_text(error: RowError) -> str:
    """Return the error as one line of text, which `find_error` finds within a longer text.

    NB: only the text of an exception in a Python worker of Spark reaches the driver.
    """
    return f"{_MARK}{error.reason}: {' '.join(error.message.split())}"


def find_error(text: str) -> RowError | None:
    """Return the error that `write_text` wrote into a text; None if there is none."""
    match = _TEXT.search(text)
    if match is None:
        return None
    reason, message = match.groups()
    return RowError(reason, message)
