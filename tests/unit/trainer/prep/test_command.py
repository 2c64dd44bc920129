"""`finetune-prep`: its result after full disks and a process that was killed, its refusals, and its exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from finetune_crds.contract import EXIT_RECIPE, PodError, TerminationMessage
from finetune_trainer.pod import exit_status
from finetune_trainer.prep import __main__
from finetune_trainer.prep.spark import session
from finetune_trainer.prep.spark.session import ENV_JARS
from support import spark_jvm
from support.quick_session import QUICK
from support.waiting import wait_for
from unit.trainer.prep.corpus import DROPPED, STEPS, counted
from unit.trainer.prep.recipes import recipe, table_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from finetune_crds.recipe import Recipe


@pytest.fixture
def pod(jars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Variables of a prep pod whose recipe and termination message are in `tmp_path`, for this process too."""
    variables = {
        ENV_JARS: str(jars),
        "FINETUNE_RECIPE": str(tmp_path / "recipe.yaml"),
        exit_status.ENV_TERMINATION_PATH: str(tmp_path / "termination"),
        "TMPDIR": str(tmp_path),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return variables


def run_command(*options: Path | str) -> tuple[int, TerminationMessage]:
    """Run finetune-prep in this process, without options as the pod does: exit code, termination message."""
    with pytest.MonkeyPatch.context() as patch:
        # It would stay after the test.
        patch.setattr(exit_status, "exit_on_sigterm", lambda: None)
        code = __main__.main([str(option) for option in options])
    message = TerminationMessage.parse(Path(os.environ[exit_status.ENV_TERMINATION_PATH]).read_text())
    assert message
    return code, message


def find_namespace() -> list[str]:
    """Return the command that runs another one where it may mount file systems, as any user where the kernel lets it or as root.

    Return an empty list where nobody may.
    """
    for command in (["unshare", "--user", "--map-root-user", "--mount"], ["unshare", "--mount"]):
        mounts = [*command, "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/mnt"]
        if subprocess.run(mounts, capture_output=True, check=False).returncode == 0:
            return command
    return []


@pytest.fixture(scope="module")
def job_recipe(corpus: Path, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A recipe whose folder has nothing but the table."""
    return recipe(
        source={"type": "Delta", "path": str(corpus / "delta"), "version": 0},
        base=str(tokenizer_folder),
        output=str(tmp_path_factory.mktemp("pod") / "table"),
        spark={"driverMemory": "1Gi", "conf": QUICK},
        **STEPS,
    )


@pytest.fixture(scope="module")
def killed_preparations(
    job_recipe: Recipe, jars: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Any]]:
    """What became of preparations on full disks in a process that was killed when it wrote the table of `job_recipe`."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "recipe.yaml").write_text(job_recipe.to_yaml())
    namespace = find_namespace()
    words = [
        *namespace,
        sys.executable,
        "-m",
        "unit.trainer.prep.faults",
        str(folder),
        f"{folder}/recipe.yaml",
    ]
    words += ["--disks"] if namespace else []
    assert job_recipe.data.prepare
    table = Path(job_recipe.data.prepare.output)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            words,
            env=os.environ | spark_jvm.build_environment() | {ENV_JARS: str(jars), "TMPDIR": str(folder)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            wait_for(
                "a file of the table",
                lambda: process.poll() is not None or any(table.glob("part-*")),
                280,
                pause=0.002,
            )
            assert process.poll() is None, (folder / "log").read_text()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    results = (folder / "results.json").read_text().replace(str(folder), "")
    outcomes: dict[str, list[Any]] = json.loads(results)
    return outcomes


def test_a_disk_that_is_full_is_named_and_prepares_when_it_has_room(
    killed_preparations: dict[str, list[Any]],
) -> None:
    if not killed_preparations:
        pytest.skip("nobody may mount a file system here, not in a namespace either")
    assert killed_preparations == {
        "table is full": [
            1,
            "DiskFull",
            "the disk of data.prepare.output /table/table is full: make room there, or name a folder on a larger volume",
        ],
        "table was full": [],
        "table has room": [0, 40],
        "scratch is full": [
            1,
            "DiskFull",
            "the scratch space /scratch of the preparation is full: mount a larger volume there in the template of spec.pods.prepare, or "
            "raise the pod's limit of ephemeral-storage",
        ],
        "scratch was full": [],
        "scratch has room": [0, 40],
    }


@pytest.fixture
def session_calls(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a command does with its session, which is the one of all tests: the arguments of start, then "stop"."""
    calls: list[Any] = []

    def start(*arguments: Any) -> SparkSession:
        calls.append(arguments)
        return spark

    monkeypatch.setattr(session, "start", start)
    monkeypatch.setattr(spark, "stop", lambda: calls.append("stop"))
    return calls


@pytest.mark.usefixtures("killed_preparations", "pod")
def test_the_command_leaves_a_result_also_after_one_that_was_killed(
    job_recipe: Recipe, session_calls: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job_recipe.data.prepare
    table = Path(job_recipe.data.prepare.output)
    assert any(table.glob("part-*"))
    assert not list(table.glob("_delta_log/*.json"))
    (tmp_path / "here.yaml").write_text(job_recipe.to_yaml())
    options = ("--recipe", tmp_path / "here.yaml", "--report", tmp_path / "report")
    capsys.readouterr()
    code, message = run_command(*options)
    log = capsys.readouterr().out
    assert session_calls == [(job_recipe.data.prepare.spark, None), "stop"]
    assert code == 0
    assert message.prep
    result = message.prep
    assert result.to_json() == {
        **counted(table_of(result)),
        "path": str(table),
        "version": 0,
        "digest": result.digest,
        "sourceVersion": 0,
        "dropped": DROPPED,
        "columns": {"type": "PromptResponse", "prompt": "question", "response": "answer"},
    }
    assert len(DeltaTable(result.path).history()) == 1
    assert job_recipe.data.source
    assert f"source {job_recipe.data.source.path} version 0\n" in log
    assert log[log.index("step ") :].splitlines()[:7] == [
        "step              dropped  remaining",
        "source                           104",
        "notNull                 1        103",
        "minQuality             21         82",
        "dedupe                  1         81",
        "maxTokens               1         80",
        "limit                  10         70",
    ]
    assert f"the report is in {tmp_path / 'report'}\n" in log
    assert {path.name for path in (tmp_path / "report").iterdir()} == {
        "report.html",
        "funnel.png",
        "tokens.png",
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here.yaml", "report", "termination"]
    assert [path.name for path in table.parent.iterdir()] == ["table"]


REFUSED: list[tuple[str, str, str, str]] = [
    ("no recipe", "", "InvalidRecipe", "the recipe {recipe} is invalid at the top: Input should be"),
    (
        "wrong recipe",
        "job: {name: a, namespace: b, uid: c}\nmodel: {base: /m}\ndata: {columns: {type: Text, text: t}, source: {type: XML}}",
        "InvalidRecipe",
        "the recipe {recipe} is invalid at data.source.type: Input should be",
    ),
    (
        "base model that does not exist",
        recipe(base="/nowhere/model").to_yaml(),
        "ModelNotFound",
        "model.base /nowhere/model does not exist in the pod: mount the volume in spec.pods or correct the path",
    ),
]


@pytest.mark.parametrize(
    ("text", "reason", "sentence"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
@pytest.mark.usefixtures("pod")
def test_the_command_refuses_a_wrong_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, reason: str, sentence: str
) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    code, message = run_command()
    log = capsys.readouterr()
    sentence = sentence.replace("{recipe}", str(tmp_path / "recipe.yaml"))
    assert code == EXIT_RECIPE
    assert message.error == PodError(reason=reason, message=message.error.message if message.error else "")
    assert message.error.message.startswith(sentence)
    assert (log.out + log.err).splitlines()[-1] == f"{reason}: {message.error.message}"


def test_the_exit_code_of_the_process_is_that_of_the_command(pod: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("")
    command = [Path(sys.executable).with_name("finetune-prep")]
    assert subprocess.run(command, env=os.environ | pod, check=False, timeout=60).returncode == EXIT_RECIPE
