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
# Spark's type of times of day in the JSON of a schema: Spark converts the type, but cannot read its values from a file.
_TIME_OF_DAY = re.compile(r'"time\(\d\)"')


@dataclass(frozen=True)
class Footer:
    """The columns of a Parquet file.

    schema: the columns that Spark reads; times in nanoseconds are integers here.
    nanoseconds: for each column with times in nanoseconds, whether the times are in UTC.
    unreadable: for each column that Spark does not read, its type in Parquet.
    """

    schema: StructType
    nanoseconds: dict[str, bool]
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
    nanoseconds, unreadable = {}, {}
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
        # The text has TIMESTAMP(NANOS,true) if the times are in UTC.
        if "TIMESTAMP(NANOS" in text and column.isPrimitive():
            nanoseconds[name] = "NANOS,true" in text
    return Footer(StructType(fields), nanoseconds, unreadable)


def _convert(converter: Any, parquet_schema: Any) -> StructType | None:
    """Return Spark's schema for a schema of Parquet; None if Spark does not read one of its columns."""
    try:
        schema = str(converter.convert(parquet_schema).json())
    except (Py4JJavaError, PySparkException):
        return None
    return None if _TIME_OF_DAY.search(schema) else StructType.fromJson(json.loads(schema))
