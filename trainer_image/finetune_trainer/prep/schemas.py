"""One schema for Parquet files that have several: columns that some files lack, and types that can be widened."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import functions as sf
from pyspark.sql.types import (
    ArrayType,
    ByteType,
    DataType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StructField,
    StructType,
)

from finetune_trainer.outcome import DataError
from finetune_trainer.prep.template import quoted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

_NO_GLOB = {"__globPaths__": "false"}
"""The option by which Spark takes paths as they are, also those with brackets. Source: Spark, DataSource.GLOB_PATHS_KEY."""
_INTEGERS = (ByteType(), ShortType(), IntegerType(), LongType())
# Types whose values all fit into a wider one, which comes behind them.
_WIDENED = (_INTEGERS, (*_INTEGERS[:3], DoubleType()), (FloatType(), DoubleType()))


def read_parquet(
    spark: SparkSession, paths: Sequence[str], files: Sequence[str], settings: Mapping[str, str]
) -> DataFrame:
    """Return the rows of Parquet files with the columns and fields of all of them; null where a file has none.

    Args:
        paths: files and folders.
        files: the files in them.
        settings: options of the reader.

    Raises:
        DataError: a column has types in two files that no type holds without a loss.
    """
    reader = spark.read.format("parquet").options(**settings)
    try:
        frame = reader.option("mergeSchema", True).load([*paths])
        # NB: Spark Connect reads the files now, and not before.
        _ = frame.schema
        return frame
    except (Py4JJavaError, PySparkException) as error:
        # NB: Spark widens no types.
        if "CANNOT_MERGE_SCHEMAS" not in str(error):
            raise
    reader = reader.options(
        **_NO_GLOB, **({} if len(paths) > 1 or [*paths] == [*files] else {"basePath": paths[0]})
    )
    groups: dict[str, list[str]] = {}
    columns: dict[str, StructField] = {}
    for file in files:
        schema = reader.load(file).schema
        groups.setdefault(schema.json(), []).append(file)
        columns |= {field.name: field for field in schema.fields}
    frames = [_without_empty_columns(reader.load(some)) for some in groups.values()]
    # The schemas of the frames, and a file of each, for messages.
    (merged, first), *others = zip(
        (frame.schema for frame in frames), (some[0] for some in groups.values()), strict=True
    )
    for schema, file in others:
        merged = _merge_fields(merged, schema, file, first)
    # A column that is empty in every file is one, of whatever type.
    empty = columns.keys() - {*merged.fieldNames()}
    merged = StructType([*merged.fields, *(field for name, field in columns.items() if name in empty)])
    return reduce(lambda one, other: one.unionByName(other), (frame.to(merged) for frame in frames))


def _without_empty_columns(frame: DataFrame) -> DataFrame:
    """Leave out columns without values: a writer that sees none cannot know their type."""
    (counts,) = frame.agg(*(sf.count(sf.col(quoted(name))).alias(name) for name in frame.columns)).collect()
    return frame.select(*(quoted(name) for name, count in counts.asDict().items() if count))


def _merge_fields(one: StructType, other: StructType, file: str, first: str, prefix: str = "") -> StructType:
    theirs = {field.name: field.dataType for field in other.fields}
    fields = []
    for field in one.fields:
        kind = field.dataType
        if field.name in theirs:
            kind = _merge_types(kind, theirs.pop(field.name), file, first, f"{prefix}{field.name}")
        fields.append(StructField(field.name, kind))
    return StructType([*fields, *(StructField(name, kind) for name, kind in theirs.items())])


def _merge_types(one: DataType, other: DataType, file: str, first: str, name: str) -> DataType:
    """The type that holds the values of both without a loss."""
    if one == other:
        return one
    if isinstance(one, StructType) and isinstance(other, StructType):
        return _merge_fields(one, other, file, first, f"{name}.")
    if isinstance(one, ArrayType) and isinstance(other, ArrayType):
        return ArrayType(_merge_types(one.elementType, other.elementType, file, first, name))
    for widening in _WIDENED:
        if one in widening and other in widening:
            return widening[max(widening.index(one), widening.index(other))]
    raise DataError(
        "WrongColumnType",
        f"column {name} holds {other.simpleString()} in {file}, and {one.simpleString()} in {first} and others: write the files "
        "with one type",
    )
