"""What a cluster does with the task of a run, in a process of its own: a session, the wheel's entry point, and nothing between.

    python runner.py TASK.json

The task says where the wheel is installed, which entry point it has, what volumes, buckets and tables there are, and the token
with which the run asks its workspace.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> int:
    """Run the task; its error, if any, goes into the file that the task names."""
    task: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.path.insert(0, task["installed"])
    os.environ["DATABRICKS_RUNTIME_VERSION"] = "17.3"
    log_in(task["host"], task["token"])
    spark = session(task)
    try:
        for name, place in task["tables"].items():
            spark.sql(f"CREATE DATABASE IF NOT EXISTS {name.rpartition('.')[0]}")
            spark.sql(f"CREATE TABLE {name} USING delta LOCATION '{place}'")
        # NB: a run sees volumes at /Volumes; this machine has them in a folder.
        volumes = f"{task['volumes']}/Volumes/"
        sys.argv = ["run", *(item.replace("/Volumes/", volumes, 1) for item in task["parameters"])]
        distribution = importlib.metadata.distribution(task["package"])
        (entry,) = distribution.entry_points.select(name=task["entry_point"])
        called = entry.load()
        assert Path(sys.modules[called.__module__].__file__ or "").is_relative_to(task["installed"])
        called()
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the error of the run
        traceback.print_exc()
        Path(task["error"]).write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        return 1
    finally:
        with contextlib.suppress(Exception):
            spark.stop()
    return 0


def log_in(host: str, token: str) -> None:
    """Have what the runtime of Databricks gives the SDK: the workspace of the run, and a token of whoever submitted it."""

    def init_runtime_native_unified() -> tuple[str, None, None, Callable[[], dict[str, str]]]:
        return host, None, None, lambda: {"Authorization": f"Bearer {token}"}

    provider = types.ModuleType("dbruntime.sdk_credential_provider")
    provider.__dict__["init_runtime_native_unified"] = init_runtime_native_unified
    sys.modules |= {"dbruntime": types.ModuleType("dbruntime"), provider.__name__: provider}


def session(task: dict[str, Any]) -> Any:
    """The session that the run finds. Buckets are folders, under the scheme that a workspace has for them."""
    from pyspark.sql import SparkSession

    scratch = task["scratch"]
    settings = {
        "spark.master": "local[2]",
        "spark.driver.memory": "1g",
        "spark.driver.host": "127.0.0.1",
        # A run is over before the second compiler pays.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.driver.extraClassPath": f"{task['jars']}/*",
        "spark.local.dir": scratch,
        "spark.sql.warehouse.dir": f"{scratch}/warehouse",
        "spark.log.level": "ERROR",
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "2",
        "spark.hadoop.fs.s3.impl": "org.apache.hadoop.fs.viewfs.ViewFileSystemOverloadScheme",
        **task["conf"],
    }
    for bucket, folder in task["buckets"].items():
        settings[f"spark.hadoop.fs.viewfs.mounttable.{bucket}.linkMergeSlash"] = f"file://{folder}"
    builder = SparkSession.builder.appName("run")
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


if __name__ == "__main__":
    sys.exit(main())
