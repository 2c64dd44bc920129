"""The output table: each job commits one version, whose metadata identifies the job and its recipe."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from pydantic import ValidationError
from pyspark.sql import functions as sf

from finetune_crds.contract import PrepResult
from finetune_trainer.examples.token_columns import ENCODING
from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.prep import delta_conflicts, identity
from finetune_trainer.prep.source import delta_table
from finetune_trainer.prep.spark import session
from finetune_trainer.prep.spark.session import spark_path
from finetune_trainer.prep.steps.steps import ID, SPLIT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame, Row, SparkSession

    from finetune_crds.recipe import Recipe

# A file of this many tokens has about 50 MB: few files for a small corpus, and enough for parallel reads of a large
# one.
_TOKENS_PER_FILE = 16_000_000
# How many of the newest commits a job searches for its own version, and for a version that it can reuse.
_MAX_COMMITS = 100

# Files that Delta writes before it commits, and checksums of local files.
_UNCOMMITTED_FILE = re.compile(r"_delta_log|part-.*[.]parquet|[.].*")


@dataclass(frozen=True)
class Version:
    """A version of the table, with the metadata of the preparation that wrote it.

    Attributes:
        number: the version of the table.
        job: the uid of the FineTuneJob.
        recipe: the digest of the job's recipe.
        settings: the digest of the job's preparation, see `settings_digest`; None in tables of earlier releases.
        result: the job's PrepResult, as JSON.
        name, namespace: of the FineTuneJob; None in tables of earlier releases.
    """

    number: int
    job: str
    recipe: str
    result: Any
    name: str | None = None
    namespace: str | None = None
    settings: str | None = None


def list_versions(spark: SparkSession, recipe: Recipe, path: str) -> list[Version]:
    """Return the versions of the table at `path` that preparations wrote, oldest first; empty if there is no table.

    Raises:
        DataError: `path` contains data that a new version would hide: files or a table that no preparation wrote, or the table of
            a job with another preparation.
    """
    table = f"the Delta table of data.prepare.output {path}"
    with delta_table.explain_log_errors(table, reason="OutputTaken", remedy="use another folder"):
        commits = _list_commits(spark, path)
    if commits is None:
        return []
    # NB: sorted here, since a sort by Spark takes two more jobs.
    entries = sorted(commits, key=lambda entry: entry["version"])
    parsed_versions = (_parse_version(entry["version"], entry["userMetadata"]) for entry in entries)
    prepared_versions = [version for version in parsed_versions if version is not None]
    if not prepared_versions:
        raise DataError(
            "OutputTaken",
            f"data.prepare.output {path} is a Delta table that was not written by a preparation: use another folder",
        )
    _refuse_other_preparations(prepared_versions, recipe, path)
    return prepared_versions


def _list_commits(spark: SparkSession, path: str) -> list[Row] | None:
    """Return the versions of the table with the metadata that their writers added; None if there is no table."""
    from delta.tables import DeltaTable

    location = spark_path(path)
    if not DeltaTable.isDeltaTable(spark, location):
        if _has_files(spark, location):
            raise DataError(
                "OutputTaken",
                f"data.prepare.output {path} contains files but is not a Delta table: use another folder, or empty it",
            )
        return None
    history = DeltaTable.forPath(spark, location).history(_MAX_COMMITS)
    commits: list[Row] = history.where("userMetadata IS NOT NULL").select("version", "userMetadata").collect()
    return commits


def _parse_version(number: int, metadata: str) -> Version | None:
    """Return the version of a commit; None if no preparation wrote it."""
    try:
        properties = json.loads(metadata)
        optional = {name: properties.get(name) for name in ("name", "namespace", "settings")}
        return Version(number, properties["job"], properties["recipe"], properties["result"], **optional)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _refuse_other_preparations(table_versions: Sequence[Version], recipe: Recipe, path: str) -> None:
    """Refuse the table of a job that prepares something else. A job may replace its own versions, and versions of unknown settings."""
    settings = identity.digest_settings(recipe)
    for version in table_versions:
        if version.job != recipe.job.uid and version.settings not in (None, settings):
            raise DataError(
                "OutputTaken",
                f"data.prepare.output {path} belongs to FineTuneJob {version.namespace}/{version.name}, whose source, "
                "preparation steps or tokenizer differ: use another folder",
            )


def _has_files(spark: SparkSession, location: str) -> bool:
    """Return whether a folder has files other than the uncommitted files that a killed preparation leaves."""
    context: Any = session.context(spark)
    if context is None:
        return _has_files_without_jvm(spark, location)
    path = context._jvm.org.apache.hadoop.fs.Path(location)  # noqa: SLF001 - pyspark has no file system
    files = path.getFileSystem(context._jsc.hadoopConfiguration())  # noqa: SLF001
    entries = files.listStatus(path) if files.exists(path) else []
    return any(not _UNCOMMITTED_FILE.fullmatch(entry.getPath().getName()) for entry in entries)


def _has_files_without_jvm(spark: SparkSession, location: str) -> bool:
    """Return the same as `_has_files`, without access to the JVM.

    Spark lists no files whose name begins with a dot or an underscore, so only `part-*.parquet` must be left out.
    """
    from pyspark.errors import AnalysisException

    try:
        paths = spark.read.format("binaryFile").load(location).select("path")
        return not paths.where(~sf.col("path").rlike(r"/part-[^/]*[.]parquet$")).isEmpty()
    except AnalysisException as error:
        if error.getCondition() != "PATH_NOT_FOUND":
            raise
        return False


def find_own_result(table_versions: Sequence[Version], recipe: Recipe, path: str) -> PrepResult | None:
    """Return the result that this job and recipe already committed, if any."""
    key = _commit_key(recipe)
    results = (
        _parse_result(version, path)
        for version in table_versions
        if {"job": version.job, "recipe": version.recipe} == key
    )
    return next((result for result in results if result is not None), None)


def find_reusable_result(
    spark: SparkSession, table_versions: Sequence[Version], recipe: Recipe, path: str, digest: str
) -> PrepResult | None:
    """Return the newest result with this digest that a job of this job's namespace committed and that can still be read.

    `written_by` of the result is the name of the job that committed it, or None if this job did.

    Args:
        digest: the digest of the rows, see `identity.digest`.
    """
    for version in reversed(table_versions):
        if version.namespace != recipe.job.namespace:
            continue
        result = _parse_result(version, path)
        if result is not None and result.digest == digest and _has_all_files(spark, path, version.number):
            written_by = None if version.job == recipe.job.uid else version.name
            return result.model_copy(update={"written_by": written_by})
    return None


def _has_all_files(spark: SparkSession, path: str, number: int) -> bool:
    """Return whether all files of a version exist: VACUUM removes them some days after the version was replaced."""
    from pyspark.errors import AnalysisException

    try:
        table = spark.read.format("delta").option("versionAsOf", number).load(spark_path(path))
        files = [unquote(file) for file in table.inputFiles()]
        # NB: Spark looks for each file before it returns the columns, and raises an error if one is missing.
        return bool(files) and bool(spark.read.format("binaryFile").load(files).columns)
    except AnalysisException:
        return False


def _parse_result(version: Version, path: str) -> PrepResult | None:
    """Return the result of a version; None if it has the format of another release."""
    try:
        # NB: the table may have been copied since, so its present path replaces the path in the result.
        return PrepResult.model_validate(version.result | {"version": version.number, "path": path})
    except (TypeError, ValidationError):
        return None


def _commit_key(recipe: Recipe) -> dict[str, str]:
    """Return what identifies the commit of a job and its recipe, as fields of the commit's metadata."""
    return {"job": recipe.job.uid, "recipe": recipe.digest()}


