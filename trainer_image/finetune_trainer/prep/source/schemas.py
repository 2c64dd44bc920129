"""Reads Parquet files whose schemas differ: some files lack columns, or the types of a column can be widened without loss."""

from __future__ import annotations

import re
from contextlib import contextmanager
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
    MapType,
    ShortType,
    StructField,
    StructType,
)

from finetune_trainer.examples.file_formats import (
    BYTES,
    HALF_FLOATS,
    LONG_DECIMALS,
    POINTER,
    TIMES_OF_DAY,
    explain_type,
    explain_unreadable_line,
)
from finetune_trainer.pod.exit_status import DataError, first_line
from finetune_trainer.prep.expressions.template import quoted
from finetune_trainer.prep.source import footers, text_files
from finetune_trainer.prep.source.location import as_named
from finetune_trainer.prep.spark import session

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession

    from finetune_trainer.prep.source.footers import Footer

# Spark's error condition if the types of a column differ.
_CONFLICT = "CANNOT_MERGE_SCHEMAS"
# Beginnings of Spark's errors about types that it does not read.
_OTHER_TYPES = ("[PARQUET_TYPE_", "[UNSUPPORTED_TIME_TYPE]", "[DECIMAL_PRECISION_EXCEEDS_MAX_PRECISION]")
# Names of types that are not learned, by a part of the type's name in Parquet.
_UNLEARNED = {
    "(FLOAT16)": HALF_FLOATS,
    "(TIME(": TIMES_OF_DAY,
    "(DECIMAL(": LONG_DECIMALS,
    "(UUID)": BYTES,
}
# The beginning of the error of a column that Spark does not read, see `_with_refusals`.
_REFUSAL = "finetune refuses: "
_INTEGERS = (ByteType(), ShortType(), IntegerType(), LongType())
# Rows of types in order of width: the values of a type fit into the types after it in its row without loss.
_WIDENED = (_INTEGERS, (*_INTEGERS[:3], DoubleType()), (FloatType(), DoubleType()))


def read_parquet(
    spark: SparkSession, paths: Sequence[str], files: Sequence[str], settings: Mapping[str, str]
) -> DataFrame:
    """Return the rows of Parquet files with the columns and fields of all of them; null for a column that a file lacks.

    Args:
        paths: files and folders.
        files: the files in them.
        settings: options of the reader.

    Raises:
        DataError: the types of a column in two files cannot be widened to one type without loss.
    """
    reader = spark.read.format("parquet").options(**settings)
    try:
        with _refusing_nanoseconds(spark):
            frame = reader.option("mergeSchema", True).load([*paths])
            # NB: Spark Connect reads the files only now.
            _ = frame.schema
            return frame
    except (Py4JJavaError, PySparkException) as error:
        _check_pointers(spark, files, settings, error)
        has_other_types = any(mark in str(error) for mark in _OTHER_TYPES)
        # NB: Spark fails if the types of a column differ, or if it does not read a type; the code below reads such files too.
        if _CONFLICT not in str(error) and not has_other_types:
            raise
        # Without access to the JVM, the footers cannot be read.
        if session.context(spark) is None:
            raise _build_type_error(paths[0], error) from error
    if has_other_types:
        # NB: the setting must stay: it also applies when the rows are read.
        spark.conf.set(footers.NANOSECONDS_AS_LONG, "true")
    # Below, Spark gets the files in place of their folder: it then needs the folder as basePath to find partitions.
    is_folder = len(paths) == 1 and [*map(as_named, paths)] != [*map(as_named, files)]
    reader = reader.options(**({"basePath": paths[0]} if is_folder else {}))
    return _union(reader, dict(zip(files, footers.read(spark, files, settings), strict=True)))


@contextmanager
def _refusing_nanoseconds(spark: SparkSession) -> Iterator[None]:
    """Make Spark refuse times in nanoseconds: for an earlier source, `read_parquet` may have set it to read them as integers."""
    # Without access to the JVM, `read_parquet` never does so.
    if session.context(spark) is None:
        yield
        return
    before = spark.conf.get(footers.NANOSECONDS_AS_LONG) or "false"
    spark.conf.set(footers.NANOSECONDS_AS_LONG, "false")
    try:
        yield
    finally:
        spark.conf.set(footers.NANOSECONDS_AS_LONG, before)


