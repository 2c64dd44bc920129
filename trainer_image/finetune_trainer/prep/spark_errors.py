"""Turns exceptions of Spark and Hadoop into errors of the pod with a remedy."""

from __future__ import annotations

import errno
import re
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from finetune_crds.base import PLACES
from finetune_trainer.examples.file_formats import CODECS_NOT_READ, explain_codec
from finetune_trainer.pod.exit_status import DataError, PodFailure, TrainingError, first_line
from finetune_trainer.prep.source import delta_table, schemas
from finetune_trainer.prep.source.location import OWN_SCHEME, S3, as_named
from finetune_trainer.prep.spark.session import spark_path
from finetune_trainer.prep.steps import chat

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_crds.source import NamedSource, Source
    from finetune_trainer.prep.plan import Request

# Errors that a row can cause in an expression of the recipe, in ANSI mode.
_BAD_ROW = (
    "CAST_INVALID_INPUT",
    "CAST_OVERFLOW",
    "DIVIDE_BY_ZERO",
    "INVALID_ARRAY_INDEX",
    "ARITHMETIC_OVERFLOW",
)
# What Spark, and a Python worker, say of bytes in a table that are no text. Spark shows them behind the last colon.
_NOT_UTF8 = ("INVALID_UTF8_STRING", "UnicodeDecodeError: ")
_UNREADABLE = ("FAILED_READ_FILE", "CANNOT_READ_FILE_FOOTER")
# A message may quote a line of the corpus.
_MOST_CHARS = 200
_GONE = "FAILED_READ_FILE.FILE_NOT_EXIST"
_FULL = "No space left on device"
# What is on the stack of the JVM while the files of the table, or its commit, are written.
_WRITERS = ("org.apache.parquet.hadoop.", "io.delta.storage.")
# NB: the answer to a HEAD request has no body, and so no code of S3.
_EXPIRED = re.compile("ExpiredToken|Status Code: 400")
# What S3 answers with the same status, of a region that is not the bucket's.
_OTHER_400 = re.compile("AuthorizationHeaderMalformed|IllegalLocationConstraintException")
# What Spark says of a Hive metastore that cannot be reached.
_METASTORE = re.compile("SessionHiveMetaStoreClient|TTransportException|Could not connect to meta store")
_STORES = rf"(?:{S3}|gs://|abfss://)"
# Exceptions of Hadoop's file systems.
_FORBIDDEN = ("java.nio.file.AccessDeniedException",)
_GOOGLE = "GoogleJsonResponseException"
_ABORTED = "org.apache.spark.SparkException"
_LOST = "ExecutorLostFailure"
_UNSUPPORTED = ("org.apache.hadoop.fs.UnsupportedFileSystemException",)
_MISSING = ("org.apache.hadoop.fs.s3a.UnknownStoreException", "java.io.FileNotFoundException")
_UNREACHABLE = (
    "java.net.ConnectException",
    "java.net.UnknownHostException",
    "java.net.SocketTimeoutException",
)


@contextmanager
def telling(asked: Request) -> Iterator[None]:
    """Raise an error with one sentence for a JVM exception with a known cause.

    Raises:
        DataError: a row that the filter cannot take, a file that is none, a bucket that is not there or not open.
        TrainingError: the storage does not answer, the disk is full, or Spark gave up.
    """
    try:
        yield
    except PySparkException as error:
        # NB: Spark Connect has no exception of the JVM.
        known = (
            chat.failure(str(error))
            or schemas.find_refusal(str(error))
            or _of_text(asked, str(error))
            or _expired(_causes(getattr(error, "_origin", None)))
            or _of_columns(asked, error.getCondition() or "", first_line(error))
            or _of_spark(asked, error.getCondition() or "", first_line(error))
        )
        if known is None:
            raise
        raise known from error
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise _scratch_full(asked) from error
    except Py4JJavaError as error:
        causes = _causes(error.java_exception)
        known = (
            schemas.find_refusal(str(error))
            or _expired(causes)
            or _of_file(asked, causes)
            or _of_disk(asked, causes, error)
            or _of_hadoop(causes)
            or _of_jobs(causes)
        )
        if known is None:
            raise
        raise known from error


