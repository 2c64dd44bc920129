"""What the JVM throws, in one sentence."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

import pytest
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]

from finetune_trainer.pod.exit_status import PodFailure, describe
from finetune_trainer.prep import spark_errors
from finetune_trainer.prep.plan import build_plan
from unit.trainer.prep.recipes import recipe

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

S3A = "org.apache.hadoop.fs.s3a.UnknownStoreException"
THROWN: list[tuple[str, str, str, int, str]] = [
    (
        "bucket that is not there",
        S3A,
        "`s3a://corpus/raw': getFileStatus on s3a://corpus/raw: NoSuchBucketException: it does not exist",
        65,
        "s3://corpus/raw does not exist: correct the bucket or the path",
    ),
    (
        "file that is gone",
        "java.io.FileNotFoundException",
        "File /data/a.parquet",
        65,
        "File /data/a.parquet does not exist: correct the bucket or the path",
    ),
    (
        "wrong credentials",
        "java.nio.file.AccessDeniedException",
        "s3a://splits/out/_delta_log: getFileStatus on s3a://splits/out/_delta_log: Forbidden (Status Code: 403)",
        65,
        "s3://splits/out/_delta_log is not accessible with the pod's credentials: grant these credentials access, or correct them",
    ),
    (
        "store that is down: to be tried again",
        "java.net.ConnectException",
        "getFileStatus on s3a://corpus/raw: Connect to store:7070 failed",
        1,
        "s3://corpus/raw cannot be reached: check AWS_ENDPOINT_URL, and that the store is up",
    ),
    (
        "credentials of Unity Catalog that do not open a file",
        "java.nio.file.AccessDeniedException",
        "s3a-0123abcd://lake/chats/a.parquet: open s3a-0123abcd://lake/chats/a.parquet: Forbidden (Status Code: 403)",
        65,
        (
            "s3://lake/chats/a.parquet is not accessible with the credentials from Unity Catalog: grant these credentials access, or correct them"
        ),
    ),
    (
        "a store that is not known",
        "org.apache.hadoop.fs.UnsupportedFileSystemException",
        'No FileSystem for scheme "ftp"',
        65,
        'No FileSystem for scheme "ftp": a path must be s3://bucket/folder, gs://bucket/folder, '
        "abfss://container@host/folder, or an absolute path",
    ),
    (
        "disk full",
        "java.io.IOException",
        "No space left on device",
        1,
        f"the scratch space {tempfile.gettempdir()} of the preparation is full: mount a larger volume there in "
        "the template of spec.pods.prepare, or raise the pod's limit of ephemeral-storage",
    ),
    (
        "executors that are killed",
        "org.apache.spark.SparkException",
        "Job aborted due to stage failure: Task 0 in stage 1.0 failed 4 times, most recent failure: Lost task 0.3 in stage "
        "1.0 (TID 9) (10.0.0.7 executor 5): ExecutorLostFailure (executor 5 exited caused by one of the running tasks) "
        "Reason: The executor with id 5 exited with exit code 137(SIGKILL, possible container OOM).",
        1,
        "Spark aborted the job after one task lost its executors repeatedly: The executor with id 5 exited with exit "
        "code 137(SIGKILL, possible container OOM); if they ran out of memory, raise "
        "data.prepare.spark.executorMemory",
    ),
    (
        "a task that fails",
        "org.apache.spark.SparkException",
        "Job aborted due to stage failure: Task 1 in stage 1.0 failed 4 times, most recent failure: Lost task 1.3 in stage "
        "1.0 (TID 6) (10.0.0.7 executor 1): java.io.IOException: Broken pipe",
        1,
        "Lost task 1.3 in stage 1.0 (TID 6) (10.0.0.7 executor 1): java.io.IOException: Broken pipe",
    ),
]


def throw(spark: SparkSession, kind: str, message: str) -> Any:
    """An exception of the JVM as py4j brings it, wrapped as Spark wraps it."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    cause = getattr(jvm, kind)(
        *([message.split("'", maxsplit=1)[0].strip("`"), message] if kind == S3A else [message])
    )
    return Py4JJavaError(
        "An error occurred while calling o1.load", jvm.java.lang.RuntimeException("wrapped", cause)
    )


@pytest.mark.parametrize(
    ("kind", "message", "code", "sentence"), [row[1:] for row in THROWN], ids=[row[0] for row in THROWN]
)
def test_what_hadoop_throws(spark: SparkSession, kind: str, message: str, code: int, sentence: str) -> None:
    with pytest.raises(PodFailure) as failed, spark_errors.translate_errors(build_plan(recipe())):
        raise throw(spark, kind, message)
    reason, reported = describe(failed.value)
    assert reported.error is not None
    assert (reason, reported.error.message) == (code, sentence)


def test_what_is_not_known_stays_as_it_is(spark: SparkSession) -> None:
    thrown = throw(spark, "java.lang.IllegalStateException", "a bug")
    with pytest.raises(Py4JJavaError) as failed, spark_errors.translate_errors(build_plan(recipe())):
        raise thrown
    assert failed.value is thrown


def test_executors_in_pods_of_their_own_have_another_scratch_space(spark: SparkSession) -> None:
    plan = build_plan(recipe(spark={"mode": "Kubernetes", "executors": 2}, output="s3://splits/out"))
    with pytest.raises(PodFailure) as failed, spark_errors.translate_errors(plan):
        raise throw(spark, "java.io.IOException", "No space left on device")
    assert (failed.value.exit_code, failed.value.reason, failed.value.message) == (
        1,
        "DiskFull",
        "the scratch space of the pods of Spark is full: mount a larger volume whose name begins with spark-local-dir- in "
        "the template of spec.pods.prepare, or raise data.prepare.spark.executors",
    )
