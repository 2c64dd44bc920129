"""Drops examples that share a run of words with an evaluation set.

The rule is that of GPT-3 (Brown et al. 2020, appendix C) and of EleutherAI's lm-evaluation-harness: a run of 13 words, in lower case
and without punctuation; a shorter text of at least 8 words is one run. Which examples are dropped depends on their texts
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
from finetune_trainer.prep.steps.ngrams import hash_evaluation_texts, hash_examples
from finetune_trainer.prep.steps.patterns import PATTERNS, replace_values, sort_kinds
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
# Columns: the name of a set, the hash of a run of words, the number of the run's words, and the hashes of an example's runs.
_SET, _GRAM, _WORDS, _GRAMS = "set", "gram", "words", "grams"
# How many runs of words, of all evaluation sets, each executor keeps in memory; more are joined by a shuffle.
_MAX_RUNS_IN_MEMORY = 2_000_000
# A run of words in more than this share of a set's texts belongs to their template.
_SHARE = 0.01
# Examples whose runs are hashed at once.
_TEXTS_PER_BATCH = 500


class EvaluationSet(NamedTuple):
    """An evaluation set, as it was read at one version."""

    source: EvaluationSource
    corpus: reader.Corpus


class Shared(NamedTuple):
    """Examples that share words with evaluation sets.

    examples: number of distinct examples, by set.
    samples: the beginnings of some of the examples, each after the name of a set.
    """

    examples: dict[str, int]
    samples: list[str]


def read(
    spark: SparkSession, sources: Sequence[EvaluationSource], scratch: Path, catalog: Catalog | None = None
) -> list[EvaluationSet]:
    """Read evaluation sets, each at one version.

    Args:
        scratch: folder for what is downloaded; it must stay until the rows have been read.
        catalog: the catalog that finds tables by name.

    Raises:
        RecipeRefusedError, DataError, TrainingError: as `reader.read`.
        DataError: a named column is missing or holds no text, or no column holds text.
    """
    sets = []
    for source in sources:
        field = f"{_FIELD}[{source.name}]"
        evaluation_set = EvaluationSet(
            source, reader.read(spark, source, scratch / source.name, field, catalog)
        )
        with text_files.checking_on_failure(spark, evaluation_set.corpus.texts):
            reader.require(evaluation_set.corpus.frame, source.columns or [], source.address)
            _list_texts_by_column(evaluation_set)
        sets.append(evaluation_set)
    return sets


def describe(evaluation_set: EvaluationSet) -> str:
    """Return what was read as a line of the log."""
    return f"evaluation set {evaluation_set.source.name}: {evaluation_set.source.address}{evaluation_set.corpus.at}, columns {', '.join(_list_texts_by_column(evaluation_set))}"


def build_results(sets: Sequence[EvaluationSet], shared: dict[str, int]) -> list[status_parts.EvaluationSet]:
    """Return what was read, with the number of examples that share words with each set, for the result."""
    return [
        status_parts.EvaluationSet(
            name=evaluation_set.source.name,
            examples=shared[evaluation_set.source.name],
            version=evaluation_set.corpus.version,
            revision=evaluation_set.corpus.revision,
        )
        for evaluation_set in sets
    ]


def remove_contaminated(
    frame: DataFrame, sets: Sequence[EvaluationSet], prepare: Prepare, kept_frames: ExitStack
) -> tuple[DataFrame, Shared]:
    """Return the frame without examples that share a run of words with a set, and a summary of those examples.

    The column of the compared text is dropped.

    Args:
        frame: examples; it is read several times.
        kept_frames: when it closes, it releases what the returned frame needs.

    Raises:
        DataError: a set has no text that is long enough.
    """
    decontaminate = prepare.decontaminate
    assert decontaminate is not None  # noqa: S101 - the step is requested
    evaluation_runs = keep(_hash_runs(sets, decontaminate, prepare.redact or []), kept_frames)
    lengths, run_count = _measure_runs(evaluation_runs, sets, decontaminate)
    example_runs = frame.select(_ID, TEXT).mapInArrow(
        partial(_hash_example_batches, lengths=lengths), f"{_ID} string, {_GRAMS} array<bigint>"
    )
    runs = evaluation_runs.select(_SET, _GRAM)
    runs = sf.broadcast(runs) if run_count <= _MAX_RUNS_IN_MEMORY else runs
    shared = example_runs.select(_ID, sf.explode(_GRAMS).alias(_GRAM)).join(runs, _GRAM)
    # The pairs of an example and a set that share a run.
    hits = keep(shared.select(_ID, _SET).distinct(), kept_frames)
    counts = {row[_SET]: row["count"] for row in hits.groupBy(_SET).count().collect()}
    clean = frame.drop(TEXT).join(hits.select(_ID), _ID, "left_anti")
    examples = {
        evaluation_set.source.name: counts.get(evaluation_set.source.name, 0) for evaluation_set in sets
    }
    return clean, Shared(examples, _read_samples(frame, hits, prepare.report_samples))


def _read_samples(frame: DataFrame, hits: DataFrame, limit: int) -> list[str]:
    if not limit:
        return []
    set_of_example = {row[_ID]: row[_SET] for row in hits.orderBy(_ID, _SET).limit(limit).collect()}
    texts = beginnings(frame, TEXT, set_of_example)
    return [f"{set_of_example[example_id]}:\n{text}" for example_id, text in texts.items()]


def _measure_runs(
    evaluation_runs: DataFrame, sets: Sequence[EvaluationSet], decontaminate: Decontaminate
) -> tuple[list[int], int]:
    """Return the lengths in words that runs of the sets have, for example [9, 13], and the number of runs.

    Raises:
        DataError: a set has no runs.
    """
    rows = evaluation_runs.groupBy(_SET, _WORDS).count().collect()
    for evaluation_set in sets:
        if not any(row[_SET] == evaluation_set.source.name for row in rows):
            raise DataError(
                "NothingToCompare",
                f"the evaluation set {evaluation_set.source.name}, {evaluation_set.source.address}, has no text of {decontaminate.fewest_words} words or more "
                f"in {' and '.join(_list_texts_by_column(evaluation_set))}: name its text columns in data.prepare.decontaminate.sources, or lower minWords",
            )
    return sorted({row[_WORDS] for row in rows}), sum(row["count"] for row in rows)


def _hash_runs(
    sets: Sequence[EvaluationSet], decontaminate: Decontaminate, kinds: Sequence[RedactKind]
) -> DataFrame:
    """Return the distinct runs of words that identify texts of the sets, in the columns `set`, `gram` and `words`."""
    hashed = partial(
        _hash_evaluation_batches,
        ngram=decontaminate.ngram,
        fewest=decontaminate.fewest_words,
        kinds=sort_kinds(kinds),
    )
    runs = None
    for evaluation_set in sets:
        empty = sf.array().cast("array<string>")
        lists = [sf.coalesce(texts, empty) for texts in _list_texts_by_column(evaluation_set).values()]
        texts = sf.flatten(sf.array(*lists))
        rows = (
            evaluation_set.corpus.frame.select(sf.explode(texts).alias(TEXT))
            .where(sf.col(TEXT).isNotNull())
            .distinct()
        )
        counts = rows.mapInArrow(hashed, f"{_GRAM} bigint, {_WORDS} int").groupBy(_GRAM, _WORDS).count()
        # A run that many texts of a set share belongs to their template, which unrelated examples may share too.
        grams = counts.where(sf.col("count") <= boilerplate.limit(rows.count(), _SHARE))
        runs_of_set = grams.select(sf.lit(evaluation_set.source.name).alias(_SET), _GRAM, _WORDS)
        runs = runs_of_set if runs is None else runs.union(runs_of_set)
    assert runs is not None  # noqa: S101 - the schema requires a set
    return runs


def _list_texts_by_column(evaluation_set: EvaluationSet) -> dict[str, Column]:
    """Return the texts of an evaluation set as a column of lists for each source column, by name; raises DataError as `read` does."""
    fields = {
        field.name: field.dataType
        for field in evaluation_set.corpus.frame.schema.fields
        # A written column repeats the values of another column.
        if not plain_text.is_written(field.name)
    }
    texts_by_column = {
        name: _list_texts(name, fields[name]) for name in evaluation_set.source.columns or fields
    }
    without_texts = [name for name, texts in texts_by_column.items() if texts is None]
    if without_texts and evaluation_set.source.columns:
        column_name, *_ = without_texts
        raise DataError(
            "WrongColumnType",
            f"column {column_name} of the evaluation set {evaluation_set.source.name} holds {fields[column_name].simpleString()}: name columns "
            "with texts, lists of texts, or lists of {role, content}",
        )
    texts = {name: column for name, column in texts_by_column.items() if column is not None}
    if not texts:
        raise DataError(
            "ColumnsUnknown",
            f"the evaluation set {evaluation_set.source.name}, {evaluation_set.source.address}, has no column with text: "
            f"{reader.describe_columns(evaluation_set.corpus.frame)}",
        )
    return texts


def _list_texts(name: str, kind: DataType) -> Column | None:
    """Return the texts in a column as lists; None if a column of this type holds no texts."""
    column = sf.col(quoted(name))
    if isinstance(kind, StringType):
        return sf.array(column)
    if isinstance(kind, ArrayType) and isinstance(kind.elementType, StringType):
        return column
    if is_conversation(kind):
        role_fields = [field for field in ("role", FIELDS["role"]) if field in kind.elementType.fieldNames()]
        # NB: an instruction to the assistant is not a task, and all examples of an application share it.
        tasks = sf.filter(column, lambda message: ~_is_instruction(message, role_fields))
        return sf.transform(tasks, lambda message: text_of(message, kind.elementType, only_texts=True))
    return None


def _is_instruction(message: Column, role_fields: list[str]) -> Column:
    role = sf.coalesce(*(message[name] for name in role_fields))
    return sf.coalesce(role.isin(*INSTRUCTING), sf.lit(False))


def _hash_evaluation_batches(
    batches: Iterable[pa.RecordBatch], *, ngram: int, fewest: int, kinds: list[RedactKind]
) -> Iterator[pa.RecordBatch]:
    """Yield the hashes of the runs of words that identify the texts of each batch, and the numbers of their words."""
    import pyarrow as pa

    for batch in batches:
        texts = batch.column(TEXT).to_pylist()
        # NB: in the examples, redacted values are already placeholders, so the texts of the evaluation set need the same placeholders.
        for kind in kinds:
            texts = [replace_values(text, PATTERNS[kind])[0] for text in texts]
        hashes, words = hash_evaluation_texts(texts, ngram, fewest)
        columns = [pa.array(hashes.view(np.int64)), pa.array(words, pa.int32())]
        yield pa.RecordBatch.from_arrays(columns, [_GRAM, _WORDS])


def _hash_example_batches(
    batches: Iterable[pa.RecordBatch], *, lengths: Collection[int]
) -> Iterator[pa.RecordBatch]:
    """Yield the ids of examples, each with the hashes of its runs of words."""
    import pyarrow as pa

    for batch in batches:
        for start in range(0, batch.num_rows, _TEXTS_PER_BATCH):
            part = batch.slice(start, _TEXTS_PER_BATCH)
            hashes, ends = hash_examples(part.column(TEXT).to_pylist(), lengths)
            offsets = pa.array(np.append(0, ends), pa.int32())
            grams = pa.ListArray.from_arrays(offsets, pa.array(hashes.view(np.int64)))
            yield pa.RecordBatch.from_arrays([part.column(_ID), grams], [_ID, _GRAMS])