def _of_text(asked: Request, said: str) -> PodFailure | None:
    """The error of text in a table that is not UTF-8."""
    line = next((line for line in said.splitlines() if any(mark in line for mark in _NOT_UTF8)), None)
    if line is None:
        return None
    shown = re.sub(r"^.*?(?:UnicodeDecodeError|found in string): |\s*SQLSTATE: \w+$", "", line).rstrip(".")
    return DataError(
        "UnreadableSource",
        f"{asked.source_name} has text that is not UTF-8 ({shown[:_MOST_CHARS]}): write its files again",
    )


def _of_spark(asked: Request, condition: str, detail: str) -> PodFailure | None:
    if condition.startswith(_BAD_ROW):
        return DataError(
            "FilterFailed",
            f"data.prepare.filter `{asked.prepare.filter}` fails on a row of {asked.source_name}: {detail}; use try_cast "
            "or leave such rows out",
        )
    if condition == _GONE and (table := _table_of(asked, detail)):
        return delta_table.gone(table)
    if _METASTORE.search(detail):
        return TrainingError(
            "CatalogUnreachable",
            f"the Hive metastore of data.prepare.catalog does not answer: {detail[:_MOST_CHARS]}",
        )
    if condition.startswith(_UNREADABLE):
        return DataError("UnreadableSource", f"{asked.source_name} cannot be read: {detail}")
    return None


def _of_columns(asked: Request, condition: str, detail: str) -> PodFailure | None:
    """The error of columns that Spark cannot read, or cannot tell from each other."""
    if condition == "COLUMN_ALREADY_EXISTS":
        return DataError(
            "ColumnsAmbiguous",
            f"{asked.source_name} has columns whose names differ at most in case ({detail[:_MOST_CHARS]}): rename them",
        )
    if condition.startswith("PARQUET_TYPE_"):
        return DataError(
            "WrongColumnType",
            f"{asked.source_name} has a column of a type that Spark does not read ({detail[:_MOST_CHARS]}): write it with another type",
        )
    return None


def _of_file(asked: Request, causes: list[tuple[str, str]]) -> PodFailure | None:
    """The error of a file that Spark cannot read: it names the file, and its last cause says why."""
    read = next((detail for _, detail in causes if detail.startswith("[FAILED_READ_FILE")), None)
    if read is None:
        return None
    if read.startswith(f"[{_GONE}]") and (table := _table_of(asked, read)):
        return delta_table.gone(table)
    file = re.search(r"while reading file (\S+?)\.?\s", f"{read} ")
    named = as_named(unquote(file.group(1))) if file else asked.source_name
    codec = next((codec for codec in CODECS_NOT_READ if f"{codec}Codec" in causes[-1][1]), None)
    sentence = (
        f"{named} cannot be read: {_plain(causes[-1][1])}; correct or remove it"
        if codec is None
        else explain_codec(named, codec)
    )
    return DataError("UnreadableSource", sentence)


def _table_of(asked: Request, detail: str) -> Source | NamedSource | None:
    """The Delta table whose file a message names."""
    tables = [part for part in [*asked.source.parts, *asked.evaluation] if part.type == "Delta"]
    named = [part for part in tables if part.path and spark_path(part.path).rstrip("/") + "/" in detail]
    return next(iter(named or tables), None)


def _plain(detail: str) -> str:
    """Return the first sentence of a message about a file, without what Spark puts around it."""
    said = re.sub(r"^\[[A-Z_.0-9]+\] |\s+SQLSTATE: \w+$", "", detail)
    if said.startswith("CSV header does not conform"):
        return "its header names a column twice, or differs from that of another file"
    return said.split(". ")[0].rstrip(".")[:_MOST_CHARS]


def _of_disk(asked: Request, causes: list[tuple[str, str]], error: Py4JJavaError) -> PodFailure | None:
    """The error of a disk that is full: that of the table, or else that of the scratch space.

    NB: the table's rows are sorted, in the scratch space, by the task that writes them; and Hadoop's clients of stores keep files
    there until they are uploaded.
    """
    if not any(_FULL in detail for _, detail in causes):
        return None
    stack, output = str(error), asked.prepare.output
    if output.startswith("/") and any(writer in stack for writer in _WRITERS):
        return TrainingError(
            "DiskFull",
            f"the disk of data.prepare.output {output} is full: make room there, or name a folder on a larger volume",
        )
    return _scratch_full(asked)


