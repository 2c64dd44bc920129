"""Turns exceptions of Spark and Hadoop into errors of the pod with a remedy."""

from __future__ import annotations

import errno
import re
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from finetune_crds.base import FOLDER_FORMATS
from finetune_trainer.examples.file_formats import CODECS_NOT_READ, explain_codec
from finetune_trainer.pod.exit_status import DataError, PodFailure, TrainingError, first_line
from finetune_trainer.prep import refused_row
from finetune_trainer.prep.source import delta_table, schemas
from finetune_trainer.prep.source.location import OWN_SCHEME, S3, as_named
from finetune_trainer.prep.spark.session import spark_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_crds.source import TableLocation
    from finetune_trainer.prep.plan import Request

# Errors that a row can cause in an expression of the recipe, in ANSI mode.
_ROW_CONDITIONS = (
    "CAST_INVALID_INPUT",
    "CAST_OVERFLOW",
    "DIVIDE_BY_ZERO",
    "INVALID_ARRAY_INDEX",
    "ARITHMETIC_OVERFLOW",
)
# Messages of Spark and of a Python worker about bytes that are not text. Spark shows the bytes after the last colon.
_NOT_UTF8 = ("INVALID_UTF8_STRING", "UnicodeDecodeError: ")
# Errors of Spark about a file that it cannot read.
_FILE_CONDITIONS = ("FAILED_READ_FILE", "CANNOT_READ_FILE_FOOTER")
# A message may quote a line of the corpus.
_MAX_MESSAGE_CHARS = 200
_MAX_CAUSES = 32
_FILE_DELETED = "FAILED_READ_FILE.FILE_NOT_EXIST"
_DISK_FULL = "No space left on device"
# Packages on the stack of the JVM while the files or the commit of the table are written.
_WRITERS = ("org.apache.parquet.hadoop.", "io.delta.storage.")
# NB: the answer to a HEAD request has no body, and so no error code of S3: an expired token shows only as status 400.
_EXPIRED_TOKEN = re.compile("ExpiredToken|Status Code: 400")
# Answers of S3 that have the same status for another cause: the region is not the bucket's.
_WRONG_REGION = re.compile("AuthorizationHeaderMalformed|IllegalLocationConstraintException")
# Messages of Spark about a Hive metastore that cannot be reached.
_METASTORE_UNREACHABLE = re.compile(
    "SessionHiveMetaStoreClient|TTransportException|Could not connect to meta store"
)
_STORES = rf"(?:{S3}|gs://|abfss://)"
# Exceptions of Hadoop's file systems.
_ACCESS_DENIED_CLASSES = ("java.nio.file.AccessDeniedException",)
_GOOGLE_CLASS = "GoogleJsonResponseException"
# The exception for a path whose scheme has no file system.
_UNSUPPORTED_CLASSES = ("org.apache.hadoop.fs.UnsupportedFileSystemException",)
_MISSING_CLASSES = ("org.apache.hadoop.fs.s3a.UnknownStoreException", "java.io.FileNotFoundException")
_UNREACHABLE_CLASSES = (
    "java.net.ConnectException",
    "java.net.UnknownHostException",
    "java.net.SocketTimeoutException",
)
# The exception of an aborted Spark job, and what its message says of a task that lost its executor.
_ABORTED_CLASS = "org.apache.spark.SparkException"
_EXECUTOR_LOST = "ExecutorLostFailure"


class _Cause(NamedTuple):
    """An exception of the JVM: the name of its class, and the first line of its message."""

    class_name: str
    detail: str


@contextmanager
def translate_errors(request: Request) -> Iterator[None]:
    """Translate exceptions of the JVM with a known cause into errors of the pod.

    Raises:
        DataError: a row is refused, the filter fails on a row, a file or column cannot be read, or a bucket is missing or not accessible.
        TrainingError: the storage does not respond, the disk is full, or Spark aborted a job.
    """
    try:
        yield
    except PySparkException as error:
        # The more specific errors come first. NB: an exception of Spark Connect has no `_origin`, and so no causes.
        failure = (
            refused_row.find_failure(str(error))
            or schemas.find_refusal(str(error))
            or _find_text_error(request, str(error))
            or _find_credentials_error(_list_causes(getattr(error, "_origin", None)))
            or _find_column_error(request, error.getCondition() or "", first_line(error))
            or _find_spark_error(request, error.getCondition() or "", first_line(error))
        )
        if failure is None:
            raise
        raise failure from error
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise _build_scratch_error(request) from error
    except Py4JJavaError as error:
        causes = _list_causes(error.java_exception)
        failure = (
            schemas.find_refusal(str(error))
            or _find_credentials_error(causes)
            or _find_file_error(request, causes)
            or _find_disk_error(request, causes, error)
            or _find_hadoop_error(causes)
            or _find_job_error(causes)
        )
        if failure is None:
            raise
        raise failure from error


