"""Recipes for tests: the least that prepares something, and changes to it."""

from __future__ import annotations

import bisect
import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake

from finetune_crds.objective import COLUMNS_OF_OBJECTIVE
from finetune_crds.recipe import Recipe
from finetune_trainer.examples.token_columns import ENCODING
from finetune_trainer.examples.tokenizer import Loaded
from finetune_trainer.prep import output, pipeline, totals
from finetune_trainer.prep.plan import build_request
from finetune_trainer.prep.report import lengths
from finetune_trainer.prep.spark.progress import Progress
from finetune_trainer.prep.steps.steps import SOURCE, SPLIT, TOKENS
from finetune_trainer.prep.totals import Totals

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from finetune_crds.contract import PrepResult
    from finetune_trainer.prep.report.report import Facts

PAIR = {"type": "PromptResponse", "prompt": "question", "response": "answer"}
# The columns of a preference in the table, for its two documents.
PAIR_TOKENS = ("chosen_input_ids", "chosen_loss_mask", "rejected_input_ids", "rejected_loss_mask")
# Each sample is an aggregate, which makes plans that take longer to compile.
WITHOUT_SAMPLES: dict[str, Any] = {"reportSamples": 0}
_LEAST_PARTITIONS = "spark.sql.files.minPartitionNum"
Json = dict[str, Any]


def recipe(
    *,
    source: Json | None = None,
    columns: Json | None = PAIR,
    objective: Json | None = None,
    uid: str = "uid-1",
    name: str = "job",
    namespace: str = "default",
    base: str = "/model",
    **prepare: Any,
) -> Recipe:
    """A recipe over the columns `question` and `answer` of a Parquet folder; `prepare` is data.prepare.

    columns: None names none. objective: default: that of the columns.
    """
    kind = (columns or {}).get("type")
    usual = next((name for name, of in COLUMNS_OF_OBJECTIVE.items() if of == kind), "SFT")
    return Recipe.model_validate(
        {
            "job": {"name": name, "namespace": namespace, "uid": uid},
            "model": {"base": base},
            "data": {
                "source": source or {"type": "Parquet", "path": "/corpus"},
                "columns": columns,
                "prepare": {"output": "/out", **prepare},
            },
            "objective": objective or {"type": usual},
        }
    )


def untold() -> Progress:
    """The progress of a preparation that has no run."""
    return Progress(lambda _step, _percent: None, None)


def prepared(
    spark: SparkSession, job_recipe: Recipe, publish: Callable[[Facts], object] = lambda _: None
) -> PrepResult:
    """Prepare as a recipe asks whose model is a folder."""
    tokenizer = Loaded.of(job_recipe.model, Path(job_recipe.model.base))
    return pipeline.prepare(
        spark, job_recipe, build_request(job_recipe), tokenizer, untold(), publish=publish
    )


class CollectedRows:
    """Rows that Spark computes once: they are counted, and written as a new table, without Spark."""

    def __init__(self) -> None:
        self._table = pa.table({})

    def count(self, prepared: DataFrame, *, is_mix: bool) -> Totals:
        """Collect the rows, and count them as `totals.count_rows` does."""
        self._table = prepared.toArrow()
        rows = self._table.select([SPLIT, TOKENS, *([SOURCE] if is_mix else [])]).to_pylist()
        tokens: Counter[str] = Counter()
        for row in rows:
            tokens[row[SPLIT]] += row[TOKENS]
        bins = Counter(bisect.bisect_right(lengths.EDGES, row[TOKENS]) - 1 for row in rows)
        return Totals(
            rows=Counter(row[SPLIT] for row in rows),
            tokens=tokens,
            lengths=[bins[number] for number in range(len(lengths.EDGES))],
            sources=Counter(row[SOURCE] for row in rows if is_mix),
        )

    def commit(self, prepared: DataFrame, _: Recipe, result: PrepResult) -> PrepResult:
        """Write the rows that were counted."""
        return write_table(self._table, prepared, result)


def prepare_quickly(
    spark: SparkSession, job_recipe: Recipe, publish: Callable[[Facts], object] = lambda _: None
) -> PrepResult:
    """Prepare as `prepared` does, but let Spark compute the rows once, and count and write them without it.

    To keep, count and commit the rows with Spark takes three quarters of the CPU time of a small preparation. test_totals has
    the counts; test_output, test_pipeline and test_command have the rest, and for tables of other columns test_redact, test_labels
    and test_conversations.
    """
    collected_rows = CollectedRows()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "keep", lambda frame, _: frame)
        patch.setattr(totals, "count_rows", collected_rows.count)
        patch.setattr(output, "commit", collected_rows.commit)
        return prepared(spark, job_recipe, publish)


def commit_without_spark(prepared: DataFrame, _: Recipe, result: PrepResult) -> PrepResult:
    """Write the rows as version 0 of a table, with what training reads of the commit."""
    return write_table(prepared.toArrow(), prepared, result)


def write_table(rows: pa.Table, prepared: DataFrame, result: PrepResult) -> PrepResult:
    """Write rows as version 0 of a table, with what training reads of the commit, which `prepared` has in its schema."""
    (encoding,) = {encoding for field in prepared.schema if (encoding := field.metadata.get(ENCODING))}
    properties = CommitProperties(custom_metadata={"userMetadata": json.dumps({ENCODING: encoding})})
    write_deltalake(result.path, rows, mode="error", commit_properties=properties)
    return result


class Preparer:
    """Prepares rows, all of them for the training split.

    run: runs a preparation. shown: what the reports of the preparations show.
    """

    def __init__(self, spark: SparkSession, tokenizer: Path, folder: Path) -> None:
        self.folder = folder
        self.run = prepare_quickly
        self.shown: list[Facts] = []
        self._spark, self._tokenizer = spark, tokenizer
        self._numbers = itertools.count()

    def __call__(self, rows: list[Json], *, partitions: int = 1, **changes: Any) -> PrepResult:
        """Prepare rows that Spark reads in a number of partitions; `changes` are those of `recipe`."""
        number = next(self._numbers)
        corpus = self.folder / f"corpus-{number}"
        corpus.mkdir()
        table = pa.Table.from_pylist(rows)
        for part in range(partitions):
            pq.write_table(table.take([*range(part, len(rows), partitions)]), corpus / f"{part}.parquet")
        defaults: Json = {
            "source": {"type": "Parquet", "path": str(corpus)},
            "splitRatios": {"train": 1, "validation": 0, "test": 0},
            "output": str(self.folder / f"out-{number}"),
            "base": str(self._tokenizer),
            **WITHOUT_SAMPLES,
        }
        job_recipe = recipe(**defaults | changes)
        # NB: Spark reads several small files as one partition.
        self._spark.conf.set(_LEAST_PARTITIONS, partitions)
        try:
            return self.run(self._spark, job_recipe, self.shown.append)
        finally:
            self._spark.conf.unset(_LEAST_PARTITIONS)


class Compared(NamedTuple):
    """What comparing texts with evaluation sets leaves.

    clean: the ids of the texts that share no run of words with a set. shared: how many texts share one with each set, by set.
    """

    clean: list[str]
    shared: dict[str, int]


Comparing = Callable[[list[Json], dict[str, str]], Compared]
"""Compares texts, by id, with evaluation sets."""


def table_of(result: PrepResult) -> list[Json]:
    """Return the rows of the table at the result's version, as a reader without a JVM sees them."""
    rows: list[Json] = DeltaTable(result.path, version=result.version).to_pyarrow_table().to_pylist()
    return sorted(rows, key=lambda row: row["id"])
