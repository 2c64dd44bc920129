"""Reads a corpus in a Delta table, at one version."""

from __future__ import annotations

import re
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import AnalysisException, PySparkException

from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.prep.spark import metastore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from delta.tables import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

    from finetune_crds.source import TableLocation
    from finetune_trainer.prep.source.location import Place

# Delta's message about features that it does not have. Group 1: the features.
_FEATURES = re.compile(r"\[DELTA_UNSUPPORTED_FEATURES_FOR_READ\].* unsupported by Delta Lake \S+: ([\w, -]+)")
# Delta's messages about a log in which files are missing. Group 1: the message, without the error class.
_INCOMPLETE_LOG = re.compile(
    r"(?:\[DELTA_(?:VERSIONS_NOT_CONTIGUOUS|TRUNCATED_TRANSACTION_LOG|STATE_RECOVER_ERROR)\] |(?=Could not find any delta files))(.+)"
)
_MAX_MESSAGE_CHARS = 200


def read(
    spark: SparkSession, source: TableLocation, place: Place | None, field: str
) -> tuple[DataFrame, int, str]:
    """Read a table at the requested version, or at the newest; return the rows, the version and the id of the table.

    The id distinguishes a table from an earlier table of the same name, whose versions have the same numbers.

    Args:
        place: the location; None for a table that the session finds by its name.
        field: the recipe's field that holds the source, for messages.

    Raises:
        DataError: the table or its version is missing, its log is incomplete, or it requires unsupported features.
    """
    with explain_log_errors(f"the Delta table {source.address}"):
        return _read_version(spark, source, place, field)


@contextmanager
def explain_log_errors(table: str, *, reason: str = "", remedy: str = "") -> Iterator[None]:
    """Turn Delta's errors about the log of a table, and about features that the table requires, into errors of the pod.

    Args:
        table: the table, for messages.
        reason: the reason of the error. Default: UnsupportedTable or UnreadableSource.
        remedy: what to do. Default: what to do about a source.

    Raises:
        DataError: the log of the table is incomplete, or the table requires unsupported features.
    """
    try:
        yield
    except (Py4JJavaError, PySparkException) as error:
        text = str(error)
        if features := _FEATURES.search(text):
            raise DataError(
                reason or "UnsupportedTable",
                f"{table} requires features that the preparation does not read ({features[1]}): "
                f"{remedy or 'drop these features with ALTER TABLE ... DROP FEATURE, or write the table again without them'}",
            ) from error
        if problem := _INCOMPLETE_LOG.search(text):
            raise DataError(
                reason or "UnreadableSource",
                f"{table} cannot be read, because its log is incomplete ({problem[1].rstrip('. ')[:_MAX_MESSAGE_CHARS]}): "
                f"{remedy or 'restore the missing files of _delta_log, or write the table again'}",
            ) from error
        raise


def _read_version(
    spark: SparkSession, source: TableLocation, place: Place | None, field: str
) -> tuple[DataFrame, int, str]:
    table = _open_table(spark, source, place, field)
    version = _choose_version(table, source, field)
    reader = spark.read.format("delta").option("versionAsOf", version)
    try:
        frame = (
            reader.options(**place.options).load(place.path) if place else reader.table(source.table or "")
        )
    except AnalysisException as error:
        if "DELTA_" not in (error.getCondition() or ""):
            raise
        # The version is not above the table's newest, so an error of Delta means that the version's log or files are gone.
        raise build_gone_error(source) from error
    return frame, version, str(table.detail().select("id").first()["id"])


def build_gone_error(source: TableLocation) -> DataError:
    """Return the error of a version whose log or files no longer exist."""
    version = "the newest version" if source.version is None else f"version {source.version}"
    if source.version_time is not None:
        version = f"the version of {source.version_time.isoformat()}"
    return DataError(
        "VersionGone",
        f"{version} of the Delta table {source.address} can no longer be read, because VACUUM or the cleanup of its "
        "log removed files: use a newer version",
    )


def _open_table(spark: SparkSession, source: TableLocation, place: Place | None, field: str) -> DeltaTable:
    from delta.tables import DeltaTable

    if place is None:
        metastore.require(spark, source.table or "", f"{field}.table")
    try:
        if place:
            return DeltaTable.forPath(spark, place.path, dict(place.options))
        return DeltaTable.forName(spark, source.table or "")
    except AnalysisException as error:
        name = "path" if source.path else "table"
        raise DataError(
            "MissingSource",
            f"{field}.{name} {source.address} is not a Delta table: correct the {name}, or set another type",
        ) from error


def _choose_version(table: DeltaTable, source: TableLocation, field: str) -> int:
    """Return the version that the recipe names by its number or by a time, or else the newest."""
    if source.version_time is not None:
        return _find_version_at(table, source.version_time, source, field)
    newest = int(table.history(1).select("version").first()["version"])
    if source.version is not None and source.version > newest:
        raise DataError(
            "MissingVersion",
            f"the Delta table {source.address} has no version {source.version}: its newest is {newest}",
        )
    return newest if source.version is None else source.version


def _find_version_at(table: DeltaTable, time: datetime, source: TableLocation, field: str) -> int:
    """Return the version that was current at a time."""
    from pyspark.sql import functions as sf

    # NB: times are compared as seconds since the epoch: the session and this process may have different time zones.
    seconds = time.timestamp()
    if seconds > datetime.now(UTC).timestamp():
        raise DataError(
            "MissingVersion",
            f"{field}.versionTime {time.isoformat()} is in the future: name a time that has passed",
        )
    commits = table.history().select("version", sf.col("timestamp").cast("double").alias("seconds")).collect()
    versions = [int(commit["version"]) for commit in commits if commit["seconds"] <= seconds]
    if not versions:
        oldest = min(commits, key=lambda commit: commit["version"])
        oldest_time = datetime.fromtimestamp(oldest["seconds"], UTC).isoformat(timespec="seconds")
        raise DataError(
            "VersionGone",
            f"the log of the Delta table {source.address} begins with version {oldest['version']} at {oldest_time}, after "
            f"{field}.versionTime {time.isoformat()}: name a later time",
        )
    return max(versions)
