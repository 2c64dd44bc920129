"""Reads the raw corpus at a pinned version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.types import ArrayType, DataType, StringType, StructType

from finetune_trainer.columns import Column, Kind
from finetune_trainer.outcome import DataError
from finetune_trainer.prep.plan import CHOSEN
from finetune_trainer.prep.session import spark_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delta.tables import DeltaTable
    from pyspark.sql import DataFrame, SparkSession

    from finetune_trainer.prep.plan import Plan, Request


@dataclass(frozen=True)
class Corpus:
    """The source as a DataFrame, and its version where it is a Delta table."""

    frame: DataFrame
    version: int | None


def read(spark: SparkSession, asked: Request) -> Corpus:
    """Read the source at one version, so that every pass reads the same rows.

    Raises:
        DataError: the source or its version is missing.
    """
    return _delta(spark, asked) if asked.source.type == "Delta" else Corpus(_files(spark, asked), None)


def check(frame: DataFrame, plan: Plan) -> None:
    """Check the columns that the recipe names.

    Raises:
        DataError: one of them is missing, or a preference holds lists.
    """
    require(frame, plan.columns, plan.source_name)
    preference = plan.form.required if CHOSEN in plan.form.rendered else ()
    for name in preference:
        kind = frame.schema[name].dataType
        if isinstance(kind, ArrayType):
            raise DataError(
                "WrongColumnType",
                f"column {name} of {plan.source_name} holds {kind.simpleString()}: preferences are prepared as text; "
                "for lists of {role, content}, name files that need no preparation in data.splits",
            )


def require(frame: DataFrame, names: Sequence[str], where: str) -> None:
    """Check that columns exist.

    Raises:
        DataError: one of them is missing.
    """
    missing = [name for name in names if name not in frame.columns]
    if missing:
        raise DataError("MissingColumn", f"{where} has no column {_and(missing)}: {has(frame)}")


def schema(frame: DataFrame) -> list[Column]:
    """Return the columns of the source."""
    fields = frame.schema.fields
    return [Column(field.name, _kind(field.dataType), field.dataType.simpleString()) for field in fields]


def _kind(kind: DataType) -> Kind:
    if isinstance(kind, StringType):
        return "text"
    return "messages" if is_conversation(kind) else "other"


def is_conversation(kind: DataType) -> bool:
    """Whether values are lists of {role, content}."""
    return (
        isinstance(kind, ArrayType)
        and isinstance(kind.elementType, StructType)
        and {"role", "content"} <= set(kind.elementType.fieldNames())
    )


def has(frame: DataFrame) -> str:
    """Return the available columns, for a message."""
    return f"it has {_and(sorted(frame.columns))}"


def _and(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _files(spark: SparkSession, asked: Request) -> DataFrame:
    from pyspark.errors import AnalysisException

    source, path = asked.source, spark_path(asked.source_name)
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


def _delta(spark: SparkSession, asked: Request) -> Corpus:
    source = asked.source
    newest = int(_table(spark, asked).history(1).select("version").first()["version"])
    version = newest if source.version is None else source.version
    if version > newest:
        raise DataError(
            "MissingVersion",
            f"the Delta table {asked.source_name} has no version {version}: its newest is {newest}",
        )
    reader = spark.read.format("delta").option("versionAsOf", version)
    frame = reader.load(spark_path(source.path)) if source.path else reader.table(source.table or "")
    return Corpus(frame, version)


def _table(spark: SparkSession, asked: Request) -> DeltaTable:
    from delta.tables import DeltaTable
    from pyspark.errors import AnalysisException

    source = asked.source
    try:
        if source.path:
            return DeltaTable.forPath(spark, spark_path(source.path))
        return DeltaTable.forName(spark, source.table or "")
    except AnalysisException as error:
        field = "path" if source.path else "table"
        raise DataError(
            "MissingSource",
            f"data.source.{field} {asked.source_name} is not a Delta table: correct it, or set another type",
        ) from error