def _union(reader: DataFrameReader, files: Mapping[str, Footer]) -> DataFrame:
    """Return the rows of files with the columns of all of them, according to the footers of the files."""
    # The files of each schema.
    groups: dict[str, list[str]] = {}
    columns: dict[str, StructField] = {}
    for file, footer in files.items():
        groups.setdefault(f"{footer.schema.json()}{footer.times}", []).append(file)
    frames: dict[str, DataFrame] = {}
    for group in groups.values():
        first_file, *_ = group
        footer = files[first_file]
        frame = _with_times(reader.schema(footer.schema).load(group), footer)
        columns |= {field.name: field for field in frame.schema.fields}
        frames[first_file] = _without_empty_columns(frame) if len(groups) > 1 else frame
    merged = merge_schemas({file: frame.schema for file, frame in frames.items()})
    # A column that is empty in every file has been left out: it gets the type that it has in one of the files.
    empty = columns.keys() - {*merged.fieldNames()}
    merged = StructType([*merged.fields, *(field for name, field in columns.items() if name in empty)])
    frame = reduce(
        lambda union, part: union.unionByName(part), (frame.to(merged) for frame in frames.values())
    )
    return _with_refusals(frame, files)


def _with_times(frame: DataFrame, footer: Footer) -> DataFrame:
    """Convert integers that are nanoseconds to times, truncated to microseconds."""
    return frame.withColumns(
        {
            name: _to_times(sf.col(quoted(name)), footer.schema[name].dataType, kind)
            for name, kind in footer.times.items()
        }
    )


def _to_times(value: Column, stored: DataType, kind: DataType) -> Column:
    """Convert the nanoseconds in a value of type `stored`: the result has type `kind`, which has times in place of them."""
    match stored, kind:
        case _ if stored == kind:
            times = value
        case StructType(), StructType():
            fields = (
                _to_times(value[name], stored[name].dataType, kind[name].dataType).alias(name)
                for name in kind.names
            )
            times = sf.when(value.isNotNull(), sf.struct(*fields))
        case ArrayType(), ArrayType():
            times = sf.transform(value, lambda item: _to_times(item, stored.elementType, kind.elementType))
        case MapType(), MapType():
            times = sf.transform_values(
                value, lambda _, item: _to_times(item, stored.valueType, kind.valueType)
            )
        case _:
            # NB: with `/`, the nanoseconds would become a float.
            microseconds = sf.call_function("div", value, sf.lit(1000))
            times = sf.timestamp_micros(microseconds).cast(kind)
    return times


def _with_refusals(frame: DataFrame, files: Mapping[str, Footer]) -> DataFrame:
    """Add the columns of types that Spark does not read; each of them fails a preparation that reads it."""
    unreadable = {
        name: (kind, file) for file, footer in files.items() for name, kind in footer.unreadable.items()
    }
    for name, (kind, file) in unreadable.items():
        # The type of a group contains the types of its fields, so a mark in it is not the mark of the column.
        is_group = kind.startswith("group ")
        unlearned = next(
            (kind_name for mark, kind_name in _UNLEARNED.items() if mark in kind and not is_group), kind
        )
        sentence = explain_type(name, as_named(file), unlearned)
        # NB: without the cast, the column would have the type of null.
        frame = frame.withColumn(name, sf.raise_error(sf.lit(f"{_REFUSAL}{sentence}")).cast("string"))
    return frame


def find_refusal(message: str) -> DataError | None:
    """Return the error of a column that Spark does not read, if a message of Spark has it."""
    match = re.search(rf"{_REFUSAL}(.*?)(?:\s+SQLSTATE: \w+|$)", message, re.MULTILINE)
    return DataError("WrongColumnType", match.group(1)) if match else None


def _check_pointers(
    spark: SparkSession, files: Sequence[str], settings: Mapping[str, str], error: Exception
) -> None:
    """Raise DataError if a file without a footer is a pointer of Git LFS."""
    if "CANNOT_READ_FILE_FOOTER" not in str(error):
        return
    for file in files:
        # NB: the error begins the address of a local file with file:///, but `files` have file:/.
        if file in str(error).replace("file:///", "file:/") and text_files.is_pointer(spark, file, settings):
            raise DataError(
                "UnreadableSource", explain_unreadable_line(1, as_named(file), POINTER)
            ) from error


