"""Sources in Google Cloud Storage, in a server that speaks its API; and that the client of Azure is whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from cluster import object_stores
from finetune_crds.source import Source
from finetune_trainer.pod.exit_status import DataError, TrainingError
from finetune_trainer.prep import spark_errors
from finetune_trainer.prep.plan import build_plan
from finetune_trainer.prep.source import reader
from finetune_trainer.prep.spark import stores
from finetune_trainer.storage import filesystems
from support.http_server import Answer, serving
from unit.trainer.prep.recipes import recipe

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

    from cluster.object_stores import Store

ROWS = [{"question": f"What is in hall {number}?", "answer": f"Table {number}."} for number in range(20)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[Store]:
    """A bucket with a Delta table of two versions and a folder of Parquet files."""
    folder = tmp_path_factory.mktemp("gcs")
    bucket = folder / "data" / "lake"
    write_deltalake(bucket / "chats", pa.Table.from_pylist(ROWS[:5]))
    write_deltalake(bucket / "chats", pa.Table.from_pylist(ROWS[5:]), mode="append")
    (bucket / "files").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS), bucket / "files" / "a.parquet")
    configuration = spark.sparkContext._jsc.hadoopConfiguration()
    with object_stores.gs(folder) as store:
        for name, value in stores.gs_settings(store.env).items():
            configuration.set(name, value)
        yield store


@pytest.fixture
def lake(store: Store) -> str:
    """The bucket."""
    return store.uri


def test_a_table_and_files_are_read(spark: SparkSession, lake: str, tmp_path: Path) -> None:
    corpora = [
        reader.read(spark, Source.model_validate({"path": f"{lake}/{path}", **options}), tmp_path)
        for path, options in (
            ("chats", {"type": "Delta"}),
            ("chats", {"type": "Delta", "version": 0}),
            ("files", {"type": "Parquet"}),
        )
    ]
    assert [(corpus.version, corpus.frame.count()) for corpus in corpora] == [(1, 20), (0, 5), (None, 20)]


def test_training_reads_the_table_that_is_written(
    spark: SparkSession, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", store.env["STORAGE_EMULATOR_HOST"])
    place = f"{store.uri}/splits"
    for rows in (ROWS[:5], ROWS):
        spark.createDataFrame(rows).write.format("delta").mode("overwrite").save(place)
    read_rows = [
        DeltaTable(place, version=version, storage_options=filesystems.build_delta_options(place))
        .to_pyarrow_dataset()
        .count_rows()
        for version in (0, 1)
    ]
    assert read_rows == [5, 20]


@pytest.mark.parametrize(
    ("path", "kind", "sentence"),
    [
        (
            "lake/nowhere",
            "Parquet",
            "data.source.path gs://lake/nowhere does not exist: mount the volume, or correct the path",
        ),
        (
            "lake/files",
            "Delta",
            "data.source.path gs://lake/files is not a Delta table: correct the path, or set another type",
        ),
        (
            "nowhere/a",
            "Parquet",
            "data.source.path gs://nowhere/a does not exist: mount the volume, or correct the path",
        ),
    ],
)
@pytest.mark.usefixtures("lake")
def test_what_is_not_there_is_said(
    path: str, kind: str, sentence: str, spark: SparkSession, tmp_path: Path
) -> None:
    source = Source.model_validate({"type": kind, "path": f"gs://{path}"})
    with pytest.raises(DataError) as failed, spark_errors.translate_errors(build_plan(recipe())):
        reader.read(spark, source, tmp_path)
    assert failed.value.message == sentence


def test_credentials_that_the_store_refuses(spark: SparkSession, lake: str, tmp_path: Path) -> None:
    body = {"error": {"code": 403, "message": "no access", "errors": [{"reason": "forbidden"}]}}
    source = Source.model_validate({"type": "Parquet", "path": "gs://closed/corpus"})
    configuration = spark.sparkContext._jsc.hadoopConfiguration()
    before = configuration.get("fs.gs.storage.root.url")
    with serving(lambda _: Answer(403, body, {"Content-Type": "application/json"})) as address:
        configuration.set("fs.gs.storage.root.url", f"{address}/")
        with pytest.raises(DataError) as failed, spark_errors.translate_errors(build_plan(recipe())):
            reader.read(spark, source, tmp_path)
    configuration.set("fs.gs.storage.root.url", before)
    assert failed.value.reason == "AccessDenied"
    assert failed.value.message.startswith("gs://closed/corpus")


def test_the_client_of_azure_is_whole(spark: SparkSession, tmp_path: Path) -> None:
    """Its jars and settings, as far as an account that nobody has: no server that can be run has the API that it speaks."""
    host = "nobody.dfs.invalid"
    configuration = spark.sparkContext._jsc.hadoopConfiguration()
    for name, value in {
        f"fs.azure.account.auth.type.{host}": "SharedKey",
        f"fs.azure.account.key.{host}": "aGlkZGVu",
        "fs.azure.io.retry.max.retries": "0",
    }.items():
        configuration.set(name, value)
    source = Source.model_validate({"type": "Parquet", "path": f"abfss://corpora@{host}/chats"})
    with pytest.raises(TrainingError) as failed, spark_errors.translate_errors(build_plan(recipe())):
        reader.read(spark, source, tmp_path)
    assert failed.value.reason == "StorageUnreachable"
