"""Finds the place of a row that a template or the rules for messages refuse.

NB: the source is read again to find the place. To keep the places of all rows would cost time and space in each step of a preparation.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import unquote

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import functions as sf

from finetune_trainer.examples.refused_rows import describe_place, find_error
from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.prep.expressions.jinja_template import REFUSAL
from finetune_trainer.prep.source import text_files
from finetune_trainer.prep.source.location import as_named
from finetune_trainer.prep.steps.steps import BLOCK, FILE, NUMBER, SOURCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pyspark.sql import DataFrame, Row

    from finetune_trainer.prep.source.reader import Corpus


def find_failure(message: str) -> DataError | None:
    """Return the error of a row that is refused, from the text of Spark's exception, without the place of the row."""
    error = find_error(message)
    return DataError(error.reason, _advise(error.message)) if error else None


@contextmanager
def name_refused_row(
    select_refused: Callable[[], DataFrame], sources: Mapping[str, Corpus]
) -> Iterator[None]:
    """If a row is refused while Spark runs the steps of a preparation, raise an error that names its place.

    Args:
        select_refused: returns the refused rows, with the columns of `with_place` and the error text in REFUSAL.
        sources: what was read, by the name of the source in a mix; the name is empty if there is no mix.

    Raises:
        DataError: a row is refused; the message names the first refused row, in the order in which Spark reads the files.
    """
    try:
        yield
    except PySparkException as error:
        if find_error(str(error)) is None:
            raise
        print("a row is refused: reading the source again to find its place", flush=True)
        failure = _find_first(select_refused, sources)
        if failure is None:
            raise
        raise failure from error


def with_place(frame: DataFrame) -> DataFrame:
    """Add the place of each row to the rows of a source.

    NB: Spark recommends `_metadata` instead of these functions, but `_metadata` does not pass through a union.
    """
    places = {
        FILE: sf.input_file_name(),
        BLOCK: sf.input_file_block_start(),
        NUMBER: sf.monotonically_increasing_id(),
    }
    return frame.withColumns(places)


def _find_first(select_refused: Callable[[], DataFrame], sources: Mapping[str, Corpus]) -> DataError | None:
    """Return the error of the first refused row, with its place; None if the row or its place is not found."""
    try:
        row = select_refused().head()
        error = find_error(str(row[REFUSAL])) if row else None
        if row is None or error is None:
            return None
        place = _find_place(sources[row.asDict().get(SOURCE, "")], row)
    except (PySparkException, Py4JJavaError) as failure:
        # NB: some compute of Databricks does not report the file of a row.
        print(f"the place of the row cannot be found: {type(failure).__name__}", flush=True)
        return None
    return DataError(error.reason, _advise(error.at(place).message))


def _find_place(source: Corpus, row: Row) -> str:
    """Return the place of a row, for a message: its line in JSON lines, otherwise its number among the rows of the file."""
    rows = with_place(source.frame).where(sf.col(FILE) == row[FILE])
    number = text_files.count_up_to(rows, BLOCK, NUMBER, row)
    address = unquote(row[FILE])
    name = as_named(address)
    if source.table:
        name = f"{name.rpartition('/')[2]} of {source.table}"
    # Files that are not text are Parquet, also in tables and data sets of the Hub.
    if source.texts is None:
        return describe_place(number, name, "Parquet")
    if source.texts.kind == "JSONLines":
        number = text_files.find_line(source.frame.sparkSession, address, source.texts.settings, number)
    return describe_place(number, name, source.texts.kind)


def _advise(sentence: str) -> str:
    return f"{sentence}; to drop these rows, set data.prepare.onTemplateError: Drop"