def _build_type_error(path: str, error: Exception) -> DataError:
    """Return the error of types on compute without access to the JVM, which cannot read footers."""
    return DataError(
        "WrongColumnType",
        f"{path} has columns whose types differ between files or that Spark does not read ({first_line(error)}): write the files with "
        "one type per column, and times in microseconds",
    )


def _without_empty_columns(frame: DataFrame) -> DataFrame:
    """Leave out columns without values: a writer that sees no values cannot know their type."""
    (counts,) = frame.agg(*(sf.count(sf.col(quoted(name))).alias(name) for name in frame.columns)).collect()
    return frame.select(*(quoted(name) for name, count in counts.asDict().items() if count))


class _ConflictError(Exception):
    """No type can represent the values of both types of a column or a field.

    path: the name of the column, then the names of the fields that lead to the field.
    """

    def __init__(self, path: tuple[str, ...]) -> None:
        super().__init__(path)
        self.path = path


def merge_schemas(schemas: Mapping[str, StructType]) -> StructType:
    """Return the columns and fields of all files, each with the type that can represent its values in all files.

    Args:
        schemas: the schema of each file.

    Raises:
        DataError: the types of a column or a field in two files cannot be widened to one type without loss.
    """
    merged = StructType()
    for file, schema in schemas.items():
        try:
            merged = _merge_fields(merged, schema, ())
        except _ConflictError as conflict:
            raise _build_conflict_error(conflict.path, file, schemas) from None
    return merged


def _build_conflict_error(path: tuple[str, ...], file: str, schemas: Mapping[str, StructType]) -> DataError:
    """Return the error of a column or a field whose type in a file conflicts with its type in an earlier file."""
    all_types = {name: _find_type(schema, path) for name, schema in schemas.items()}
    types = {name: kind for name, kind in all_types.items() if kind is not None}
    kind = types[file]
    # NB: an earlier file may have a type that could be widened to the type in this file.
    other_file, other_kind = next(
        (name, other_kind) for name, other_kind in types.items() if not _can_merge(other_kind, kind)
    )
    return DataError(
        "WrongColumnType",
        f"column {'.'.join(path)} holds {kind.simpleString()} in {as_named(file)}, and {other_kind.simpleString()} in "
        f"{as_named(other_file)}: write the column with one type in all files",
    )


def _find_type(kind: DataType, path: tuple[str, ...]) -> DataType | None:
    """Return the type of a column or a field; None if the type `kind` does not have it. A path leads into the elements of lists."""
    for name in path:
        while isinstance(kind, ArrayType):
            kind = kind.elementType
        if not isinstance(kind, StructType) or name not in kind.names:
            return None
        kind = kind[name].dataType
    return kind


def _can_merge(left_type: DataType, right_type: DataType) -> bool:
    try:
        _merge_types(left_type, right_type, ())
    except _ConflictError:
        return False
    return True


def _merge_fields(left_type: StructType, right_type: StructType, path: tuple[str, ...]) -> StructType:
    """Return the fields of both types; `path` leads to them, see `_ConflictError`."""
    right_types = {field.name: field.dataType for field in right_type.fields}
    fields = []
    for field in left_type.fields:
        kind = field.dataType
        if field.name in right_types:
            kind = _merge_types(kind, right_types.pop(field.name), (*path, field.name))
        fields.append(StructField(field.name, kind))
    return StructType([*fields, *(StructField(name, kind) for name, kind in right_types.items())])


def _merge_types(left_type: DataType, right_type: DataType, path: tuple[str, ...]) -> DataType:
    """Return the type that can represent the values of both types without loss; `path` leads to the values."""
    if left_type == right_type:
        return left_type
    if isinstance(left_type, StructType) and isinstance(right_type, StructType):
        return _merge_fields(left_type, right_type, path)
    if isinstance(left_type, ArrayType) and isinstance(right_type, ArrayType):
        return ArrayType(_merge_types(left_type.elementType, right_type.elementType, path))
    for widening in _WIDENED:
        if left_type in widening and right_type in widening:
            return widening[max(widening.index(left_type), widening.index(right_type))]
    raise _ConflictError(path)
