"""The preparation in a Databricks run: its entry point, its wheel, and what it does without a JVM."""

from __future__ import annotations

import io
import json
import re
import runpy
import tomllib
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame

from finetune_crds import contract
from finetune_crds.contract import PrepResult, RunReport
from finetune_crds.tracking import Tracking
from finetune_trainer.pod import mlflow_run
from finetune_trainer.pod.exit_status import DataError, RecipeRefusedError
from finetune_trainer.prep import databricks, output
from finetune_trainer.prep.source import condition
from finetune_trainer.prep.spark import session
from finetune_trainer.prep.spark.keep import keep
from finetune_trainer.prep.steps import tokens
from fixtures.fake_databricks import Workspace, running
from fixtures.fake_databricks.files import FileRefusal
from unit.trainer.prep.recipes import commit_without_spark, prepare_quickly, recipe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from finetune_crds.recipe import Recipe

ROOT = Path(__file__).parents[4]
WHEEL = runpy.run_path(str(ROOT / "trainer_image" / "wheel.py"))
ROWS = {
    "question": [f"What is in table {number} of the {number} tables?" for number in range(40)]
    + ["Why?", "why?"],
    "answer": [f"The answer is {number}." for number in range(40)] + ["so", "so"],
}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_deltalake(tmp_path / "corpus", pa.table(ROWS))
    return tmp_path / "corpus"


def build_recipe(corpus: Path, tokenizer: Path, output: Path, **changes: Any) -> Recipe:
    return recipe(
        source={"type": "Delta", "path": str(corpus)},
        base=str(tokenizer),
        output=str(output),
        maxTokens=100,
        limit=30,
        **changes,
    )


def as_serverless(
    spark: SparkSession, patch: pytest.MonkeyPatch, name: str = "NOT_SUPPORTED_WITH_SERVERLESS"
) -> None:
    """No way to the JVM, and nothing is kept, as on serverless compute."""

    def persist(*_: Any) -> DataFrame:
        raise AnalysisException(f"[{name}] PERSIST TABLE is not supported here.")

    patch.setattr(session, "context", lambda _: None)
    patch.setattr(type(spark.range(1)), "persist", persist)


def run(folder: Path, job_recipe: Recipe, *arguments: str) -> PrepResult:
    """What a run of the recipe leaves in its folder."""
    folder.mkdir()
    (folder / contract.RECIPE_FILE).write_text(job_recipe.to_yaml())
    databricks.main(["--folder", str(folder), *arguments])
    report = RunReport.parse((folder / contract.REPORT_FILE).read_bytes())
    assert report
    assert report.message.prep
    assert (folder / contract.PROGRESS_FILE).read_text().startswith("writing")
    return report.message.prep


