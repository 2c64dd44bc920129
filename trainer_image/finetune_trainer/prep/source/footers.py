"""Reads the schemas of Parquet files from their footers, also if Spark does not read the types of some columns."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql.types import StructField, StructType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import SparkSession

NANOSECONDS_AS_LONG = "spark.sql.legacy.parquet.nanosAsLong"
"""The setting with which Spark reads times in nanoseconds, as integers."""
_MAX_THREADS = 16
# Spark's type of times of day in the JSON of a schema; Spark reads it from no file.
_TIME_OF_DAY = re.compile(r'"time\(\d\)"')


@dataclass(frozen=True)
class Footer:
    """The columns of a Parquet file.

    schema: the columns that Spark reads; times in nanoseconds are integers here.
    nanoseconds: the columns with times in nanoseconds, and whether they are in UTC.
    unreadable: the columns that Spark does not read, with their types.
    """

    schema: StructType
    nanoseconds: dict[str, bool]
    unreadable: dict[str, str]


def read(spark: SparkSession, files: Sequence[str], options: Mapping[str, str]) -> list[Footer]:
    """Return the columns of files.

    Args:
        options: settings of Hadoop's file systems for these files.
    """
    with ThreadPoolExecutor(_MAX_THREADS) as threads:
        return list(threads.map(lambda file: _read(spark, file, options), files))


def _read(spark: SparkSession, file: str, options: Mapping[str, str]) -> Footer:
    # NB: pyspark has no other way to a footer.
    jvm: Any = spark._jvm  # noqa: SLF001
    state: Any = spark._jsparkSession.sessionState()  # noqa: SLF001
    hadoop = state.newHadoopConfWithOptions(jvm.PythonUtils.toScalaMap(dict(options)))
    parquet, catalyst = jvm.org.apache.parquet, jvm.org.apache.spark.sql.execution.datasources.parquet
    place = parquet.hadoop.util.HadoopInputFile.fromPath(jvm.org.apache.hadoop.fs.Path(file), hadoop)
    reader = parquet.hadoop.ParquetFileReader.open(place)
    try:
        message = reader.getFooter().getFileMetaData().getSchema()
    finally:
        reader.close()
    settings = state.conf().clone()
    settings.setConfString(NANOSECONDS_AS_LONG, "true")
    converter = catalyst.ParquetToSparkSchemaConverter(settings)
    fields: list[StructField] = []
    nanoseconds, unreadable = {}, {}
    for position in range(message.getFieldCount()):
        column = message.getType(position)
        name, kind = column.getName(), str(column.toString())
        # Each column alone: one type that Spark does not read makes it refuse the whole schema.
        converted = _convert(converter, parquet.schema.MessageType("column", [column]))
        if converted is None:
            unreadable[name] = re.sub("^(optional|required|repeated) ", "", kind).replace(f" {name}", "", 1)
            continue
        fields += converted.fields
        if "TIMESTAMP(NANOS" in kind and column.isPrimitive():
            nanoseconds[name] = "NANOS,true" in kind
    return Footer(StructType(fields), nanoseconds, unreadable)


def _convert(converter: Any, message: Any) -> StructType | None:
    """Return the schema of a file's columns; None if Spark does not read one of them."""
    try:
        schema = str(converter.convert(message).json())
    except (Py4JJavaError, PySparkException):
        return None
    return None if _TIME_OF_DAY.search(schema) else StructType.fromJson(json.loads(schema))
