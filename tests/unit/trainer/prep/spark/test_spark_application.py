"""The driver of a SparkApplication: what it passes to spark-submit, and a preparation that spark-submit runs for real."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finetune_crds import contract
from finetune_crds.contract import TerminationMessage
from finetune_crds.prepare import Prepare
from finetune_crds.spark import Spark
from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.prep.spark import session, spark_application
from finetune_trainer.prep.spark.executor import find_spark_home
from support import spark_jvm
from support.quick_session import QUICK
from unit.trainer.prep.recipes import prepare_quickly, recipe, table_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

    from finetune_crds.recipe import Recipe

RUNNER = "org.apache.spark.deploy.PythonRunner"
FILE = Path(__file__).parents[5] / "trainer_image" / "prep.py"
MODE: dict[str, Any] = {"mode": "SparkApplication", "executors": 3, "executorCores": 2}


def conf(words: list[str]) -> dict[str, str]:
    """The settings of a command line."""
    pairs = [word for before, word in itertools.pairwise(words) if before == "--conf"]
    return dict(pair.split("=", 1) for pair in pairs)


def command(jars: Path, patch: pytest.MonkeyPatch, **spark: Any) -> list[str]:
    patch.setenv(session.ENV_JARS, str(jars))
    prepare = Prepare.model_validate({"output": "/out", "spark": {**MODE, **spark}})
    words = ["--properties-file", "/conf/spark.properties", "--class", "C", "local:///prep.py"]
    variables = {"SPARK_DRIVER_BIND_ADDRESS": "10.0.0.7", "AWS_REGION": "eu-west-1"}
    return spark_application.build_command(prepare, words, variables, Path("/spark"))


def test_what_depends_on_the_image_goes_to_spark_submit(jars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = command(jars, monkeypatch, conf={"spark.sql.shuffle.partitions": "7"})
    assert (words[0], words[-7:]) == (
        "/spark/bin/spark-submit",
        [
            "--deploy-mode",
            "client",
            "--properties-file",
            "/conf/spark.properties",
            "--class",
            "C",
            "local:///prep.py",
        ],
    )
    local = session.build_settings(
        Spark(), jars=jars, scratch=Path("/tmp"), cores=6, environment={"AWS_REGION": "eu-west-1"}
    )
    # What spark-submit knows better is left to it.
    theirs = {
        "spark.app.name",
        "spark.master",
        "spark.driver.memory",
        "spark.driver.host",
        "spark.driver.bindAddress",
        "spark.local.dir",
    }
    ours = {name: value for name, value in local.items() if name not in theirs}
    options = local["spark.driver.extraJavaOptions"].removesuffix(" -Dfinetune.log.tasks=off")
    assert conf(words) == ours | {
        "spark.driver.extraJavaOptions": options,
        "spark.driver.bindAddress": "10.0.0.7",
        "spark.sql.shuffle.partitions": "7",
        "spark.authenticate": "true",
        "spark.blockManager.port": "7079",
        "spark.executor.instances": "3",
        "spark.executor.extraClassPath": f"{jars}/*",
        "spark.executor.extraJavaOptions": options,
        "spark.executorEnv.TOKENIZERS_PARALLELISM": "false",
        "spark.executor.maxNumFailures": "2147483647",
        "spark.kubernetes.executor.disableConfigMap": "true",
        "spark.kubernetes.driver.service.deleteOnTermination": "false",
        "spark.kubernetes.driver.ownPersistentVolumeClaim": "false",
        "spark.kubernetes.driver.reusePersistentVolumeClaim": "false",
    }


def test_conf_may_not_move_the_driver(jars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeRefusedError, match=r"cannot set spark\.driver\.host"):
        command(jars, monkeypatch, conf={"spark.driver.host": "x"})


def test_the_version_of_spark_is_that_of_the_image() -> None:
    import pyspark

    assert pyspark.__version__ == contract.SPARK_VERSION


STARTS: dict[str, tuple[list[str], dict[str, str], str]] = {
    "elsewhere": (
        ["driver"],
        {},
        "SPARK_DRIVER_BIND_ADDRESS, FINETUNE_POD_NAMESPACE, FINETUNE_EXECUTOR_SELECTOR",
    ),
    "another role": (
        ["executor"],
        dict.fromkeys(
            ("SPARK_DRIVER_BIND_ADDRESS", "FINETUNE_POD_NAMESPACE", "FINETUNE_EXECUTOR_SELECTOR"), "x"
        ),
        "the first argument is not driver",
    ),
}


@pytest.mark.parametrize(("words", "environment", "sentence"), STARTS.values(), ids=STARTS)
def test_outside_of_such_a_pod_it_ends(
    words: list[str],
    environment: dict[str, str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["finetune-driver", *words])
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert spark_application.main() == 64
    assert capsys.readouterr().err.startswith(sentence)


def test_without_spark_submit_there_is_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    with pytest.raises(RecipeRefusedError, match="the spark-operator submits: use mode Local here"):
        session.start(Spark.model_validate(MODE))


@pytest.fixture
def job_recipe(tokenizer_folder: Path, tmp_path: Path) -> Recipe:
    return recipe(
        source={"type": "Parquet", "path": str(tmp_path / "corpus.parquet")},
        base=str(tokenizer_folder),
        output=str(tmp_path / "out"),
        spark={"mode": "SparkApplication", "driverMemory": "1Gi", "conf": QUICK},
    )


@pytest.fixture
def submit(
    jars: Path, job_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], tuple[int, str, TerminationMessage]]:
    """Runs a preparation as in the pod of a driver, but for the master: its exit code, what it printed, and its message."""
    monkeypatch.setenv(session.ENV_JARS, str(jars))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "recipe.yaml").write_text(job_recipe.to_yaml())
    properties = {"spark.master": "local[1]", "spark.driver.memory": "1g", "spark.app.name": "tune-prep-1"}
    file = tmp_path / "spark.properties"
    file.write_text("\n".join(f"{name}={value}" for name, value in properties.items()))
    variables = {
        **os.environ,
        **spark_jvm.build_environment(),
        "SPARK_DRIVER_BIND_ADDRESS": "127.0.0.1",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(tmp_path),
        "FINETUNE_RECIPE": str(tmp_path / "recipe.yaml"),
        "FINETUNE_TERMINATION_PATH": str(tmp_path / "termination"),
    }
    home = find_spark_home()
    words = ["--properties-file", str(file), "--class", RUNNER, f"local://{FILE}"]

    def run() -> tuple[int, str, TerminationMessage]:
        assert job_recipe.data.prepare
        done = subprocess.run(
            spark_application.build_command(job_recipe.data.prepare, words, variables, home),
            env=spark_application.build_environment(variables, home),
            cwd=tmp_path,
            check=False,
            capture_output=True,
            text=True,
        )
        print(done.stdout, done.stderr)
        message = TerminationMessage.parse((tmp_path / "termination").read_text())
        assert message
        return done.returncode, done.stdout, message

    return run


def test_the_exit_code_of_spark_submit_is_the_drivers(
    submit: Callable[[], tuple[int, str, TerminationMessage]], tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").write_text("")
    code, _, message = submit()
    assert message.error
    assert (code, message.error.reason) == (64, "InvalidRecipe")


def test_a_preparation_has_the_session_of_spark_submit_and_the_rows_of_one_pod(
    submit: Callable[[], tuple[int, str, TerminationMessage]],
    job_recipe: Recipe,
    spark: SparkSession,
    tmp_path: Path,
) -> None:
    rows = {
        "question": [f"What is in table {number} of the tables?" for number in range(40)] + ["Why?", "why?"],
        "answer": [f"The answer is {number}." for number in range(40)] + ["so", "so"],
    }
    pq.write_table(pa.table(rows), tmp_path / "corpus.parquet")
    code, log, message = submit()
    assert "Spark 4.2.0 on 1 cores" in log
    assert message.prep
    assert (code, message.prep.dropped) == (0, {"notNull": 0, "dedupe": 1})
    prepare = job_recipe.data.prepare
    assert prepare
    elsewhere = prepare.model_copy(update={"output": str(tmp_path / "local")})
    local = prepare_quickly(
        spark,
        job_recipe.model_copy(update={"data": job_recipe.data.model_copy(update={"prepare": elsewhere})}),
    )
    assert table_of(local) == table_of(message.prep)
    same = {"path": message.prep.path, "columns": message.prep.columns}
    assert local.model_copy(update=same) == message.prep