def test_rows_and_counts_are_those_of_a_pod_and_the_same_without_a_jvm_and_without_a_cache(
    spark: SparkSession,
    corpus: Path,
    tokenizer_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(session.ENV_RUNTIME, "17.3")
        usual = run(tmp_path / "usual", build_recipe(corpus, tokenizer_folder, tmp_path / "out"))
        as_serverless(spark, patch)
        tokens._unzip.cache_clear()
        bare = run(tmp_path / "bare", build_recipe(corpus, tokenizer_folder, tmp_path / "bare-out"))
    assert f"the report is only in {tmp_path / 'bare'}: " in capsys.readouterr().out
    local = prepare_quickly(spark, build_recipe(corpus, tokenizer_folder, tmp_path / "local-out"))
    assert local.model_copy(update={"path": usual.path}) == usual
    assert bare.model_copy(update={"path": usual.path}) == usual
    first, second, third = (
        sorted(DeltaTable(result.path).to_pyarrow_table().to_pylist(), key=lambda row: str(row["id"]))
        for result in (usual, bare, local)
    )
    assert first == second == third
    assert len(first) == 30
    # The session is the run's, and stays.
    assert spark.range(3).count() == 3


PICTURES = ("report.html", "funnel.png", "tokens.png")


@pytest.fixture
def workspace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    """A workspace, to which this process is logged in as a run is by itself."""
    monkeypatch.setenv(session.ENV_RUNTIME, "17.3")
    with running() as state:
        state.tracking.open()
        for name, value in state.secret.items():
            monkeypatch.setenv(name, value)
        yield state


@pytest.fixture
def job_recipe(spark: SparkSession, corpus: Path, tokenizer_folder: Path, tmp_path: Path) -> Recipe:
    """A recipe for the session of all tests."""
    return build_recipe(corpus, tokenizer_folder, tmp_path / "out")


@pytest.mark.parametrize("denied", ["", "PUT /api/2.0/fs/"], ids=["with its report", "without"])
def test_a_run_of_the_workspace_has_the_report_and_the_step(
    job_recipe: Recipe,
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    denied: str,
) -> None:
    monkeypatch.setattr(output, "commit", commit_without_spark)
    workspace.denied |= {denied} if denied else set()
    client = mlflow_run.create_client("databricks")
    experiment = client.create_experiment("/Shared/team")
    run_id = client.create_run(experiment).info.run_id
    assert job_recipe.data.prepare
    folder = Path(job_recipe.data.prepare.output).with_name("run")
    run(folder, job_recipe, "--mlflow-run", run_id)
    job_run = workspace.tracking.open().get_run(run_id)
    assert job_run.data.tags[contract.TAG_PREPARATION].startswith("writing")
    place = f"/WorkspaceInternal/Mlflow/Artifacts/{experiment}/Runs/{run_id}/artifacts/preparation"
    logged = {name for name in PICTURES if has(workspace, f"{place}/{name}")}
    assert logged == (set() if denied else {*PICTURES})
    assert {*PICTURES} <= {path.name for path in folder.iterdir()}
    log = capsys.readouterr().out
    assert ("preparation was not uploaded to the run's artifacts" in log, "the report is only in" in log) == (
        bool(denied),
        False,
    )


def test_the_tokenizer_of_a_model_in_unity_catalog(
    job_recipe: Recipe, workspace: Workspace, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No variable of the run names the registry."""
    monkeypatch.setattr(output, "commit", commit_without_spark)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        # NB: the preparation sets the variables, which end with this test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    workspace.add_version("main.llm.tuned", 1)
    for path in tokenizer_folder.iterdir():
        workspace.files.write(f"/Models/main/llm/tuned/1/components/tokenizer/{path.name}", path.read_bytes())
    model = job_recipe.model.model_copy(update={"base": "models:/main.llm.tuned/1"})
    tracking = Tracking(uri="databricks", registry_uri="databricks-uc")
    assert job_recipe.data.prepare
    folder = Path(job_recipe.data.prepare.output).with_name("run")
    result = run(folder, job_recipe.model_copy(update={"model": model, "tracking": tracking}))
    assert sum(result.rows.to_json().values()) == 30


def has(workspace: Workspace, path: str) -> bool:
    try:
        return bool(workspace.files.read(path))
    except FileRefusal:
        return False


def test_paths_are_those_of_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    local_path = session.spark_path("s3://a/b")
    monkeypatch.setenv(session.ENV_RUNTIME, "17.3")
    assert (local_path, session.spark_path("s3://a/b")) == ("s3a://a/b", "s3://a/b")


def test_other_refusals_to_keep_a_frame_are_not_hidden(spark: SparkSession) -> None:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as kept_frames:
        as_serverless(spark, patch)
        frame = spark.range(3)
        assert keep(frame, kept_frames) is frame
        as_serverless(spark, patch, "UNSUPPORTED_OPERATION")
        with pytest.raises(AnalysisException):
            keep(frame, kept_frames)


def test_a_filter_that_cannot_be_checked_is_refused(spark: SparkSession) -> None:
    with pytest.MonkeyPatch.context() as patch:
        as_serverless(spark, patch)
        with pytest.raises(RecipeRefusedError) as refused:
            condition.check(spark.range(3), "id > 1")
    assert refused.value.message.startswith(
        "data.prepare.filter cannot be checked on compute without access to the JVM"
    )


@pytest.mark.parametrize(
    ("name", "is_refused"), [("theirs.csv", True), ("part-00000-a.parquet", False), ("_delta_log", False)]
)
def test_an_output_with_other_files_is_left_alone(
    spark: SparkSession, tmp_path: Path, name: str, is_refused: bool
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("a")
    with pytest.MonkeyPatch.context() as patch:
        as_serverless(spark, patch)
        if is_refused:
            with pytest.raises(DataError, match="contains files but is not a Delta table"):
                output.list_versions(spark, recipe(), str(tmp_path / "out"))
        else:
            assert output.list_versions(spark, recipe(), str(tmp_path / "out")) == []


def test_a_failure_is_in_the_report_and_in_the_error(tmp_path: Path) -> None:
    failing_recipe = recipe(promptTemplate="{question")
    (tmp_path / contract.RECIPE_FILE).write_text(failing_recipe.to_yaml())
    sentence = "data.prepare.promptTemplate has an unmatched brace: write {column} for a column's value, and {{ and }} for braces"
    with pytest.raises(databricks.PreparationFailedError, match=re.escape(f"RecipeRefused: {sentence}")):
        databricks.main(["--folder", str(tmp_path)])
    assert json.loads((tmp_path / contract.REPORT_FILE).read_text()) == {
        "exitCode": 64,
        "message": {"error": {"reason": "RecipeRefused", "message": sentence}},
    }


def test_a_pod_refuses_the_recipe_of_a_run() -> None:
    spark = recipe(spark={"mode": "Databricks", "databricks": {"volume": "/Volumes/a/b/c"}}).data.prepare
    assert spark
    with pytest.raises(
        RecipeRefusedError, match="runs in a Databricks workspace, where the operator submits it"
    ):
        session.start(spark.spark)


def test_the_wheel_is_its_sources(tmp_path: Path) -> None:
    first, second = (WHEEL["build"](tmp_path / name) for name in ("first", "second"))
    assert (first.name, first.read_bytes()) == (second.name, second.read_bytes())
    archive = zipfile.ZipFile(io.BytesIO(first.read_bytes()))
    packages = {
        "/".join(name.split("/")[:2]) for name in archive.namelist() if name.startswith("finetune_trainer/")
    }
    assert "finetune_trainer/prep" in packages
    assert "finetune_trainer/train" not in packages
    (about,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    needs = [
        line.split()[1].partition(">")[0]
        for line in archive.read(about).decode().splitlines()
        if line.startswith("Requires-Dist")
    ]
    assert needs == [
        "cel-python",
        "filelock",
        "google-re2",
        "huggingface-hub",
        "jinja2",
        "phonenumbers",
        "py3langid",
        "py4j",
        "pydantic",
        "pyyaml",
        "transformers",
    ]
    project = tomllib.loads((ROOT / "trainer_image/pyproject.toml").read_text("utf-8"))
    data = project["tool"]["setuptools"]["package-data"]["finetune_trainer"]
    assert "prep/steps/gitleaks.toml" in data
    assert {f"finetune_trainer/{name}" for name in data} <= {*archive.namelist()}
    (entry,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    assert archive.read(entry).decode() == (
        f"[console_scripts]\n{contract.PREP_WHEEL_ENTRY} = finetune_trainer.prep.databricks:main\n"
    )
    assert (WHEEL["NAME"], WHEEL["ENTRY"]) == (contract.PREP_WHEEL, contract.PREP_WHEEL_ENTRY)