def _find_text_error(request: Request, message: str) -> PodFailure | None:
    """Return the error of a source with text that is not UTF-8."""
    line = next((line for line in message.splitlines() if any(mark in line for mark in _NOT_UTF8)), None)
    if line is None:
        return None
    # For example, `[INVALID_UTF8_STRING] ... found in string: \xE4. SQLSTATE: 22029` becomes `\xE4`.
    reason = re.sub(r"^.*?(?:UnicodeDecodeError|found in string): |\s*SQLSTATE: \w+$", "", line).rstrip(".")
    return DataError(
        "UnreadableSource",
        f"{request.source_name} has text that is not UTF-8 ({reason[:_MAX_MESSAGE_CHARS]}): rewrite its files as UTF-8",
    )


def _find_spark_error(request: Request, condition: str, detail: str) -> PodFailure | None:
    """Return the error of a failed filter, a deleted or unreadable file, or a Hive metastore that does not respond.

    Args:
        condition: Spark's error condition, for example DIVIDE_BY_ZERO.
        detail: the first line of Spark's message.
    """
    if condition.startswith(_ROW_CONDITIONS):
        return DataError(
            "FilterFailed",
            f"data.prepare.filter `{request.prepare.filter}` fails on a row of {request.source_name}: {detail}; use try_cast, or exclude such rows",
        )
    if condition == _FILE_DELETED and (table := _find_table(request, detail)):
        return delta_table.build_gone_error(table)
    if _METASTORE_UNREACHABLE.search(detail):
        return TrainingError(
            "CatalogUnreachable",
            f"the Hive metastore of data.prepare.catalog does not respond: {detail[:_MAX_MESSAGE_CHARS]}",
        )
    if condition.startswith(_FILE_CONDITIONS):
        return DataError("UnreadableSource", f"{request.source_name} cannot be read: {detail}")
    return None


def _find_column_error(request: Request, condition: str, detail: str) -> PodFailure | None:
    """Return the error of columns that Spark cannot read, or cannot distinguish; for the arguments, see `_find_spark_error`."""
    if condition == "COLUMN_ALREADY_EXISTS":
        return DataError(
            "ColumnsAmbiguous",
            (
                f"{request.source_name} has columns whose names are equal or differ only in case "
                f"({detail[:_MAX_MESSAGE_CHARS]}): rename them"
            ),
        )
    if condition.startswith("PARQUET_TYPE_"):
        return DataError(
            "WrongColumnType",
            f"{request.source_name} has a column of a type that Spark does not read ({detail[:_MAX_MESSAGE_CHARS]}): write the column "
            "with another type",
        )
    return None


def _find_file_error(request: Request, causes: list[_Cause]) -> PodFailure | None:
    """Return the error of a file that Spark cannot read. The error names the file; the last cause is the reason."""
    failure = next((detail for _, detail in causes if detail.startswith("[FAILED_READ_FILE")), None)
    if failure is None:
        return None
    if failure.startswith(f"[{_FILE_DELETED}]") and (table := _find_table(request, failure)):
        return delta_table.build_gone_error(table)
    # NB: the last cause may have no message.
    *_, reason = [detail for _, detail in causes if detail]
    file = re.search(r"while reading file (\S+?)\.?\s", f"{failure} ")
    name = as_named(unquote(file.group(1))) if file else request.source_name
    codec = next((codec for codec in CODECS_NOT_READ if f"{codec}Codec" in reason), None)
    sentence = (
        f"{name} cannot be read: {_shorten(reason)}; fix or remove the file"
        if codec is None
        else explain_codec(name, codec)
    )
    return DataError("UnreadableSource", sentence)


def _find_table(request: Request, detail: str) -> TableLocation | None:
    """Return the Delta table whose file a message names. If the message has no path of the recipe, return the first Delta table."""
    tables: list[TableLocation] = [
        part
        for part in [*request.source.parts, *request.evaluation]
        if part.type in ("Delta", "InferenceTable")
    ]
    tables += [request.source.feedback] if request.source.feedback else []

    def is_named(path: str) -> bool:
        folder = spark_path(path).rstrip("/")
        return f"{folder}/" in detail

    matches = [table for table in tables if table.path and is_named(table.path)]
    return next(iter(matches or tables), None)


def _shorten(detail: str) -> str:
    """Return the first sentence of a message about a file, without Spark's error codes; of a CSV header, a plainer sentence."""
    sentence = re.sub(r"^\[[A-Z_.0-9]+\] |\s+SQLSTATE: \w+$", "", detail)
    if sentence.startswith("CSV header does not conform"):
        return "its header repeats a column, or differs from the header of another file"
    return sentence.split(". ")[0].rstrip(".")[:_MAX_MESSAGE_CHARS]


def _find_disk_error(request: Request, causes: list[_Cause], error: Py4JJavaError) -> PodFailure | None:
    """Return the error of a full disk: the disk of the table, or the scratch space.

    NB: a task that writes the table can also fill the scratch space, in two ways. It sorts its rows there: then no writer is on the stack.
    And for an object store, Hadoop keeps files there until they are uploaded: then the output is not a folder. In all other cases, the
    full disk is that of the table.
    """
    if not any(_DISK_FULL in detail for _, detail in causes):
        return None
    stack, output = str(error), request.prepare.output
    if output.startswith("/") and any(writer in stack for writer in _WRITERS):
        return TrainingError(
            "DiskFull",
            f"the disk of data.prepare.output {output} is full: make room there, or name a folder on a larger volume",
        )
    return _build_scratch_error(request)


