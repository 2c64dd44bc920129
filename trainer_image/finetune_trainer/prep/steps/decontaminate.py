"""Drops examples that share a run of words with an evaluation set.

The rule is that of GPT-3 (Brown et al. 2020, appendix C), which EleutherAI's lm-evaluation-harness follows: a run of 13 words,
in lower case and without punctuation; shorter texts count from 8 words on. Which examples are dropped depends on their texts
and the evaluation sets alone.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from pyspark.sql import functions as sf
from pyspark.sql.types import ArrayType, StringType

from finetune_crds import status_parts
from finetune_trainer.examples.chat_messages import FIELDS, INSTRUCTING
from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.prep.expressions import plain_text
from finetune_trainer.prep.expressions.content import is_conversation, text_of
from finetune_trainer.prep.expressions.template import quoted
from finetune_trainer.prep.source import reader, text_files
from finetune_trainer.prep.spark.keep import keep
from finetune_trainer.prep.steps import boilerplate
from finetune_trainer.prep.steps.ngrams import of_evaluation, of_examples
from finetune_trainer.prep.steps.patterns import PATTERNS, in_order, replaced
from finetune_trainer.prep.steps.samples import beginnings

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence
    from contextlib import ExitStack
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType

    from finetune_crds.catalog import Catalog
    from finetune_crds.cleaning import Decontaminate, EvaluationSource, RedactKind
    from finetune_crds.prepare import Prepare

TEXT = "said"
"""Column with the text that is compared: the texts of an example, one after the other."""
_ID = "id"
_FIELD = "data.prepare.decontaminate.sources"
_SET, _GRAM, _WORDS, _GRAMS = "set", "gram", "words", "grams"
# Runs of words of all evaluation sets that each executor keeps in memory; more are joined by a shuffle.
_MOST_RUNS_HELD = 2_000_000
# The share of a set's texts that have a run of words, from which on it is of a template.
_SHARE = 0.01
# Texts that are hashed at once.
_AT_ONCE = 500


class EvaluationSet(NamedTuple):
    """An evaluation set, as it was read at one version."""

    asked: EvaluationSource
    corpus: reader.Corpus


class Shared(NamedTuple):
    """Examples that share words with evaluation sets.

    examples: number of different ones, by set. samples: some of them, each with the name of a set.
    """

    examples: dict[str, int]
    samples: list[str]


def read(
    spark: SparkSession, wanted: Sequence[EvaluationSource], scratch: Path, catalog: Catalog | None = None
) -> list[EvaluationSet]:
    """Read evaluation sets, each at one version.

    Args:
        scratch: folder for what is downloaded; it must stay until the rows have been read.
        catalog: where tables are found by their names.

    Raises:
        RecipeRefusedError, DataError, TrainingError: as `source.read`.
        DataError: a column is missing or holds no text, or no column does.
    """
    found = []
    for one in wanted:
        field = f"{_FIELD}[{one.name}]"
        made = EvaluationSet(one, reader.read(spark, one, scratch / one.name, field, catalog))
        with text_files.checking_on_failure(spark, made.corpus.texts):
            reader.require(made.corpus.frame, one.columns or [], one.address)
            _texts(made)
        found.append(made)
    return found


def described(one: EvaluationSet) -> str:
    """Return what was read as a line of the log."""
    return f"evaluation set {one.asked.name}: {one.asked.address}{one.corpus.at}, columns {', '.join(_texts(one))}"


def told(sets: Sequence[EvaluationSet], shared: dict[str, int]) -> list[status_parts.EvaluationSet]:
    """Return what was read, with the number of examples that share words with each set, for the result."""
    return [
        status_parts.EvaluationSet(
            name=one.asked.name,
            examples=shared[one.asked.name],
            version=one.corpus.version,
            revision=one.corpus.revision,
        )
        for one in sets
    ]


def removed(
    frame: DataFrame, sets: Sequence[EvaluationSet], prepare: Prepare, held: ExitStack
) -> tuple[DataFrame, Shared]:
    """Return the frame without examples that share a run of words with a set, and what shares one.

    The frame is without the column of the compared text.

    Args:
        frame: examples; it is read twice.
        held: ends what the returned frame needs.

    Raises:
        DataError: a set has no text that is long enough.
    """
    wanted = prepare.decontaminate
    assert wanted is not None  # noqa: S101 - the caller has asked
    known = keep(_runs(sets, wanted, prepare.redact or []), held)
    lengths, size = _measured(known, sets, wanted)
    found = frame.select(_ID, TEXT).mapInArrow(
        partial(_of_examples, lengths=lengths), f"{_ID} string, {_GRAMS} array<bigint>"
    )
    runs = known.select(_SET, _GRAM)
    runs = sf.broadcast(runs) if size <= _MOST_RUNS_HELD else runs
    shared = found.select(_ID, sf.explode(_GRAMS).alias(_GRAM)).join(runs, _GRAM)
    hits = keep(shared.select(_ID, _SET).distinct(), held)
    counts = {row[_SET]: row["count"] for row in hits.groupBy(_SET).count().collect()}
    clean = frame.drop(TEXT).join(hits.select(_ID), _ID, "left_anti")
    examples = {one.asked.name: counts.get(one.asked.name, 0) for one in sets}
    return clean, Shared(examples, _drawn(frame, hits, prepare.report_samples))


def _drawn(frame: DataFrame, hits: DataFrame, samples: int) -> list[str]:
    found = (
        {row[_ID]: row[_SET] for row in hits.orderBy(_ID, _SET).limit(samples).collect()} if samples else {}
    )
    texts = beginnings(frame, TEXT, found)
    return [f"{found[name]}:\n{text}" for name, text in texts.items()]


def _measured(
    known: DataFrame, sets: Sequence[EvaluationSet], wanted: Decontaminate
) -> tuple[list[int], int]:
    """Return the numbers of words of the runs of all sets, and the number of runs."""
    rows = known.groupBy(_SET, _WORDS).count().collect()
    for one in sets:
        if not any(row[_SET] == one.asked.name for row in rows):
            raise DataError(
                "NothingToCompare",
                f"the evaluation set {one.asked.name}, {one.asked.address}, has no text of {wanted.fewest_words} words or more "
                f"in {' and '.join(_texts(one))}: name its text columns in data.prepare.decontaminate.sources, or lower minWords",
            )
    return sorted({row[_WORDS] for row in rows}), sum(row["count"] for row in rows)


def _runs(sets: Sequence[EvaluationSet], wanted: Decontaminate, kinds: Sequence[RedactKind]) -> DataFrame:
    """Return the different runs of words by which texts of the sets are found: `set`, `gram` and `words`."""
    hashed = partial(_of_evaluation, ngram=wanted.ngram, fewest=wanted.fewest_words, kinds=in_order(kinds))
    found = None
    for one in sets:
        texts = sf.flatten(
            sf.array(*(sf.coalesce(text, sf.array().cast("array<string>")) for text in _texts(one).values()))
        )
        rows = (
            one.corpus.frame.select(sf.explode(texts).alias(TEXT)).where(sf.col(TEXT).isNotNull()).distinct()
        )
        counts = rows.mapInArrow(hashed, f"{_GRAM} bigint, {_WORDS} int").groupBy(_GRAM, _WORDS).count()
        # A run that many texts of a set share is of their template, which tasks of others may have too.
        grams = counts.where(sf.col("count") <= boilerplate.limit(rows.count(), _SHARE))
        named = grams.select(sf.lit(one.asked.name).alias(_SET), _GRAM, _WORDS)
        found = named if found is None else found.union(named)
    assert found is not None  # noqa: S101 - the schema wants a set
    return found


def _texts(one: EvaluationSet) -> dict[str, Column]:
    """Return the texts of an evaluation set as lists, by column."""
    fields = {
        field.name: field.dataType
        for field in one.corpus.frame.schema.fields
        if not plain_text.is_written(field.name)
    }
    found = {name: _listed(name, fields[name]) for name in one.asked.columns or fields}
    wrong = [name for name, texts in found.items() if texts is None]
    if wrong and one.asked.columns:
        raise DataError(
            "WrongColumnType",
            f"column {wrong[0]} of the evaluation set {one.asked.name} holds {fields[wrong[0]].simpleString()}: name columns "
            "with texts, lists of texts, or lists of {role, content}",
        )
    texts = {name: column for name, column in found.items() if column is not None}
    if not texts:
        raise DataError(
            "ColumnsUnknown",
            f"the evaluation set {one.asked.name}, {one.asked.address}, has no column with text: "
            f"{reader.has(one.corpus.frame)}",
        )
    return texts


def _listed(name: str, kind: DataType) -> Column | None:
    column = sf.col(quoted(name))
    if isinstance(kind, StringType):
        return sf.array(column)
    if isinstance(kind, ArrayType) and isinstance(kind.elementType, StringType):
        return column
    if is_conversation(kind):
        role = FIELDS["role"] if "role" not in kind.elementType.fieldNames() else "role"
        # NB: an instruction to the assistant is no task, and the examples of one application have the same one.
        tasks = sf.filter(column, lambda turn: ~sf.coalesce(turn[role].isin(*INSTRUCTING), sf.lit(False)))
        return sf.transform(tasks, lambda turn: text_of(turn, kind.elementType, only_texts=True))
    return None


def _of_evaluation(
    batches: Iterable[pa.RecordBatch], *, ngram: int, fewest: int, kinds: list[RedactKind]
) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    for batch in batches:
        texts = batch.column(TEXT).to_pylist()
        # NB: the examples have placeholders by now.
        for kind in kinds:
            texts = [replaced(text, PATTERNS[kind])[0] for text in texts]
        hashes, words = of_evaluation(texts, ngram, fewest)
        columns = [pa.array(hashes.view(np.int64)), pa.array(words, pa.int32())]
        yield pa.RecordBatch.from_arrays(columns, [_GRAM, _WORDS])


def _of_examples(batches: Iterable[pa.RecordBatch], *, lengths: Collection[int]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    for batch in batches:
        for start in range(0, batch.num_rows, _AT_ONCE):
            part = batch.slice(start, _AT_ONCE)
            hashes, ends = of_examples(part.column(TEXT).to_pylist(), lengths)
            offsets = pa.array(np.append(0, ends), pa.int32())
            grams = pa.ListArray.from_arrays(offsets, pa.array(hashes.view(np.int64)))
            yield pa.RecordBatch.from_arrays([part.column(_ID), grams], [_ID, _GRAMS])
