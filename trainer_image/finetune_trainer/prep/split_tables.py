"""Saves the splits of the output table as tables with names, one for each split, in the session's own catalog."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

from pyspark.errors import AnalysisException
from pyspark.sql import functions as sf

from finetune_trainer.examples.split_origin import SplitOrigin
from finetune_trainer.examples.token_columns import ALL_TOKEN_COLUMNS
from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.prep import delta_conflicts
from finetune_trainer.prep.expressions.template import quoted
from finetune_trainer.prep.source import delta_table
from finetune_trainer.prep.spark import session
from finetune_trainer.prep.steps.steps import SPLIT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from finetune_crds.contract import PrepResult
    from finetune_crds.prepare import Prepare

# The condition of Delta for a table of the catalog whose folder does not exist.
_NO_FOLDER = "DELTA_PATH_DOES_NOT_EXIST"
# How many of the newest commits of a table are searched for one of a preparation.
_MAX_COMMITS = 100
# Operations of Delta that change no row.
_MAINTENANCE = frozenset(
    (
        "OPTIMIZE",
        "VACUUM START",
        "VACUUM END",
        "CLUSTER BY",
        "SET TBLPROPERTIES",
        "UNSET TBLPROPERTIES",
        "ADD CONSTRAINT",
        "DROP CONSTRAINT",
        "UPGRADE PROTOCOL",
        "ADD FEATURE",
        "DROP FEATURE",
    )
)


def check(spark: SparkSession, prepare: Prepare) -> None:
    """Check, before the preparation works, that its splits can be saved.

    Raises:
        DataError: a schema does not exist or is on a disk that the pod lacks, or a table has rows that no preparation saved.
    """
    for table in _list_tables(prepare):
        _check_schema(spark, table)
        if table.exists(spark) and not any(commit.origin for commit in table.list_commits(spark)):
            raise DataError(
                "OutputTaken",
                f"{table.label} is a table that no preparation saved in its newest {_MAX_COMMITS} commits: use another name, or drop the "
                "table",
            )


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
    """Save the splits of a version of the output table, and yield a message for each table that is saved or has later rows.

    A table that already has the split of this version stays as it is: an earlier attempt, or another job that reuses the version, saved
    it. So does a table with a later version of the same output. The columns are those of the output, without the split and the token ids.
    """
    for table in _list_tables(prepare):
        yield from _save_once(spark, table, result)


def _save_once(spark: SparkSession, table: _SplitTable, result: PrepResult) -> Iterator[str]:
    """Save a split unless its table already has it, or later rows; try again after other commits."""
    origin = SplitOrigin(result.path, result.version, table.split)
    for tries_left in reversed(range(delta_conflicts.MAX_ATTEMPTS)):
        # Each try looks again: the other commit may be of this split, or of a later version.
        commits = table.list_commits(spark) if table.exists(spark) else []
        if _find_rows_origin(commits) == origin:
            return
        latest = next((commit.origin for commit in commits if commit.origin), None)
        if latest is not None and _is_later(spark, latest, origin):
            yield f"kept the table {table.name}: it has the later version {latest.version} of {latest.path}"
            return
        try:
            _save_split(spark, table, result, origin.to_metadata())
        except delta_conflicts.list_conflicts():
            if not tries_left:
                raise
        else:
            yield f"saved the table {table.name}"
            return


def _find_rows_origin(commits: list[_Commit]) -> SplitOrigin | None:
    """Return the origin of the present rows of a table; None if the newest commit that changed rows is not of a preparation."""
    return next((commit.origin for commit in commits if commit.operation not in _MAINTENANCE), None)


def _is_later(spark: SparkSession, latest: SplitOrigin, origin: SplitOrigin) -> bool:
    """Whether `latest` is a later version of the same output than `origin`."""
    latest_version = latest.version or 0
    if latest.path != origin.path or latest_version <= (origin.version or 0):
        return False
    from delta.tables import DeltaTable

    # NB: an output that was deleted and made anew counts its versions from 0 again.
    newest_commit, *_ = DeltaTable.forPath(spark, session.spark_path(origin.path)).history(1).collect()
    return bool(newest_commit["version"] >= latest_version)


def _save_split(spark: SparkSession, table: _SplitTable, result: PrepResult, metadata: str) -> None:
    reader = spark.read.format("delta").option("versionAsOf", result.version)
    rows = reader.load(session.spark_path(result.path)).where(sf.col(SPLIT) == table.split)
    # NB: `drop` ignores columns that the table lacks: those of the other kind of example.
    writer = rows.drop(SPLIT, *ALL_TOKEN_COLUMNS).write.format("delta").mode("overwrite")
    writer = writer.option("overwriteSchema", "true").option("userMetadata", metadata)
    # NB: not every reader without a JVM supports deletion vectors.
    writer.option("delta.enableDeletionVectors", "false").saveAsTable(table.quoted)


class _Commit(NamedTuple):
    """A commit of a table.

    origin: None if no preparation wrote it.
    """

    operation: str
    origin: SplitOrigin | None


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

    def exists(self, spark: SparkSession) -> bool:
        """Whether the catalog has a table or a view of this name.

        Raises:
            DataError: the folder of the table does not exist.
        """
        with self._explain_missing_folder():
            return bool(spark.catalog.tableExists(self.quoted))

    def list_commits(self, spark: SparkSession) -> list[_Commit]:
        """Return the newest commits, newest first; empty if it is not a Delta table.

        Raises:
            DataError: its folder does not exist, or its log cannot be read.
        """
        from delta.tables import DeltaTable

        with (
            delta_table.explain_log_errors(self.label, reason="OutputTaken", remedy="use another name"),
            self._explain_missing_folder(),
        ):
            try:
                history = DeltaTable.forName(spark, self.quoted).history(_MAX_COMMITS)
                rows = history.select("version", "operation", "userMetadata").collect()
            except AnalysisException as error:
                condition = error.getCondition() or ""
                # A view, or a table of another format.
                if "DELTA_" not in condition or condition == _NO_FOLDER:
                    raise
                return []
        newest_first = sorted(rows, key=lambda row: row["version"], reverse=True)
        return [_Commit(row["operation"], SplitOrigin.parse(row["userMetadata"])) for row in newest_first]

    @contextmanager
    def _explain_missing_folder(self) -> Iterator[None]:
        """Raise DataError for a table of the catalog whose folder does not exist."""
        try:
            yield
        except AnalysisException as error:
            if error.getCondition() != _NO_FOLDER:
                raise
            raise DataError(
                "MissingTable",
                f"the folder of {self.label} does not exist or is not mounted in this pod: mount its volume, or drop the table",
            ) from error


def _list_tables(prepare: Prepare) -> list[_SplitTable]:
    """Return the tables to save."""
    names = prepare.split_tables.by_split if prepare.split_tables else {}
    return [_SplitTable(split, name) for split, name in names.items()]