def _build_scratch_error(request: Request) -> TrainingError:
    if request.prepare.spark.executor_pods:
        return TrainingError(
            "DiskFull",
            "the scratch space of the pods of Spark is full: mount a larger volume whose name begins with spark-local-dir- in "
            "the template of spec.pods.prepare, or raise data.prepare.spark.executors",
        )
    return TrainingError(
        "DiskFull",
        f"the scratch space {tempfile.gettempdir()} of the preparation is full: mount a larger volume there in "
        "the template of spec.pods.prepare, or raise the pod's limit of ephemeral-storage",
    )


def _find_hadoop_error(causes: list[_Cause]) -> PodFailure | None:
    """Return the error of a store that denies access, is missing or cannot be reached."""
    for class_name, detail in causes:
        if class_name.endswith(_GOOGLE_CLASS) and detail.startswith(("401", "403")):
            return DataError(
                "AccessDenied",
                (
                    f"{_find_first_address(causes)} is not accessible with the pod's credentials: grant these credentials access, or correct them"
                ),
            )
        if class_name in _ACCESS_DENIED_CLASSES:
            credentials = (
                "the credentials from Unity Catalog" if OWN_SCHEME in detail else "the pod's credentials"
            )
            return DataError(
                "AccessDenied",
                f"{_find_address(detail)} is not accessible with {credentials}: grant these credentials access, or correct them",
            )
        missing = _find_missing_error(class_name, detail)
        if missing:
            return missing
    return None


def _find_first_address(causes: list[_Cause]) -> str:
    """Return the first path that a cause names."""
    return next((_find_address(detail) for _, detail in causes if re.search(_STORES, detail)), "the source")


def _find_credentials_error(causes: list[_Cause]) -> PodFailure | None:
    """Return the error of expired credentials of a catalog."""
    details = [detail for _, detail in causes]
    file = next((_find_address(detail) for detail in details if OWN_SCHEME in detail), None)
    if file is None or not any(_EXPIRED_TOKEN.search(detail) for detail in details):
        return None
    if any(_WRONG_REGION.search(detail) for detail in details):
        return None
    return TrainingError(
        "CredentialsExpired",
        f"the credentials from Unity Catalog for {file} expired before the table was read: give the preparation more "
        "cores, or use path with your own credentials",
    )


def _find_missing_error(class_name: str, detail: str) -> PodFailure | None:
    """Return the error of a path that has no file system, does not exist, or is in a store that cannot be reached."""
    address = _find_address(detail)
    if class_name in _UNSUPPORTED_CLASSES:
        return DataError("UnsupportedPlace", f"{detail}: a path must be {FOLDER_FORMATS}")
    if class_name in _MISSING_CLASSES:
        return DataError("MissingSource", f"{address} does not exist: correct the bucket or the path")
    if class_name in _UNREACHABLE_CLASSES:
        variable = "AWS_ENDPOINT_URL, and " if re.search(S3, detail) else ""
        return TrainingError(
            "StorageUnreachable", f"{address} cannot be reached: check {variable}that the store is up"
        )
    return None


def _find_job_error(causes: list[_Cause]) -> PodFailure | None:
    """Return the error of an aborted Spark job. The first line of Spark's message names the task and its failure."""
    failure = next((detail for class_name, detail in causes if class_name == _ABORTED_CLASS), "")
    if _EXECUTOR_LOST in failure:
        return TrainingError(
            "ExecutorsLost",
            "Spark aborted the job after one task lost its executors repeatedly: "
            f"{_text_after(failure, 'Reason: ').rstrip('.')}; if they ran out of memory, raise "
            "data.prepare.spark.executorMemory",
        )
    if failure.startswith("Job aborted"):
        return TrainingError("SparkFailed", _text_after(failure, "most recent failure: "))
    return None


def _text_after(text: str, start: str) -> str:
    """Return the part of a text after `start`; the whole text if it does not have `start`."""
    return text.partition(start)[2] or text


def _find_address(detail: str) -> str:
    """Return the path in a message of Hadoop, as the recipe names it, or the message."""
    match = re.search(rf"{_STORES}[^\s'`:]+", detail)
    return as_named(match.group()) if match else detail


def _list_causes(exception: Any) -> list[_Cause]:
    """Return a JVM exception and its causes, the outermost first; an empty list for None."""
    causes: list[_Cause] = []
    cause = exception
    # Without the limit, a chain of causes that is a circle would not end.
    while cause is not None and len(causes) < _MAX_CAUSES:
        message = cause.getMessage()
        causes.append(_Cause(cause.getClass().getName(), first_line(message) if message else ""))
        cause = cause.getCause()
    return causes
