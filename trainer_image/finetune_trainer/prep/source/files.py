"""Reads a corpus of files: Parquet, JSON lines or CSV."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import functions as sf
from pyspark.sql.types import ArrayType, DecimalType, DoubleType, StringType, StructField, StructType

from finetune_crds.preparation import digest_of
from finetune_trainer.examples.file_formats import explain_compression
from finetune_trainer.pod.exit_status import DataError
from finetune_trainer.prep.expressions import content, plain_text
from finetune_trainer.prep.expressions.template import quoted
from finetune_trainer.prep.source import schemas, text_files
from finetune_trainer.prep.source.location import OWN_SCHEME, as_named
from finetune_trainer.prep.spark import session

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from finetune_crds.source import NamedSource, Source
    from finetune_trainer.prep.source.location import Place

_FORMATS = {"Parquet": "parquet", "JSONLines": "json", "CSV": "csv"}
# Spark's options for text files, by the type of the source; Parquet has no entry. _TEXT_OPTIONS applies when the columns are inferred and
# when the rows are read, _ROW_OPTIONS only when the rows are read.
_TEXT_OPTIONS: dict[str, dict[str, Any]] = {
    # NB: the default limits a text to 20 million characters.
    "JSONLines": {"maxStringLen": 2**31 - 1},
    # NB: Spark's default escape is a backslash, which is text to other CSV readers.
    "CSV": {"header": True, "multiLine": True, "escape": '"'},
}
_ROW_OPTIONS: dict[str, dict[str, Any]] = {
    "JSONLines": {},
    "CSV": {
        # NB: by default, a value whose quote is not closed continues over lines up to the next quote.
        "unescapedQuoteHandling": "RAISE_ERROR",
        # NB: with True, Spark gives the columns of all files the names in the first file.
        "enforceSchema": False,
        # NB: with True, a line with too few values passes if the missing values are not read.
        "columnPruning": False,
    },
}
_CORRUPT = "_corrupt_record"
# Spark's option to read paths literally, also paths with brackets. Source: Spark, DataSource.GLOB_PATHS_KEY.
_LITERAL = {"__globPaths__": "false"}
# NB: Hadoop's default reader of local files looks for a checksum next to each file, and fails on a file name with a colon.
_WITHOUT_CHECKSUMS = {
    "fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "fs.file.impl.disable.cache": "true",
}


def read(
    spark: SparkSession, source: Source | NamedSource, place: Place, field: str
) -> tuple[DataFrame, str, text_files.TextFiles | None]:
    """Return the rows of a source's files, the digest of their listing, and the files if they are text. All columns of CSV are text.

    A line that does not parse fails the pass that reads it. A line that Spark misreads fails no pass: call `text_files.check` first.

    Args:
        field: the recipe's field that holds the source, for messages.

    Raises:
        DataError: the source has no files.
    """
    from pyspark.errors import AnalysisException

    try:
        # NB: the files are listed before they are read: a file that is added in between must not count as read.
        files = _list_files(spark, place)
        paths = [file.path for file in files]
        _check_compressions(paths, source.type)
        # NB: by default, Spark reads only those subfolders that are partitions.
        recursive = {"recursiveFileLookup": "true"} if has_subfolders(place.path, paths) else {}
        settings = {**place.options, **recursive}
        texts = None
        if source.type in _TEXT_OPTIONS:
            texts = text_files.TextFiles(source.type, [place.path], _literal(settings, [place.path]))
        with text_files.checking_on_failure(spark, texts):
            rows = frame(spark, source.type, [place.path], settings, paths)
            if not rows.columns:
                raise DataError(
                    "EmptySource",
                    f"{field}.{_describe_location(source)} has no rows: check what was written to it",
                )
        return rows, _digest(files), texts
    except AnalysisException as error:
        if error.getCondition() == "PATH_NOT_FOUND":
            raise DataError(
                "MissingSource",
                f"{field}.{_describe_location(source)} does not exist: mount the volume, or correct the path",
            ) from error
        if error.getCondition() == "UNABLE_TO_INFER_SCHEMA":
            raise DataError(
                "EmptySource", f"{field}.{_describe_location(source)} has no {source.type} files"
            ) from error
        raise


def _check_compressions(files: Sequence[str], kind: str) -> None:
    for file in files:
        if sentence := explain_compression(as_named(file), kind):
            raise DataError("UnreadableSource", sentence)


def _describe_location(source: Source | NamedSource) -> str:
    """Return the field with the location of a source, and its value."""
    return f"table {source.table}" if source.table else f"path {source.path}"


def _literal(settings: Mapping[str, str], paths: Sequence[str]) -> dict[str, str]:
    """Return the settings of a reader that reads paths literally.

    NB: Hadoop's clients of object stores buffer files on the local disk, for which they need Hadoop's default reader: it is replaced only
    if all paths are local, and never on Databricks.
    """
    is_local = all(path.startswith(("/", "file:")) for path in paths)
    reader_settings = _WITHOUT_CHECKSUMS if is_local and not session.on_databricks() else {}
    return {**settings, **_LITERAL, **reader_settings}


class _File(NamedTuple):
    path: str
    bytes: int
    modified_microseconds: int


def _list_files(spark: SparkSession, place: Place) -> list[_File]:
    """List the files of a source and of its subfolders, except those whose name begins with _ or a dot."""
    literal = _literal(place.options, [place.path])
    reader = spark.read.format("binaryFile").options(**literal, recursiveFileLookup="true")
    listed = reader.load(place.path).select("path", "length", sf.unix_micros("modificationTime"))
    return [_File(*row) for row in listed.collect()]


def _digest(files: Sequence[_File]) -> str:
    """Return a digest of the names, sizes and modification times of files."""
    # NB: each read of a Unity Catalog table has a scheme of its own, which must not change the digest.
    return digest_of(
        sorted(
            [re.sub(f"^{OWN_SCHEME}[0-9a-f]+:", "s3a:", file.path), file.bytes, file.modified_microseconds]
            for file in files
        )
    )


def has_subfolders(root: str, paths: Sequence[str]) -> bool:
    """Return whether some files of a source are in subfolders that are not partitions of a table (`year=2024`).

    Raises:
        DataError: the source has subfolders of both kinds.
    """
    root_path = _without_scheme(root)
    files = [_without_scheme(path) for path in paths]
    folders = {
        file.parent.relative_to(root_path)
        for file in files
        if file.is_relative_to(root_path) and file != root_path
    }
    subfolders = [folder for folder in folders if folder.parts]
    partitions = [folder for folder in subfolders if any("=" in part for part in folder.parts)]
    plain = [folder for folder in subfolders if folder not in partitions]
    if partitions and plain:
        raise DataError(
            "UnreadableSource",
            f"{root} has partitions such as {partitions[0]}, and other subfolders such as {plain[0]}: move the folders of one kind, or use "
            "two sources",
        )
    return bool(plain)


def _without_scheme(path: str) -> PurePosixPath:
    return PurePosixPath("/", re.sub(r"^[\w-]+:/*", "", path).lstrip("/"))


def frame(
    spark: SparkSession,
    kind: str,
    paths: list[str],
    settings: Mapping[str, str] | None = None,
    files: Sequence[str] = (),
) -> DataFrame:
    """Return the rows of files of a type: Parquet, JSONLines or CSV.

    Args:
        settings: settings of the reader, and of Hadoop's file systems for these files.
        files: the files in `paths`, if these are folders.

    Raises:
        DataError: the types of a column differ between Parquet files.
    """
    literal = _literal(settings or {}, paths)
    if kind not in _TEXT_OPTIONS:
        return schemas.read_parquet(spark, paths, files or paths, literal)
    reader = spark.read.format(_FORMATS[kind]).options(**literal)
    options = _TEXT_OPTIONS[kind]
    # NB: columns are not inferred with FAILFAST, whose error would not name the file: a broken line adds the column _CORRUPT.
    inferred = reader.options(**options).load(paths).schema
    schema = StructType([field for field in inferred.fields if field.name != _CORRUPT])
    row_options = {**literal, **options, **_ROW_OPTIONS[kind], "mode": "FAILFAST"}
    # NB: Spark infers one type for a column: text if the contents of some messages are text and those of others are lists; floats if
    # some numbers are integers. To keep such differences, columns with conversations, numbers or lists of objects are read as strings of
    # raw JSON, and parsed below. For numbers and lists of objects, the raw JSON also stays in a second column, see `plain_text.written`.
    conversations = [field.name for field in schema.fields if content.is_conversation(field.dataType)]
    numbers = [field.name for field in schema.fields if isinstance(field.dataType, DoubleType | DecimalType)]
    object_lists = [
        field.name for field in schema.fields if field.name not in conversations and _has_objects(field)
    ]
    text_columns = (*conversations, *numbers, *object_lists)
    fields = [
        StructField(field.name, StringType()) if field.name in text_columns else field
        for field in schema.fields
    ]
    rows = spark.read.format(_FORMATS[kind]).options(**row_options).schema(StructType(fields)).load(paths)
    for name in conversations:
        rows = rows.withColumn(name, content.parse_conversations(sf.col(quoted(name)), schema[name].dataType))
    for name in object_lists:
        text = sf.col(quoted(name))
        parsed = sf.from_json(text, schema[name].dataType, content.PARSER)
        rows = rows.withColumns({plain_text.written(name): text, name: parsed})
    return plain_text.with_numbers(rows, {name: schema[name].dataType for name in numbers})


def _has_objects(field: StructField) -> bool:
    """Return whether a column holds lists of objects, which may be definitions of tools."""
    return isinstance(field.dataType, ArrayType) and isinstance(field.dataType.elementType, StructType)
