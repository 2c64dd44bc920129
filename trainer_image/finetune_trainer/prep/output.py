"""The output table: one commit per run of a recipe, identified by its metadata."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from pyspark.sql import functions as sf

from finetune_crds.contract import PrepResult
from finetune_trainer.outcome import DataError
from finetune_trainer.prep import session
from finetune_trainer.prep.session import spark_path
from finetune_trainer.prep.steps import ID, SPLIT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from finetune_crds.recipe import Recipe

# A file of this many tokens has about 50 MB: few files for a small corpus, and enough for parallel reads of a large
# one.
_TOKENS_A_FILE = 16_000_000
# How many commits a restarted pod searches for that of its predecessor.
_COMMITS_LOOKED_AT = 100

# What Delta writes before it commits, and the checksums of local files.
_LEFT_BEHIND = re.compile(r"_delta_log|part-.*[.]parquet|[.].*")


def find(spark: SparkSession, recipe: Recipe, path: str) -> PrepResult | None:
    """Return the result that this job and recipe already committed to the table at `path`, if any.

    Raises:
        DataError: `path` holds what no preparation wrote, which a new version would hide.
    """
    from delta.tables import DeltaTable

    place = spark_path(path)
    if not DeltaTable.isDeltaTable(spark, place):
        if _holds_files(spark, place):
            raise DataError(
                "OutputTaken",
                f"data.prepare.output {path} has files and is not a Delta table: name another folder, or empty it",
            )
        return None
    history = DeltaTable.forPath(spark, place).history(_COMMITS_LOOKED_AT)
    commits = (
        history.where("userMetadata IS NOT NULL")
        .select("version", "userMetadata")
        .orderBy("version")
        .collect()
    )
    if not any(_is_ours(commit["userMetadata"]) for commit in commits):
        raise DataError(
            "OutputTaken",
            f"data.prepare.output {path} is a Delta table that no preparation wrote: name another folder",
        )
    found = (_result(recipe, commit["userMetadata"], commit["version"]) for commit in commits)
    return next((result for result in found if result is not None), None)


def _is_ours(metadata: str) -> bool:
    try:
        said = json.loads(metadata)
    except ValueError:
        return False
    return isinstance(said, dict) and {"job", "recipe", "result"} <= said.keys()


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


def _result(recipe: Recipe, metadata: str, version: int) -> PrepResult | None:
    try:
        said = json.loads(metadata)
        if {"job": said["job"], "recipe": said["recipe"]} != _token(recipe):
            return None
        return PrepResult.model_validate(said["result"] | {"version": version})
    except (ValueError, TypeError, KeyError, ValidationError):
        return None


def _token(recipe: Recipe) -> dict[str, str]:
    return {"job": recipe.job.uid, "recipe": recipe.digest()}


def commit(frame: DataFrame, recipe: Recipe, result: PrepResult) -> PrepResult:
    """Write the table as one new version, and return the result with that version.

    Delta skips the write when this job and recipe have committed before; the result is then the earlier one's.
    """
    token = _token(recipe)
    metadata = json.dumps({**token, "result": result.to_json()})
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
    committed = find(frame.sparkSession, recipe, result.path)
    if committed is None:
        raise RuntimeError(f"the table {result.path} does not have the version that was just written to it")
    return committed
