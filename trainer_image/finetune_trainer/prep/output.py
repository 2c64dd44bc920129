"""The output table: one commit per run of a recipe, identified by its metadata."""

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
from finetune_trainer.examples.documents import ENCODING
from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.prep import identity
from finetune_trainer.prep.spark import session
from finetune_trainer.prep.spark.session import spark_path
from finetune_trainer.prep.steps.steps import ID, SPLIT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame, SparkSession

    from finetune_crds.recipe import Recipe

# A file of this many tokens has about 50 MB: few files for a small corpus, and enough for parallel reads of a large
# one.
_TOKENS_A_FILE = 16_000_000
# How many commits a job searches for its own, and for one that it can use.
_COMMITS_LOOKED_AT = 100
# How often a commit is tried that others get in the way of.
_TRIES = 5

# What Delta writes before it commits, and the checksums of local files.
_LEFT_BEHIND = re.compile(r"_delta_log|part-.*[.]parquet|[.].*")


@dataclass(frozen=True)
class Version:
    """A version of the table, and what its commit says of the preparation that wrote it.

    Attributes:
        job: the uid of the FineTuneJob, whose name and namespace are None in tables of earlier releases.
        recipe: the digest of its recipe.
        settings: the digest of its preparation, see `settings_digest`; None in tables of earlier releases.
        result: its PrepResult, as JSON.
    """

    number: int
    job: str
    recipe: str
    result: Any
    name: str | None = None
    namespace: str | None = None
    settings: str | None = None


def versions(spark: SparkSession, recipe: Recipe, path: str) -> list[Version]:
    """Return the versions of the table at `path` that preparations wrote, the oldest first; none where there is no table.

    Raises:
        DataError: `path` holds what no preparation wrote, or what a job wrote whose preparation is another one; a new version
            would hide it.
    """
    from delta.tables import DeltaTable

    place = spark_path(path)
    if not DeltaTable.isDeltaTable(spark, place):
        if _holds_files(spark, place):
            raise DataError(
                "OutputTaken",
                f"data.prepare.output {path} has files and is not a Delta table: name another folder, or empty it",
            )
        return []
    history = DeltaTable.forPath(spark, place).history(_COMMITS_LOOKED_AT)
    commits = (
        history.where("userMetadata IS NOT NULL")
        .select("version", "userMetadata")
        .orderBy("version")
        .collect()
    )
    told = (_version(commit["version"], commit["userMetadata"]) for commit in commits)
    found = [version for version in told if version is not None]
    if not found:
        raise DataError(
            "OutputTaken",
            f"data.prepare.output {path} is a Delta table that no preparation wrote: name another folder",
        )
    _refuse_others(found, recipe, path)
    return found


def _version(number: int, metadata: str) -> Version | None:
    """What a commit says; None where no preparation wrote it."""
    try:
        said = json.loads(metadata)
        known = {name: said.get(name) for name in ("name", "namespace", "settings")}
        return Version(number, said["job"], said["recipe"], said["result"], **known)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _refuse_others(found: Sequence[Version], recipe: Recipe, path: str) -> None:
    """Refuse the table of a job that prepares something else. A job may replace its own versions."""
    settings = identity.settings(recipe)
    for version in found:
        if version.job != recipe.job.uid and version.settings not in (None, settings):
            raise DataError(
                "OutputTaken",
                f"data.prepare.output {path} is the table of FineTuneJob {version.namespace}/{version.name}, which prepares "
                "another source, with other steps or for another tokenizer: name another folder",
            )


def _holds_files(spark: SparkSession, place: str) -> bool:
    """Whether a folder has files other than those that a killed pod of a preparation leaves before its commit."""
    context: Any = session.context(spark)
    if context is None:
        return _lists_files(spark, place)
    path = context._jvm.org.apache.hadoop.fs.Path(place)  # noqa: SLF001 - pyspark has no file system
    files = path.getFileSystem(context._jsc.hadoopConfiguration())  # noqa: SLF001
    found = files.listStatus(path) if files.exists(path) else []
    return any(not _LEFT_BEHIND.fullmatch(entry.getPath().getName()) for entry in found)


def _lists_files(spark: SparkSession, place: str) -> bool:
    """The same without a JVM: Spark lists the files, without those that begin with a dot or an underscore."""
    from pyspark.errors import AnalysisException

    try:
        found = spark.read.format("binaryFile").load(place).select("path")
        return not found.where(~sf.col("path").rlike(r"/part-[^/]*[.]parquet$")).isEmpty()
    except AnalysisException as error:
        if error.getCondition() != "PATH_NOT_FOUND":
            raise
        return False


def own(found: Sequence[Version], recipe: Recipe, path: str) -> PrepResult | None:
    """Return the result that this job and recipe already committed, if any."""
    mine = _token(recipe)
    results = (
        _result(version, path) for version in found if {"job": version.job, "recipe": version.recipe} == mine
    )
    return next((result for result in results if result is not None), None)


