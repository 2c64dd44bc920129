"""Turns exceptions of Spark and Hadoop into errors of the pod with a remedy."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from finetune_trainer.outcome import DataError, PodFailure, TrainingError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_trainer.prep.plan import Request

# Errors that a row can cause in an expression of the recipe, in ANSI mode.
_BAD_ROW = (
    "CAST_INVALID_INPUT",
    "CAST_OVERFLOW",
    "DIVIDE_BY_ZERO",
    "INVALID_ARRAY_INDEX",
    "ARITHMETIC_OVERFLOW",
)
_UNREADABLE = ("FAILED_READ_FILE", "CANNOT_READ_FILE_FOOTER")
# Exceptions of Hadoop's file systems.
_FORBIDDEN = ("java.nio.file.AccessDeniedException",)
_ABORTED = "org.apache.spark.SparkException"
_LOST = "ExecutorLostFailure"
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
        TrainingError: the storage does not answer, or Spark gave up.
    """
    try:
        yield
    except PySparkException as error:
        known = _of_spark(asked, error.getCondition() or "", first_line(error))
        if known is None:
            raise
        raise known from error
    except Py4JJavaError as error:
        causes = _causes(error)
        known = _of_hadoop(causes) or _of_jobs(causes)
        if known is None:
            raise
        raise known from error


def first_line(error: object) -> str:
    """Return the first line of a message that is not empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def _of_spark(asked: Request, condition: str, detail: str) -> PodFailure | None:
    if condition.startswith(_BAD_ROW):
        return DataError(
            "FilterFailed",
            f"data.prepare.filter `{asked.prepare.filter}` fails on a row of {asked.source_name}: {detail}; use try_cast "
            "or leave such rows out",
        )
    if condition.startswith(_UNREADABLE):
        return DataError("UnreadableSource", f"{asked.source_name} cannot be read: {detail}")
    return None


def _of_hadoop(causes: list[tuple[str, str]]) -> PodFailure | None:
    for kind, detail in causes:
        place = _place(detail)
        if kind in _FORBIDDEN:
            return DataError(
                "AccessDenied",
                f"{place} is closed to the pod's credentials: grant them access, or correct them",
            )
        if kind in _MISSING:
            return DataError("MissingSource", f"{place} does not exist: correct the bucket or the path")
        if kind in _UNREACHABLE:
            return TrainingError(
                "StorageUnreachable",
                f"{place} cannot be reached: is AWS_ENDPOINT_URL right, and the store up?",
            )
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
    found = re.search(r"s3a://[^\s'`:]+", detail)
    return found.group().replace("s3a://", "s3://", 1) if found else detail


def _causes(error: Py4JJavaError) -> list[tuple[str, str]]:
    """Return class and first line of the message of a JVM exception and of each of its causes."""
    found: list[tuple[str, str]] = []
    cause = error.java_exception
    while cause is not None and len(found) < 32:
        found.append((cause.getClass().getName(), first_line(cause.getMessage() or "")))
        cause = cause.getCause()
    return found
