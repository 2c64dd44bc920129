"""Adds the token ids of examples to a frame, as training reads them."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
import uuid
import zipfile
from array import array
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pyspark import SparkFiles
from pyspark.sql.types import ArrayType, BooleanType, IntegerType, StringType, StructField, StructType

from finetune_trainer.examples import tokenizer
from finetune_trainer.examples.documents import Documents
from finetune_trainer.examples.refused_rows import A_ROW, RowError, write_text
from finetune_trainer.examples.token_columns import ENCODING, token_columns
from finetune_trainer.prep.expressions.jinja_template import REFUSAL
from finetune_trainer.prep.spark import session
from finetune_trainer.prep.steps.steps import PLACE, SOURCE, TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from datetime import date

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from transformers import PreTrainedTokenizerBase

    from finetune_crds.data import Columns
    from finetune_crds.objective import Objective
    from finetune_crds.prepare import OnTemplateError
    from finetune_crds.training import Model
    from finetune_trainer.examples.token_columns import Document
    from finetune_trainer.examples.tokenizer import Loaded, TextTokenizer

# Token ids that a worker collects before it returns their rows, at about 20 bytes each.
_MAX_TOKENS_PER_BATCH = 4_000_000


def with_tokens(
    frame: DataFrame,
    model: Model,
    loaded: Loaded,
    columns: Columns,
    objective: Objective,
    *,
    day: date | None = None,
    on_template_error: OnTemplateError = "Fail",
) -> DataFrame:
    """Add the column `tokens`, the length of an example, and the columns of `token_columns`: the token ids and the loss mask.

    Args:
        loaded: the tokenizer of the model.
        columns: the columns of an example in the frame.
        objective: determines the targets of the loss.
        day: the date for chat templates that write the date; None: today.
        on_template_error: what happens to an example that a template refuses: with Drop, its added columns are null; with Fail, the
            task fails.
    """
    drop = on_template_error == "Drop"
    encoding = Documents.of_recipe(loaded.tokenizer, columns, objective, day).encoding
    added = [StructField(TOKENS, IntegerType(), nullable=drop)]
    for document in token_columns(columns):
        ids, mask = ArrayType(IntegerType(), containsNull=False), ArrayType(BooleanType(), containsNull=False)
        added.append(StructField(document.input_ids, ids, nullable=drop, metadata={ENCODING: encoding}))
        # A null mask means that the template does not show which tokens are answers, so the mask is nullable even with Fail.
        added.append(StructField(document.loss_mask, mask))
    load = _choose_loader(frame, model, loaded, columns)
    tokenize = partial(_tokenize_batches, load=load, columns=columns, objective=objective, day=day, drop=drop)
    return frame.mapInArrow(tokenize, StructType([*frame.schema.fields, *added]))


def select_refused(
    frame: DataFrame,
    model: Model,
    loaded: Loaded,
    columns: Columns,
    objective: Objective,
    *,
    day: date | None = None,
) -> DataFrame:
    """Return the rows that `with_tokens` refuses, or that have a REFUSAL: their places and sources, and the text of the error."""
    names = {*PLACE, SOURCE, REFUSAL}
    schema = StructType([field for field in frame.schema.fields if field.name in names])
    load = _choose_loader(frame, model, loaded, columns)
    select = partial(
        _select_refused_rows,
        names=schema.fieldNames(),
        load=load,
        columns=columns,
        objective=objective,
        day=day,
    )
    return frame.mapInArrow(select, schema)


def _choose_loader(
    frame: DataFrame, model: Model, loaded: Loaded, columns: Columns
) -> Callable[[], PreTrainedTokenizerBase | TextTokenizer]:
    """Return a function that loads the tokenizer in a task: only the part for texts if all columns of an example are text."""
    is_text = all(isinstance(frame.schema[name].dataType, StringType) for name in columns.content_columns)
    load = tokenizer.build_text_tokenizer_loader(loaded.tokenizer) if is_text else None
    return load or partial(_load_tokenizer, model, ship_folder(frame.sparkSession, loaded.folder))


def _load_tokenizer(model: Model, find: Callable[[], Path]) -> PreTrainedTokenizerBase:
    return tokenizer.load_tokenizer(model, find())


def ship_folder(spark: SparkSession, folder: Path) -> Callable[[], Path]:
    """Return a function that finds a folder of this pod in any task; executors elsewhere get a copy of it."""
    context = session.context(spark)
    if context is None:
        # NB: without a context, files may not reach a task, so the code of the task contains the archive.
        return partial(_unzip, _zip_folder(folder))
    if context.master.startswith("local"):
        return partial(Path, folder)
    name = f"tokenizer-{uuid.uuid4().hex}"
    archive = shutil.make_archive(str(Path(tempfile.mkdtemp()) / name), "zip", folder)
    context.addArchive(f"{archive}#{name}")
    return partial(_find_unpacked, name)


def _zip_folder(folder: Path) -> bytes:
    with tempfile.TemporaryDirectory(prefix="finetune-tokenizer-") as scratch:
        return Path(shutil.make_archive(f"{scratch}/tokenizer", "zip", folder)).read_bytes()


@lru_cache(maxsize=1)
def _unzip(archive: bytes) -> Path:
    """Unpack an archive onto the disk of this Python worker, and return its folder."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    folder = Path(tempfile.mkdtemp(prefix="finetune-tokenizer-"))
    zipfile.ZipFile(io.BytesIO(archive)).extractall(folder)
    return folder