def commit(frame: DataFrame, recipe: Recipe, result: PrepResult) -> PrepResult:
    """Write the table as one new version, and return the result with that version.

    If this job and recipe have already committed, Delta skips the write, and this returns the earlier result. If another commit
    conflicts and this job can use its rows, return the result of the other commit.

    Args:
        frame: the rows; they are read again when the write is tried again.

    Raises:
        DataError: another job wrote a different preparation in the meantime.
    """
    spark = frame.sparkSession
    for tries_left in reversed(range(delta_conflicts.MAX_ATTEMPTS)):
        try:
            _write(frame, recipe, result)
            break
        except delta_conflicts.list_conflicts():
            if not tries_left:
                raise
        usable = _find_concurrent_result(spark, recipe, result)
        if usable is not None:
            return usable
    committed = find_own_result(list_versions(spark, recipe, result.path), recipe, result.path)
    if committed is None:
        raise RuntimeError(f"the table {result.path} does not have the version that was just written to it")
    return committed


def _find_concurrent_result(spark: SparkSession, recipe: Recipe, result: PrepResult) -> PrepResult | None:
    """Return the result of a concurrent commit, if this job may use it."""
    table_versions, prepare = list_versions(spark, recipe, result.path), recipe.data.prepare
    own_result = find_own_result(table_versions, recipe, result.path)
    if own_result is not None:
        return own_result
    if prepare is None or prepare.reuse == "Never" or result.digest is None:
        return None
    return find_reusable_result(spark, table_versions, recipe, result.path, result.digest)


def _find_encoding(frame: DataFrame) -> str | None:
    """Return the encoding that produced the token ids of a frame."""
    encodings = (field.metadata.get(ENCODING) for field in frame.schema.fields)
    return next((encoding for encoding in encodings if encoding), None)


def _write(frame: DataFrame, recipe: Recipe, result: PrepResult) -> None:
    """Commit the rows as one version, unless the same job and recipe have committed before."""
    key, job = _commit_key(recipe), recipe.job
    preparation = {"name": job.name, "namespace": job.namespace, "settings": identity.digest_settings(recipe)}
    metadata = json.dumps({**key, **preparation, "result": result.to_json(), ENCODING: _find_encoding(frame)})
    tokens = result.tokens.train + result.tokens.validation + result.tokens.test
    files = math.ceil(max(tokens, 1) / _TOKENS_PER_FILE)
    # Partitioned by id and sorted by split and id, equal examples make equal files.
    ordered = frame.repartition(files, ID).sortWithinPartitions(SPLIT, ID)
    writer = ordered.write.format("delta").mode("overwrite").option("overwriteSchema", "true")
    writer = writer.option("userMetadata", metadata)
    # Delta skips the write if the table has a commit with the same transaction.
    writer = writer.option("txnAppId", "/".join(key.values())).option("txnVersion", 1)
    # NB: not every reader without a JVM supports deletion vectors.
    writer = writer.option("delta.enableDeletionVectors", "false")
    writer.save(spark_path(result.path))
