"""Tables of a Hive metastore, which is a real one: that of the jars of pyspark, on Derby in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark
import pytest
from deltalake import DeltaTable

from finetune_crds.catalog import Catalog
from finetune_crds.spark import Spark
from finetune_trainer.prep.spark import session
from support import spark_jvm
from support.ports import free_port, listens
from support.process import Process, running
from support.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

# A client of a metastore that is down tries for half a minute.
GIVE_UP = ("-Dhive.hmshandler.retry.attempts=1", "-Dhive.metastore.connect.retries=1")
_SERVER = "org.apache.hadoop.hive.metastore.HiveMetaStore"
CATALOG = {"type": "Hive", "hive": {"uri": "thrift://a:9083,thrift://b:9083"}}


@pytest.fixture
def metastore(tmp_path: Path) -> Iterator[tuple[Process, str]]:
    """A metastore, and its address."""
    port = free_port()
    settings = {
        "javax.jdo.option.ConnectionURL": "jdbc:derby:memory:metastore;create=true",
        "datanucleus.schema.autoCreateAll": "true",
        "hive.metastore.schema.verification": "false",
        "hive.metastore.warehouse.dir": str(tmp_path / "warehouse"),
        "hive.async.log.enabled": "false",
        "derby.stream.error.file": str(tmp_path / "derby.log"),
    }
    process = Process(
        "the Hive metastore",
        [
            "java",
            "-XX:TieredStopAtLevel=1",
            *(f"-D{name}={value}" for name, value in settings.items()),
            *("-cp", f"{Path(pyspark.__file__).parent}/jars/*", _SERVER, "-p", str(port)),
        ],
        tmp_path / "metastore.log",
    )
    with running(process):
        wait_for("the Hive metastore", lambda: listens(port), 60, process)
        yield process, f"thrift://127.0.0.1:{port}"


def test_tables_are_read_and_saved_by_their_names(
    metastore: tuple[Process, str], jars: Path, tmp_path: Path
) -> None:
    process, uri = metastore
    reader = subprocess.Popen(
        [sys.executable, "-m", "unit.trainer.prep.hive_reader", uri, str(tmp_path)],
        env=os.environ
        | spark_jvm.build_environment(*GIVE_UP)
        | {
            session.ENV_JARS: str(jars),
            "TMPDIR": str(tmp_path),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with reader:
        assert reader.stdin
        assert reader.stdout
        tables: dict[str, Any] = json.loads(reader.stdout.readline())
        saved: dict[str, int] = json.loads(reader.stdout.readline())
        process.stop()
        reader.stdin.write("again\n")
        reader.stdin.close()
        after = json.loads(reader.stdout.readline())
    assert tables == {
        "the newest version": [1, 8],
        "a version": [0, 5],
        "files": [None, 7],
        "files of Hive": [None, 9],
        "another format": [
            65,
            "UnreadableSource",
            "data.source.table support.text is in the format csv, and its source has the type Parquet: correct the type, or name a "
            "Parquet table",
        ],
        "a view": [
            65,
            "UnreadableSource",
            "data.source.table support.seen is a view, and its source has the type Parquet: correct the type, or name a Parquet table",
        ],
        "no Delta table": [
            65,
            "MissingSource",
            "data.source.table support.files is not a Delta table: correct the table, or set another type",
        ],
        "no such table": [
            65,
            "MissingSource",
            "data.source.table support.nowhere is not in the catalog of this preparation: correct the name",
        ],
        "no such database": [
            65,
            "MissingSource",
            "data.source.table nowhere.chats is not in the catalog of this preparation: correct the name",
        ],
        "an evaluation set": [1, 8, "evaluation set tasks: support.chats version 1, columns question"],
    }
    assert sum(saved.values()) == 40
    # The tables are in the location of the database.
    assert {
        f"support.{folder.name}": len(DeltaTable(folder).to_pyarrow_table())
        for folder in (tmp_path / "support").glob("chat_*")
    } == saved
    assert after[:2] == [1, "CatalogUnreachable"]
    assert after[2].startswith("the Hive metastore of data.prepare.catalog does not respond: ")


def test_the_session_of_a_hive_metastore() -> None:
    def settings(catalog: dict[str, Any] | None) -> dict[str, str]:
        session_catalog = Catalog.model_validate(catalog) if catalog else None
        return session.build_settings(
            Spark(),
            jars=Path("/jars"),
            scratch=Path("/tmp"),
            cores=1,
            environment={},
            catalog=session_catalog,
        )

    usual, hive = settings(None), settings(CATALOG)
    assert settings({"type": "Databricks"}) == usual
    assert dict(hive.items() - usual.items()) == {
        "spark.sql.caseSensitive": "false",
        "spark.sql.catalogImplementation": "hive",
        "spark.hadoop.hive.metastore.uris": "thrift://a:9083,thrift://b:9083",
        "spark.hadoop.fs.s3.impl": "org.apache.hadoop.fs.s3a.S3AFileSystem",
    }
