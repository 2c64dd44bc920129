"""A session as the prep pod starts it, but for rows by the dozen: nothing is compiled that runs in less time than that takes."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from finetune_crds.spark import Spark
from finetune_trainer.prep.spark import session

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import SparkSession

    from finetune_crds.catalog import Catalog

QUICK = {"spark.sql.shuffle.partitions": "2"}
# For rows by the dozen, the code that Spark makes of a plan takes longer to compile than the plan to run without.
INTERPRETED = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
# NB: Delta reads the log of each table in 50 tasks by default.
_DELTA = {"spark.databricks.delta.snapshotPartitions": "2"}
_DAEMON = {"spark.python.daemon.module": "support.worker_daemon"}


def start(catalog: Catalog | None = None, settings: Mapping[str, str] | None = None) -> SparkSession:
    """Start a session whose Python workers `worker_daemon` forks, and which does not compile plans, see `compiled`.

    settings: settings of Spark that no recipe may have.
    """
    build_settings = session.build_settings

    def build_all_settings(*arguments: Any, **keywords: Any) -> dict[str, str]:
        return build_settings(*arguments, **keywords) | _DELTA | _DAEMON | dict(settings or {})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "build_settings", build_all_settings)
        spark = session.start(Spark(driver_memory="1Gi", conf=QUICK), catalog)
    for name, value in INTERPRETED.items():
        spark.conf.set(name, value)
    return spark


def stop(spark: SparkSession) -> None:
    """Stop a session and its JVM, which would otherwise end with this process."""
    gateway = spark.sparkContext._gateway
    spark.stop()
    gateway.shutdown()
    # NB: the JVM ends when its standard input does.
    gateway.proc.stdin.close()
    gateway.proc.wait(timeout=300)


@contextmanager
def compiled(spark: SparkSession) -> Iterator[None]:
    """Let the session of all tests compile plans, as sessions of preparations do."""
    for name in INTERPRETED:
        spark.conf.unset(name)
    try:
        yield
    finally:
        for name, value in INTERPRETED.items():
            spark.conf.set(name, value)