def _scratch_full(asked: Request) -> TrainingError:
    if asked.prepare.spark.executor_pods:
        return TrainingError(
            "DiskFull",
            "the scratch space of the pods of Spark is full: mount a larger volume whose name begins with spark-local-dir- in "
            "data.prepare.podTemplate, or raise data.prepare.spark.executors",
        )
    return TrainingError(
        "DiskFull",
        f"the scratch space {tempfile.gettempdir()} of the preparation is full: mount a larger volume there in "
        "data.prepare.podTemplate, or raise the pod's limit of ephemeral-storage",
    )


def _of_hadoop(causes: list[tuple[str, str]]) -> PodFailure | None:
    for kind, detail in causes:
        if kind.endswith(_GOOGLE) and detail.startswith(("401", "403")):
            return DataError(
                "AccessDenied",
                f"{_of_any(causes)} is closed to the pod's credentials: grant them access, or correct them",
            )
        if kind in _FORBIDDEN:
            whose = (
                "the credentials that Unity Catalog gave" if OWN_SCHEME in detail else "the pod's credentials"
            )
            return DataError(
                "AccessDenied", f"{_place(detail)} is closed to {whose}: grant them access, or correct them"
            )
        found = _not_there(kind, detail)
        if found:
            return found
    return None


def _of_any(causes: list[tuple[str, str]]) -> str:
    """Return the first path that a cause names."""
    return next((_place(detail) for _, detail in causes if re.search(_STORES, detail)), "the source")


def _expired(causes: list[tuple[str, str]]) -> PodFailure | None:
    """The error of credentials of a catalog whose time is over, wherever Spark noticed it."""
    details = [detail for _, detail in causes]
    file = next((_place(detail) for detail in details if OWN_SCHEME in detail), None)
    if file is None or not any(_EXPIRED.search(detail) for detail in details):
        return None
    if any(_OTHER_400.search(detail) for detail in details):
        return None
    return TrainingError(
        "CredentialsExpired",
        f"the credentials that Unity Catalog gave for {file} expired before all of it was read: give the preparation more cores, "
        "or use path with credentials of your own",
    )


def _not_there(kind: str, detail: str) -> PodFailure | None:
    """The error of a store or a file that cannot be found."""
    place = _place(detail)
    if kind in _UNSUPPORTED:
        return DataError("UnsupportedPlace", f"{detail}: a path is {PLACES}")
    if kind in _MISSING:
        return DataError("MissingSource", f"{place} does not exist: correct the bucket or the path")
    if kind in _UNREACHABLE:
        variable = " is AWS_ENDPOINT_URL right, and" if re.search(S3, detail) else " is"
        return TrainingError("StorageUnreachable", f"{place} cannot be reached:{variable} the store up?")
    return None


def _of_jobs(causes: list[tuple[str, str]]) -> PodFailure | None:
    """The error of a Spark job that was given up; its first line names the task and what happened to it."""
    found = next((detail for kind, detail in causes if kind == _ABORTED), "")
    if _LOST in found:
        return TrainingError(
            "ExecutorsLost",
            f"Spark gave up after it lost executors during the same task: {_after(found, 'Reason: ').rstrip('.')}; where "
            "they ran out of memory, raise data.prepare.spark.executorMemory",
        )
    if found.startswith("Job aborted"):
        return TrainingError("SparkFailed", _after(found, "most recent failure: "))
    return None


def _after(text: str, start: str) -> str:
    return text.partition(start)[2] or text


def _place(detail: str) -> str:
    """Return the path in a message of Hadoop, as the recipe names it, or the message."""
    found = re.search(rf"{_STORES}[^\s'`:]+", detail)
    return as_named(found.group()) if found else detail


def _causes(thrown: Any) -> list[tuple[str, str]]:
    """Return class and first line of the message of a JVM exception and of each of its causes; nothing of None."""
    found: list[tuple[str, str]] = []
    cause = thrown
    while cause is not None and len(found) < 32:
        message = cause.getMessage()
        found.append((cause.getClass().getName(), first_line(message) if message else ""))
        cause = cause.getCause()
    return found
