"""Reads the raw corpus at a pinned version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune_trainer.outcome import DataError
from finetune_trainer.prep.session import spark_path

if TYPE_CHECKING:
    from delta.tables import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

    from finetune_trainer.prep.plan import Plan


@dataclass(frozen=True)
class Corpus:
    """The source as a DataFrame, and its version where it is a Delta table."""

    frame: DataFrame
    version: int | None


def read(spark: SparkSession, plan: Plan) -> Corpus:
    """Read the source at one version, so that every pass reads the same rows.

    Raises:
        DataError: the source, its version or a column that the recipe names is missing.
    """
    corpus = _delta(spark, plan) if plan.source.type == "Delta" else Corpus(_files(spark, plan), None)
    missing = [name for name in plan.columns if name not in corpus.frame.columns]
    if missing:
        raise DataError(
            "MissingColumn", f"{plan.source_name} has no column {_and(missing)}: {has(corpus.frame)}"
        )
    return corpus


def has(frame: DataFrame) -> str:
    """Return the available columns, for a message."""
    return f"it has {_and(sorted(frame.columns))}"


def _and(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _files(spark: SparkSession, plan: Plan) -> DataFrame:
    from pyspark.errors import AnalysisException

    source, path = plan.source, spark_path(plan.source_name)
    try:
        return spark.read.parquet(path) if source.type == "Parquet" else spark.read.json(path)
    except AnalysisException as error:
        if error.getCondition() == "PATH_NOT_FOUND":
            raise DataError(
                "MissingSource",
                f"data.source.path {source.path} does not exist: mount the volume or correct it",
            ) from error
        if error.getCondition() == "UNABLE_TO_INFER_SCHEMA":
            raise DataError(
                "EmptySource", f"data.source.path {source.path} has no {source.type} files"
            ) from error
        raise


def _delta(spark: SparkSession, plan: Plan) -> Corpus:
    source = plan.source
    newest = int(_table(spark, plan).history(1).select("version").first()["version"])
    version = newest if source.version is None else source.version
    if version > newest:
        raise DataError(
            "MissingVersion",
            f"the Delta table {plan.source_name} has no version {version}: its newest is {newest}",
        )
    reader = spark.read.format("delta").option("versionAsOf", version)
    frame = reader.load(spark_path(source.path)) if source.path else reader.table(source.table or "")
    return Corpus(frame, version)


def _table(spark: SparkSession, plan: Plan) -> DeltaTable:
    from delta.tables import DeltaTable
    from pyspark.errors import AnalysisException

    source = plan.source
    try:
        if source.path:
            return DeltaTable.forPath(spark, spark_path(source.path))
        return DeltaTable.forName(spark, source.table or "")
    except AnalysisException as error:
        field = "path" if source.path else "table"
        raise DataError(
            "MissingSource",
            f"data.source.{field} {plan.source_name} is not a Delta table: correct it, or set another format",
        ) from error
