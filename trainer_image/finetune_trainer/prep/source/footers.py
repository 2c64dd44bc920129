"""Reads the schemas of Parquet files from their footers, also if Spark does not read the types of some columns."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql.types import DataType, StructField, StructType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import SparkSession

NANOSECONDS_AS_LONG = "spark.sql.legacy.parquet.nanosAsLong"
"""The setting with which Spark reads times in nanoseconds, as integers."""
_MAX_THREADS = 16
# Parts of the text of a type of Parquet: of times in nanoseconds, and of those that are in UTC.
_NANOSECONDS = "TIMESTAMP(NANOS"
_IN_UTC = f"{_NANOSECONDS},true"
# Spark's type of times of day in the JSON of a schema: Spark converts the type, but cannot read its values from a file.
_TIME_OF_DAY = re.compile(r'"time\(\d\)"')


@dataclass(frozen=True)
class Footer:
    """The columns of a Parquet file.

    schema: the columns that Spark reads; times in nanoseconds are integers here.
    times: for each column with times in nanoseconds, its type with times in place of these integers.
    unreadable: for each column that Spark does not read, its type in Parquet.
    """

    schema: StructType
    times: dict[str, DataType]
    unreadable: dict[str, str]


def read(spark: SparkSession, files: Sequence[str], options: Mapping[str, str]) -> list[Footer]:
    """Return the footers of files, in the order of the files.

    Args:
        options: settings of Hadoop's file systems for these files.
    """
    with ThreadPoolExecutor(_MAX_THREADS) as threads:
        return list(threads.map(lambda file: _read(spark, file, options), files))


def _read(spark: SparkSession, file: str, options: Mapping[str, str]) -> Footer:
    # NB: pyspark has no public access to footers.
    jvm: Any = spark._jvm  # noqa: SLF001
    state: Any = spark._jsparkSession.sessionState()  # noqa: SLF001
    hadoop = state.newHadoopConfWithOptions(jvm.PythonUtils.toScalaMap(dict(options)))
    parquet, catalyst = jvm.org.apache.parquet, jvm.org.apache.spark.sql.execution.datasources.parquet
    input_file = parquet.hadoop.util.HadoopInputFile.fromPath(jvm.org.apache.hadoop.fs.Path(file), hadoop)
    reader = parquet.hadoop.ParquetFileReader.open(input_file)
    try:
        parquet_schema = reader.getFooter().getFileMetaData().getSchema()
    finally:
        reader.close()
    settings = state.conf().clone()
    settings.setConfString(NANOSECONDS_AS_LONG, "true")
    converter = catalyst.ParquetToSparkSchemaConverter(settings)
    fields: list[StructField] = []
    times: dict[str, DataType] = {}
    unreadable: dict[str, str] = {}
    for position in range(parquet_schema.getFieldCount()):
        column = parquet_schema.getType(position)
        name, text = column.getName(), str(column.toString())
        # Each column is converted alone: Spark refuses a whole schema if it does not read one type in it.
        converted = _convert(converter, parquet.schema.MessageType("column", [column]))
        if converted is None:
            # Without its repetition and its name, the text of a column is its type.
            unreadable[name] = re.sub("^(optional|required|repeated) ", "", text).replace(f" {name}", "", 1)
            continue
        fields += converted.fields
        if _NANOSECONDS in text:
            in_microseconds = _convert(
                converter, parquet.schema.MessageType("column", [_with_microseconds(parquet.schema, column)])
            )
            times |= {field.name: field.dataType for field in in_microseconds or ()}
    return Footer(StructType(fields), times, unreadable)


def _with_microseconds(parquet_types: Any, column: Any) -> Any:
    """Return a type of Parquet with times in microseconds in place of times in nanoseconds.

    parquet_types: the JVM's package org.apache.parquet.schema.
    """
    if not column.isPrimitive():
        fields = (_with_microseconds(parquet_types, field) for field in column.getFields())
        return column.withNewFields([*fields])
    text = str(column.toString())
    if _NANOSECONDS not in text:
        return column
    annotation = parquet_types.LogicalTypeAnnotation
    microseconds = annotation.timestampType(_IN_UTC in text, annotation.TimeUnit.MICROS)
    builder = parquet_types.Types.primitive(column.getPrimitiveTypeName(), column.getRepetition())
    return getattr(builder, "as")(microseconds).named(column.getName())


def _convert(converter: Any, parquet_schema: Any) -> StructType | None:
    """Return Spark's schema for a schema of Parquet; None if Spark does not read one of its columns."""
    try:
        schema = str(converter.convert(parquet_schema).json())
    except (Py4JJavaError, PySparkException):
        return None
    return None if _TIME_OF_DAY.search(schema) else StructType.fromJson(json.loads(schema))