def _find_unpacked(name: str) -> Path:
    return Path(SparkFiles.get(name)).absolute()


def _tokenize_batches(
    batches: Iterable[pa.RecordBatch],
    *,
    load: Callable[[], PreTrainedTokenizerBase | TextTokenizer],
    columns: Columns,
    objective: Objective,
    day: date | None,
    drop: bool,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows with the added columns, in batches that end when they reach _MAX_TOKENS_PER_BATCH token ids."""
    documents = Documents.of_recipe(load(), columns, objective, day)
    for batch in batches:
        rows = {name: batch.column(name).to_pylist() for name in columns.column_names}
        added, begin = _AddedColumns(columns), 0
        for end, row in enumerate(tokenize_rows(documents, rows, drop=drop), start=1):
            added.append(row)
            if added.tokens >= _MAX_TOKENS_PER_BATCH or end == batch.num_rows:
                yield added.append_to(batch.slice(begin, end - begin))
                added, begin = _AddedColumns(columns), end


class _AddedColumns:
    """The added columns of some rows.

    tokens: how many token ids they contain.
    """

    def __init__(self, columns: Columns) -> None:
        self.tokens = 0
        self._lengths: list[int | None] = []
        self._lists: dict[str, _Lists] = {}
        for document in token_columns(columns):
            self._lists |= {document.input_ids: _Lists("i"), document.loss_mask: _Lists("b")}

    def append(self, row: tuple[Document, ...] | None) -> None:
        """Add a row; None stands for a row to drop."""
        length = None if row is None else sum(len(document.tokens) for document in row)
        self.tokens += length or 0
        self._lengths.append(length)
        # The token ids and the loss mask of each document, in the order of the columns.
        values = [None] * len(self._lists) if row is None else [part for document in row for part in document]
        for column, value in zip(self._lists.values(), values, strict=True):
            column.append(value)

    def append_to(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows with the added columns after their own."""
        import pyarrow as pa

        added = [pa.array(self._lengths, pa.int32()), *(column.as_arrow() for column in self._lists.values())]
        return pa.RecordBatch.from_arrays(
            [*batch.columns, *added], [*batch.schema.names, TOKENS, *self._lists]
        )


class _Lists:
    """A column of lists: of token ids (`i`), or of booleans (`b`)."""

    def __init__(self, kind: str) -> None:
        self._values = array(kind)
        self._offsets = array("i", [0])
        self._missing: list[bool] = []

    def append(self, values: list[int] | list[bool] | None) -> None:
        self._values.extend(values or ())
        self._offsets.append(len(self._values))
        self._missing.append(values is None)

    def as_arrow(self) -> pa.Array:
        import pyarrow as pa

        values = np.asarray(self._values)
        values = values if self._values.typecode == "i" else values.astype(np.bool_)
        offsets = pa.array(np.asarray(self._offsets))
        return pa.ListArray.from_arrays(offsets, pa.array(values), mask=pa.array(self._missing, pa.bool_()))


def _select_refused_rows(
    batches: Iterable[pa.RecordBatch],
    *,
    names: list[str],
    load: Callable[[], PreTrainedTokenizerBase | TextTokenizer],
    columns: Columns,
    objective: Objective,
    day: date | None,
) -> Iterator[pa.RecordBatch]:
    """Yield the refused rows of each batch: the columns `names`, with the text of the error in REFUSAL."""
    import pyarrow as pa

    documents = Documents.of_recipe(load(), columns, objective, day)
    for batch in batches:
        refusals = batch.column(REFUSAL).to_pylist()
        rows = _iterate_rows({name: batch.column(name).to_pylist() for name in columns.column_names})
        for number, row in enumerate(rows):
            # Only conversations can be refused here. A row with a null is not tokenized.
            is_text = columns.messages is None and all(isinstance(value, str) for value in row.values())
            is_tokenized = None not in row.values()
            if refusals[number] is None and is_tokenized and not is_text:
                refusals[number] = _find_refusal(documents, row)
        columns_of_places = {name: batch.column(name) for name in names}
        columns_of_places[REFUSAL] = pa.array(refusals, pa.string())
        refused = pa.RecordBatch.from_pydict(columns_of_places)
        yield refused.filter(refused.column(REFUSAL).is_valid())


def tokenize_rows(
    documents: Documents, rows: dict[str, list[Any]], *, drop: bool
) -> Iterator[tuple[Document, ...] | None]:
    """Yield the documents of each row of a batch of columns; None for a row with a null, and for a refused row if `drop` is set.

    Raises:
        ValueError: a row is refused, and `drop` is not set; `refused_rows.find_error` finds the error in the message of Spark's exception.
    """
    has_null = [None in row for row in zip(*rows.values(), strict=True)]
    # The columns without the rows that have a null.
    complete = {
        name: [value for value, is_null in zip(values, has_null, strict=True) if not is_null]
        for name, values in rows.items()
    }
    if documents.columns.messages is None and all(
        isinstance(value, str) for value in chain(*complete.values())
    ):
        row_documents: Iterator[tuple[Document, ...] | None] = documents.of(complete)
    else:
        row_documents = (_tokenize_conversation(documents, row, drop=drop) for row in _iterate_rows(complete))
    return (None if is_null else next(row_documents) for is_null in has_null)


def _iterate_rows(columns: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


def _tokenize_conversation(
    documents: Documents, example: dict[str, Any], *, drop: bool
) -> tuple[Document, ...] | None:
    try:
        return _make_documents(documents, example)
    except RowError as error:
        if drop:
            return None
        raise ValueError(write_text(error)) from error


def _find_refusal(documents: Documents, example: dict[str, Any]) -> str | None:
    """Return the text of the error of an example that is refused; None for a valid example."""
    try:
        _make_documents(documents, example)
    except RowError as error:
        return write_text(error)
    return None


def _make_documents(documents: Documents, example: dict[str, Any]) -> tuple[Document, ...]:
    """Return the documents of an example with conversations.

    Raises:
        RowError: the chat template refuses it, its messages are invalid, or a judged answer has no tokens.
    """
    (example_documents,) = documents.of({name: [value] for name, value in example.items()})
    # A judged answer without tokens is blank, or only repeats the prompt.
    if documents.columns.messages is None and not all(document.tokens for document in example_documents):
        raise RowError("MessageShape", f"an answer of {A_ROW} adds nothing to the prompt")
    return example_documents
