"""Saves the splits of the output table as tables with names, one for each split, in the session's own catalog."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

from pyspark.sql import functions as sf

from finetune_trainer.examples.token_columns import ALL_TOKEN_COLUMNS
from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.prep.expressions.template import quoted
from finetune_trainer.prep.source import delta_table
from finetune_trainer.prep.spark import session
from finetune_trainer.prep.steps.steps import SPLIT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from finetune_crds.contract import PrepResult
    from finetune_crds.prepare import Prepare

# The key of the metadata of a commit that a preparation saved a split with.
_SPLIT_OF = "splitOf"
# How many of the newest commits of a table are searched for one of a preparation.
_MAX_COMMITS = 100


def check(spark: SparkSession, prepare: Prepare) -> None:
    """Check, before the preparation works, that its splits can be saved.

    Raises:
        DataError: a schema does not exist or is on a disk that the pod lacks, or a table has rows that no preparation saved.
    """
    for table in _list_tables(prepare):
        if spark.catalog.tableExists(table.quoted):
            if not table.list_metadata(spark, _MAX_COMMITS):
                raise DataError(
                    "OutputTaken",
                    f"{table.label} is a table that no preparation saved: use another name, or drop the table",
                )
        else:
            _check_schema(spark, table)


def _check_schema(spark: SparkSession, table: _SplitTable) -> None:
    if not spark.catalog.databaseExists(table.quoted_schema):
        raise DataError(
            "MissingSchema",
            f"{table.label} is in a schema that does not exist: create the schema, or correct the name",
        )
    # In a workspace, the catalog decides where tables are.
    if session.on_databricks():
        return
    location = urlsplit(spark.catalog.getDatabase(table.quoted_schema).locationUri)
    # NB: Spark would make the folder on the disk of the pod, where it ends with the pod.
    if location.scheme in ("", "file") and not Path(unquote(location.path)).is_dir():
        raise DataError(
            "MissingSchema",
            f"{table.label} is in a schema whose location {location.path} is not a folder of this pod: mount the volume there, or use a "
            "schema in an object store",
        )


def save(spark: SparkSession, prepare: Prepare, result: PrepResult) -> Iterator[str]:
    """Save the splits of a version of the output table, and yield the name of each table that is written.

    A table that already has the split of this version stays as it is: an earlier attempt, or another job that reuses the version, saved
    it. The columns are those of the output, without the split and the token ids.
    """
    for table in _list_tables(prepare):
        metadata = json.dumps(
            {_SPLIT_OF: {"path": result.path, "version": result.version, "split": table.split}}
        )
        is_saved = spark.catalog.tableExists(table.quoted) and table.list_metadata(spark, 1) == [metadata]
        if not is_saved:
            _save_split(spark, table, result, metadata)
            yield table.name


def _save_split(spark: SparkSession, table: _SplitTable, result: PrepResult, metadata: str) -> None:
    reader = spark.read.format("delta").option("versionAsOf", result.version)
    rows = reader.load(session.spark_path(result.path)).where(sf.col(SPLIT) == table.split)
    # NB: `drop` ignores columns that the table lacks: those of the other kind of example.
    writer = rows.drop(SPLIT, *ALL_TOKEN_COLUMNS).write.format("delta").mode("overwrite")
    writer = writer.option("overwriteSchema", "true").option("userMetadata", metadata)
    # NB: not every reader without a JVM supports deletion vectors.
    writer.option("delta.enableDeletionVectors", "false").saveAsTable(table.quoted)


class _SplitTable(NamedTuple):
    """The table of a split."""

    split: str
    name: str

    @property
    def label(self) -> str:
        """The field of the recipe and the name, for messages."""
        return f"data.prepare.splitTables.{self.split} {self.name}"

    @property
    def quoted(self) -> str:
        """The name in SQL."""
        return ".".join(quoted(part) for part in self.name.split("."))

    @property
    def quoted_schema(self) -> str:
        """The name of the schema in SQL."""
        return self.quoted.rpartition(".")[0]

    def list_metadata(self, spark: SparkSession, commits: int) -> list[str]:
        """Return the metadata of the newest commits that preparations wrote, newest first; empty if it is not a Delta table."""
        from delta.tables import DeltaTable
        from pyspark.errors import AnalysisException

        with delta_table.explain_log_errors(self.label, reason="OutputTaken", remedy="use another name"):
            try:
                history = DeltaTable.forName(spark, self.quoted).history(commits)
            except AnalysisException as error:
                # A view, or a table of another format.
                if "DELTA_" not in (error.getCondition() or ""):
                    raise
                return []
            rows = history.select("version", "userMetadata").collect()
        newest_first = sorted(rows, key=lambda row: row["version"], reverse=True)
        return [text for row in newest_first if _SPLIT_OF in (text := row["userMetadata"] or "")]


def _list_tables(prepare: Prepare) -> list[_SplitTable]:
    """Return the tables to save."""
    names = prepare.split_tables.by_split if prepare.split_tables else {}
    return [_SplitTable(split, name) for split, name in names.items()]
