"""`python -m unit.trainer.prep.hive_reader URI FOLDER`: reads tables of a Hive metastore in a session as the prep pod starts it.

A process of its own, since the catalog of a session is chosen when its JVM starts. It prints what it read of each table, or the
sentence of the error; then the rows of each table that a preparation saved a split to. It reads a table again after each line of its input.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_crds.catalog import Catalog
from finetune_crds.cleaning import EvaluationSource
from finetune_crds.source import Source
from finetune_trainer.pod.exit_status import PodFailure
from finetune_trainer.prep import spark_errors
from finetune_trainer.prep.plan import build_plan
from finetune_trainer.prep.source import reader
from finetune_trainer.prep.steps import decontaminate
from support import quick_session
from support.small_tokenizer import save_tokenizer
from unit.trainer.prep.recipes import WITHOUT_SAMPLES, prepared, recipe

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TABLES = (
    "CREATE DATABASE support LOCATION '{folder}/support'",
    "CREATE TABLE support.chats USING delta AS SELECT id, 'why' AS question FROM range(5)",
    "INSERT INTO support.chats SELECT id, 'how' AS question FROM range(3)",
    "CREATE TABLE support.files USING parquet AS SELECT id FROM range(7)",
    "CREATE TABLE support.old STORED AS PARQUET AS SELECT id FROM range(9)",
    "CREATE TABLE support.text USING csv AS SELECT id FROM range(2)",
    "CREATE VIEW support.seen AS SELECT * FROM support.files",
)
ASKED: dict[str, dict[str, Any]] = {
    "the newest version": {"type": "Delta", "table": "support.chats"},
    "a version": {"type": "Delta", "table": "support.chats", "version": 0},
    "files": {"type": "Parquet", "table": "support.files"},
    "files of Hive": {"type": "Parquet", "table": "support.old"},
    "another format": {"type": "Parquet", "table": "support.text"},
    "a view": {"type": "Parquet", "table": "support.seen"},
    "no Delta table": {"type": "Delta", "table": "support.files"},
    "no such table": {"type": "Delta", "table": "support.nowhere"},
    "no such database": {"type": "Parquet", "table": "nowhere.chats"},
}


SAVED_FROM = """
CREATE TABLE support.pairs USING delta AS
SELECT concat('What is in hall ', id, '?') AS question, concat('Table ', id, '.') AS answer FROM range(40)
"""


def read_set(spark: SparkSession, folder: Path, catalog: Catalog) -> list[Any]:
    """The version, the number of rows and the name in the log of an evaluation set."""
    source = EvaluationSource.model_validate({"name": "tasks", "type": "Delta", "table": "support.chats"})
    (evaluation_set,) = decontaminate.read(spark, [source], folder, catalog)
    return [
        evaluation_set.corpus.version,
        evaluation_set.corpus.frame.count(),
        decontaminate.describe(evaluation_set),
    ]


def read(spark: SparkSession, source: dict[str, Any], folder: Path, catalog: Catalog) -> list[Any]:
    """The version and the number of rows of a table, or the reason and the sentence of the error."""
    try:
        with spark_errors.translate_errors(build_plan(recipe())):
            corpus = reader.read(spark, Source.model_validate(source), folder, catalog=catalog)
            return [corpus.version, corpus.frame.count()]
    except PodFailure as failure:
        return [failure.exit_code, failure.reason, failure.message]


def save_splits(spark: SparkSession, folder: Path, catalog: Catalog) -> dict[str, int]:
    """The number of rows in each table that a preparation saves a split to."""
    save_tokenizer(folder / "tokenizer")
    spark.sql(SAVED_FROM)
    tables = {split: f"support.chat_{split}" for split in ("train", "validation", "test")}
    prepared(
        spark,
        recipe(
            source={"type": "Delta", "table": "support.pairs"},
            base=str(folder / "tokenizer"),
            output=str(folder / "splits"),
            catalog=catalog.to_json(),
            splitRatios={"train": 0.5, "validation": 0.25, "test": 0.25},
            splitTables=tables,
            **WITHOUT_SAMPLES,
        ),
    )
    return {table: spark.table(table).count() for table in tables.values()}


def main(uri: str, folder: Path) -> None:
    catalog = Catalog.model_validate({"type": "Hive", "hive": {"uri": uri}})
    spark = quick_session.start(catalog)
    for statement in TABLES:
        spark.sql(statement.format(folder=folder))
    rows = {name: read(spark, source, folder, catalog) for name, source in ASKED.items()}
    print(json.dumps(rows | {"an evaluation set": read_set(spark, folder, catalog)}), flush=True)
    with contextlib.redirect_stdout(sys.stderr):
        saved = save_splits(spark, folder, catalog)
    print(json.dumps(saved), flush=True)
    for _ in sys.stdin:
        print(json.dumps(read(spark, ASKED["files"], folder, catalog)), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
