"""The preparation of a FineTuneJob on one's own machine."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_crds.recipe import JobReference, RecipeError
from finetune_crds.spark import Spark
from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.prep import laptop
from unit.trainer.prep.recipes import recipe as plain

HIVE = {"type": "Hive", "hive": {"uri": "thrift://metastore:9083"}}
SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s3"}}


def job(**prepare: Any) -> dict[str, Any]:
    """A FineTuneJob that prepares JSON lines."""
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": "tune", "namespace": "team"},
        "spec": {
            "model": {"base": "/model"},
            "data": {"source": {"type": "JSONLines", "path": "/rows.jsonl"}, "prepare": prepare},
        },
    }


def file(folder: Path, *parts: Any) -> Path:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump_all(parts))
    return path


def test_the_job_of_a_manifest_runs_in_this_process(tmp_path: Path) -> None:
    spark = {"mode": "Kubernetes", "executors": 9, "driverMemory": "4Gi"}
    manifest = job(output="s3://splits/a", spark=spark)
    manifest["spec"]["model"]["cache"] = {"claimName": "models"}
    loaded = laptop.load_recipe(file(tmp_path, SECRET, manifest))
    assert loaded.model.cache is None
    assert loaded.job == JobReference(name="tune", namespace="team", uid="local")
    assert loaded.data.prepare is not None
    assert (loaded.data.prepare.output, loaded.data.prepare.spark) == (
        "s3://splits/a",
        Spark(driver_memory="4Gi"),
    )


def test_tables_of_a_workspace_are_not_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = {"mode": "Databricks", "databricks": {"volume": "/Volumes/a/b/c"}}
    manifest = job(output="s3://b/a", spark=run, splitTables={"train": "main.support.chat_train"})
    manifest["spec"]["data"]["source"] = {"type": "Parquet", "path": "s3://b/rows"}
    prepare = laptop.load_recipe(file(tmp_path, manifest)).data.prepare
    assert prepare
    assert prepare.split_tables is None
    assert capsys.readouterr().out == "data.prepare.splitTables is left out: the tables are in a workspace\n"
    in_hive = job(output="/a", splitTables={"train": "support.chats"}, catalog=HIVE)
    prepare = laptop.load_recipe(file(tmp_path, in_hive)).data.prepare
    assert prepare
    assert prepare.split_tables


def test_a_recipe_is_taken_too(tmp_path: Path) -> None:
    plain_recipe = plain()
    path = tmp_path / "recipe.yaml"
    path.write_text(plain_recipe.to_yaml())
    assert laptop.load_recipe(path) == plain_recipe
    loaded = laptop.load_recipe(path, output="/elsewhere")
    assert loaded.data.prepare is not None
    assert loaded.data.prepare.output == "/elsewhere"


def test_a_folder_for_the_table_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(plain().to_yaml())
    monkeypatch.chdir(tmp_path)
    for output, expected in (("table", str(tmp_path / "table")), ("s3://splits/b", "s3://splits/b")):
        prepare = laptop.load_recipe(path, output=output).data.prepare
        assert prepare is not None
        assert prepare.output == expected


WRONG: list[tuple[str, list[Any], str]] = [
    ("no job", [SECRET], "{file} has 0 FineTuneJobs: use a file with exactly one"),
    ("two jobs", [job(), job()], "{file} has 2 FineTuneJobs: use a file with exactly one"),
    ("no output", [job()], "{file} has no data.prepare.output: set a folder with --output"),
    ("neither", [{"a": 1}], "the recipe {file} is invalid at "),
    (
        "an unknown field",
        [job(output="/out", maxTokenz=256)],
        "the FineTuneJob in {file} is invalid at spec.data.prepare.maxTokenz: unknown field",
    ),
    (
        "a mistake",
        [job(maxTokens=0)],
        "the FineTuneJob in {file} is invalid at spec.data.prepare.maxTokens: ",
    ),
]


@pytest.mark.parametrize(("parts", "sentence"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_what_is_wrong_is_said(tmp_path: Path, parts: list[Any], sentence: str) -> None:
    path = file(tmp_path, *parts)
    with pytest.raises(RecipeError) as refused:
        laptop.load_recipe(path)
    assert str(refused.value).startswith(sentence.replace("{file}", str(path)))


def test_a_job_that_the_api_server_would_refuse_is_refused(tmp_path: Path) -> None:
    path = file(tmp_path, job(output="/out", responseTemplate="{answer}"))
    with pytest.raises(RecipeRefusedError) as refused:
        laptop.load_recipe(path)
    assert refused.value.message == (
        "data.prepare.promptTemplate: responseTemplate and templateSyntax Jinja require promptTemplate"
    )
    # The folder of the option counts, and not that of the job.
    with pytest.raises(RecipeRefusedError, match="must not be the path of a source"):
        laptop.load_recipe(file(tmp_path, job(output="/out")), output="/rows.jsonl")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read: No such file"):
        laptop.load_recipe(tmp_path / "missing.yaml")


def test_the_bar_shows_step_and_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    bar = laptop.Bar()
    for step, percent in (("reading", 0), ("tokens", 0), ("tokens", 40), ("tokens", 99)):
        bar.show(step, percent)
    bar.close()
    lines = shown.getvalue().split("\r")
    assert [
        any(line.startswith(begin) for line in lines)
        for begin in ("reading            0%", "tokens             0%")
    ] == [
        True,
        True,
    ]


def test_nothing_is_drawn_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    bar = laptop.Bar()
    bar.show("tokens", 40)
    bar.close()
    assert capsys.readouterr() == ("", "")
