"""The process of an executor: what Spark says in variables becomes the command line of its JVM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from finetune_trainer.prep.spark import executor

SAID = {
    "PATH": "/nowhere",
    "JAVA_HOME": "/jdk",
    "SPARK_DRIVER_URL": "spark://CoarseGrainedScheduler@tune-prep.team.svc:7078",
    "SPARK_EXECUTOR_ID": "3",
    "SPARK_EXECUTOR_CORES": "2",
    "SPARK_EXECUTOR_MEMORY": "1024m",
    "SPARK_APPLICATION_ID": "spark-1",
    "SPARK_EXECUTOR_POD_IP": "10.0.0.7",
    "SPARK_EXECUTOR_POD_NAME": "tune-prep-abcde-exec-3",
    "SPARK_RESOURCE_PROFILE_ID": "0",
    "SPARK_CLASSPATH": "/opt/finetune/jars/*",
    **{f"SPARK_JAVA_OPT_{number}": f"-Doption={number}" for number in (0, 10, 2)},
}


def test_command() -> None:
    assert executor.build_command(SAID, Path("/spark")) == [
        "/jdk/bin/java",
        "-Doption=0",
        "-Doption=2",
        "-Doption=10",
        "-Xmx1024m",
        "-cp",
        "/opt/finetune/jars/*:/spark/jars/*",
        "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend",
        "--driver-url",
        "spark://CoarseGrainedScheduler@tune-prep.team.svc:7078",
        "--executor-id",
        "3",
        "--cores",
        "2",
        "--app-id",
        "spark-1",
        "--hostname",
        "10.0.0.7",
        "--resourceProfileId",
        "0",
        "--podName",
        "tune-prep-abcde-exec-3",
    ]


def test_without_jars_of_ours_spark_has_its_own() -> None:
    alone = {name: value for name, value in SAID.items() if name != "SPARK_CLASSPATH"}
    words = executor.build_command(alone, Path("/spark"))
    assert words[words.index("-cp") + 1] == "/spark/jars/*"


JVMS: dict[str, tuple[dict[str, str], str]] = {
    "JAVA_HOME": ({"JAVA_HOME": "/jdk"}, "/jdk/bin/java"),
    "the path": ({"PATH": "{folder}"}, "{folder}/java"),
    "nothing": ({"PATH": "/nowhere"}, "/usr/bin/java"),
}


@pytest.mark.parametrize(("environment", "expected"), JVMS.values(), ids=JVMS)
def test_java(environment: dict[str, str], expected: str, tmp_path: Path) -> None:
    (tmp_path / "java").touch(mode=0o755)
    variables = {name: value.format(folder=tmp_path) for name, value in environment.items()}
    assert executor.find_java(variables) == expected.format(folder=tmp_path)


def test_spark_is_where_its_jars_are() -> None:
    assert any((executor.find_spark_home() / "jars").glob("spark-kubernetes_*.jar"))


def test_somebody_who_calls_it_by_hand_is_told() -> None:
    command = [sys.executable, "-m", "finetune_trainer.prep.spark.executor"]
    done = subprocess.run(command, env={}, capture_output=True, text=True, check=False)
    assert done.returncode == 64
    assert done.stderr.startswith("SPARK_DRIVER_URL, SPARK_EXECUTOR_ID, ")
    assert done.stderr.endswith("is not set: only Spark's driver can start this command\n")
