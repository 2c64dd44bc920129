"""Spark's settings in the prep pod."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune_crds.spark import Spark
from finetune_trainer.pod.exit_status import RecipeRefusedError, TrainingError
from finetune_trainer.prep.spark import session


def settings(spark: Spark, **environment: str) -> dict[str, str]:
    return session.build_settings(
        spark, jars=Path("/jars"), scratch=Path("/tmp"), cores=3, environment=environment
    )


def test_settings_follow_the_recipe_and_the_pod() -> None:
    spark_settings = settings(Spark(driver_memory="3Gi"))
    expected = {
        "spark.master": "local[3]",
        "spark.driver.memory": "3145728k",
        "spark.driver.extraClassPath": "/jars/*",
        "spark.local.dir": "/tmp",
        "spark.sql.shuffle.partitions": "12",
        "spark.sql.icu.caseMappings.enabled": "false",
        "spark.ui.enabled": "false",
    }
    assert {name: spark_settings[name] for name in expected} == expected


GARBAGE_COLLECTORS = [
    ("two cores of one pod", Spark(), 2, {}, True),
    ("three cores of one pod", Spark(), 3, {}, False),
    ("a core each of two executors", Spark(mode="Kubernetes", executors=2), 2, {}, False),
    ("another one in the environment", Spark(), 2, {"JAVA_TOOL_OPTIONS": "-Xss2m -XX:+UseZGC"}, False),
    ("other options in the environment", Spark(), 2, {"JAVA_TOOL_OPTIONS": "-Xss2m"}, True),
]


@pytest.mark.parametrize(
    ("spark", "cores", "environment", "serial"),
    [row[1:] for row in GARBAGE_COLLECTORS],
    ids=[row[0] for row in GARBAGE_COLLECTORS],
)
def test_garbage_is_collected_beside_the_work_where_there_are_cores_for_it(
    spark: Spark, cores: int, environment: dict[str, str], *, serial: bool
) -> None:
    spark_settings = session.build_settings(
        spark, jars=Path("/jars"), scratch=Path("/tmp"), cores=cores, environment=environment
    )
    assert ("-XX:+UseSerialGC" in spark_settings["spark.driver.extraJavaOptions"]) == serial


# Where the exception of a task that fails reaches the user anyway, Spark's own words about the task stand before the sentence.
@pytest.mark.parametrize(
    ("spark", "is_silent"),
    [
        (Spark(), True),
        (Spark(conf={"spark.log.level": "DEBUG"}), False),
        (Spark(mode="Kubernetes", executors=2), False),
    ],
    ids=["one pod", "a level of the recipe", "executors in pods"],
)
def test_failed_tasks_of_one_pod_are_not_logged(spark: Spark, *, is_silent: bool) -> None:
    spark_settings = session.build_settings(
        spark, jars=Path("/jars"), scratch=Path("/tmp"), cores=2, environment={}
    )
    assert ("-Dfinetune.log.tasks=off" in spark_settings["spark.driver.extraJavaOptions"]) == is_silent


def test_conf_of_the_recipe_wins_or_is_put_behind_ours() -> None:
    rules = "spark.sql.optimizer.excludedRules"
    conf = {
        "spark.sql.shuffle.partitions": "7",
        rules: "org.example.Rule",
        "spark.hadoop.fs.s3a.threads.max": "9",
    }
    ours, theirs = settings(Spark()), settings(Spark(conf=conf))
    changed = {name: value for name, value in theirs.items() if ours.get(name) != value}
    assert changed == conf | {rules: f"{ours[rules]},org.example.Rule"}


REFUSED_CONF = [
    "spark.jars",
    "spark.jars.packages",
    "spark.files",
    "spark.submit.pyFiles",
    "spark.plugins",
    "spark.extraListeners",
    "spark.driver.extraJavaOptions",
    "spark.driver.extraClassPath",
    "spark.executor.extraLibraryPath",
    "spark.executorEnv.LD_PRELOAD",
    "spark.sql.extensions",
    "spark.sql.catalog.other",
    "spark.sql.queryExecutionListeners",
    "spark.sql.hive.metastore.jars",
    "spark.sql.warehouse.dir",
    "spark.hadoop.javax.jdo.option.ConnectionURL",
    "spark.hadoop.fs.file.impl",
    "spark.python.daemon.module",
    "spark.pyspark.python",
    "spark.driver.host",
    "spark.local.dir",
    "spark.kubernetes.driver.podTemplateFile",
    "spark.memoryless",
    "a.spark.memory.fraction",
]


def test_conf_takes_no_setting_that_loads_code_or_moves_the_driver() -> None:
    accepted = {
        "spark.sql.adaptive.enabled": "true",
        "spark.speculation": "true",
        "spark.memory.fraction": "0.5",
    }
    with pytest.raises(RecipeRefusedError) as refused:
        settings(Spark(conf=accepted | dict.fromkeys(REFUSED_CONF, "x")))
    begin, _, _ = refused.value.message.partition(": it accepts settings of execution")
    assert begin == f"data.prepare.spark.conf must not set {', '.join(REFUSED_CONF)}"


@pytest.mark.parametrize(
    ("name", "field"),
    [("spark.master", "data.prepare.spark.mode"), ("spark.driver.memory", "data.prepare.spark.driverMemory")],
)
def test_conf_may_not_set_what_has_a_field(name: str, field: str) -> None:
    with pytest.raises(RecipeRefusedError) as refused:
        settings(Spark(conf={name: "x"}))
    assert refused.value.message == f"data.prepare.spark.conf cannot set {name}: use {field}"


def test_spark_path() -> None:
    paths = ["s3://bucket/a", "s3a://bucket/a", "/data/a"]
    assert [session.spark_path(path) for path in paths] == ["s3a://bucket/a", "s3a://bucket/a", "/data/a"]


def test_missing_jars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(session.ENV_JARS, str(tmp_path))
    with pytest.raises(TrainingError) as failed:
        session.find_jars()
    assert failed.value.message == (
        f"there are no Delta jars in {tmp_path}: run trainer_image/jars.sh and set FINETUNE_JARS to its folder"
    )