def same(
    spark: SparkSession, found: Sequence[Version], recipe: Recipe, path: str, digest: str
) -> PrepResult | None:
    """Return the newest result with the same rows that a job of the namespace committed, if it can still be read.

    Args:
        digest: of the rows, see `identity.digest`.
    """
    for version in reversed(found):
        if version.namespace != recipe.job.namespace:
            continue
        result = _result(version, path)
        if result is not None and result.digest == digest and _is_whole(spark, path, version.number):
            by = None if version.job == recipe.job.uid else version.name
            return result.model_copy(update={"written_by": by})
    return None


def _is_whole(spark: SparkSession, path: str, number: int) -> bool:
    """Whether the files of a version exist, which VACUUM removes some days after it was replaced."""
    from pyspark.errors import AnalysisException

    try:
        table = spark.read.format("delta").option("versionAsOf", number).load(spark_path(path))
        files = [unquote(file) for file in table.inputFiles()]
        # NB: Spark looks for each file before it says what its columns are.
        return bool(files) and bool(spark.read.format("binaryFile").load(files).columns)
    except AnalysisException:
        return False


def _result(version: Version, path: str) -> PrepResult | None:
    """The result of a version; None where another release wrote what this one cannot read."""
    try:
        # NB: a table may have been copied to where it is now.
        return PrepResult.model_validate(version.result | {"version": version.number, "path": path})
    except (TypeError, ValidationError):
        return None


def _token(recipe: Recipe) -> dict[str, str]:
    return {"job": recipe.job.uid, "recipe": recipe.digest()}


def commit(frame: DataFrame, recipe: Recipe, result: PrepResult) -> PrepResult:
    """Write the table as one new version, and return the result with that version.

    Delta skips the write when this job and recipe have committed before; the result is then the earlier one's. When another
    commit gets in the way, it is that commit's if this job can use it.

    Args:
        frame: the rows; they are read again when the write is tried again.

    Raises:
        DataError: another job has written something else meanwhile.
    """
    spark = frame.sparkSession
    for tries_left in reversed(range(_TRIES)):
        try:
            _write(frame, recipe, result)
            break
        except _conflicts():
            if not tries_left:
                raise
        usable = _usable(spark, recipe, result)
        if usable is not None:
            return usable
    committed = own(versions(spark, recipe, result.path), recipe, result.path)
    if committed is None:
        raise RuntimeError(f"the table {result.path} does not have the version that was just written to it")
    return committed


def _usable(spark: SparkSession, recipe: Recipe, result: PrepResult) -> PrepResult | None:
    """What another commit has written meanwhile, if this job may use it."""
    found, prepare = versions(spark, recipe, result.path), recipe.data.prepare
    mine = own(found, recipe, result.path)
    if mine or prepare is None or prepare.reuse == "Never" or result.digest is None:
        return mine
    return same(spark, found, recipe, result.path, result.digest)


def _conflicts() -> tuple[type[Exception], ...]:
    """What Delta raises for a commit that met another one. NB: they have no class in common."""
    from delta import exceptions

    return (
        exceptions.DeltaConcurrentModificationException,
        exceptions.ConcurrentWriteException,
        exceptions.MetadataChangedException,
        exceptions.ProtocolChangedException,
        exceptions.ConcurrentAppendException,
        exceptions.ConcurrentDeleteReadException,
        exceptions.ConcurrentDeleteDeleteException,
        exceptions.ConcurrentTransactionException,
    )


def _encoding(frame: DataFrame) -> str | None:
    """What made the token ids of a frame."""
    told = (field.metadata.get(ENCODING) for field in frame.schema.fields)
    return next((one for one in told if one), None)


def _write(frame: DataFrame, recipe: Recipe, result: PrepResult) -> None:
    token, job = _token(recipe), recipe.job
    said = {"name": job.name, "namespace": job.namespace, "settings": identity.settings(recipe)}
    metadata = json.dumps({**token, **said, "result": result.to_json(), ENCODING: _encoding(frame)})
    tokens = result.tokens.train + result.tokens.validation + result.tokens.test
    files = math.ceil(max(tokens, 1) / _TOKENS_A_FILE)
    # Sorted by split and id: equal examples make equal files.
    ordered = frame.repartition(files, ID).sortWithinPartitions(SPLIT, ID)
    writer = ordered.write.format("delta").mode("overwrite").option("overwriteSchema", "true")
    writer = writer.option("userMetadata", metadata)
    writer = writer.option("txnAppId", "/".join(token.values())).option("txnVersion", 1)
    # NB: not every reader without a JVM supports deletion vectors.
    writer = writer.option("delta.enableDeletionVectors", "false")
    writer.save(spark_path(result.path))
