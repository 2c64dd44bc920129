"""A version is copied from one MLflow to another, both real, on SQLite: once, with its lineage, and never with other files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from finetune_crds import contract
from finetune_trainer.pod import library_variables
from finetune_trainer.registry_copy import __main__ as command
from finetune_trainer.registry_copy import download
from finetune_trainer.registry_copy.source_version import SourceVersion, find_files
from finetune_trainer.train.delivery.register import Registry
from support.training import Mlflow, new_mlflow

FILES = {"MLmodel": b"flavors: {}\n", "model/weights.safetensors": b"w" * 5000}
ADDRESS = "https://mlflow.dev.example"
COPY = ["--to", "support", "--source", ADDRESS, "--digest", "d1"]


@dataclass
class Copy:
    """Two servers, and the folder that the containers of a pod share."""

    source: Mlflow
    destination: Mlflow
    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def enter(self, server: Mlflow) -> None:
        """Set the variables that the operator gives to the container of a server."""
        for name, value in {**server.env, "MLFLOW_REGISTRY_URI": server.uri}.items():
            self.monkeypatch.setenv(name, value)

    def run(self, server: Mlflow, *arguments: str) -> int:
        """Run a container."""
        self.enter(server)
        return command.main([*arguments])

    def copy(self, *arguments: str) -> list[int]:
        """Run both containers, and return their exit codes."""
        first = self.run(self.source, "--from", "models:/dev-support/1")
        return [first, self.run(self.destination, *(arguments or COPY))]

    def error(self) -> str:
        """The error in the termination message."""
        text = (self.folder / "termination").read_text(encoding="utf-8")
        message = contract.TerminationMessage.parse(text)
        assert message
        assert message.error
        return message.error.message

    def read_files(self, into: Path) -> dict[str, bytes]:
        """The files of the first version at the destination, as a reader loads them."""
        from mlflow.artifacts import download_artifacts

        into.mkdir()
        self.enter(self.destination)
        folder = Path(download_artifacts("models:/support/1", dst_path=str(into)))
        return {name: (folder / name).read_bytes() for name in FILES}

    def versions(self) -> list[Any]:
        """The versions at the destination."""
        return list(self.destination.client().search_model_versions("name='support'"))


@pytest.fixture
def copy(tmp_path: Path, mlflow_template: Path, monkeypatch: pytest.MonkeyPatch) -> Copy:
    source, destination = (
        new_mlflow(_folder(tmp_path / name), mlflow_template) for name in ("source", "destination")
    )
    folder = tmp_path / "shared"
    folder.mkdir()
    monkeypatch.setenv(command.ENV_FOLDER, str(folder))
    monkeypatch.setenv("FINETUNE_TERMINATION_PATH", str(folder / "termination"))
    monkeypatch.setenv("FINETUNE_MLFLOW_PATIENCE_SECONDS", "0")
    monkeypatch.setenv(library_variables.HTTP_TIMEOUT, "30")
    copy = Copy(source, destination, folder, monkeypatch)
    copy.enter(copy.source)
    _register(copy.source, tmp_path / "export")
    return copy


def _register(server: Mlflow, export: Path) -> None:
    """A version as the trainer registers it, with an alias and tags of a promotion there."""
    for name, content in FILES.items():
        (export / name).parent.mkdir(parents=True, exist_ok=True)
        (export / name).write_bytes(content)
    client = server.client()
    client.log_metric(server.run_id, "eval_loss", 2.0)
    client.log_metric(server.run_id, "eval_loss", 1.25)
    client.log_metric(server.run_id, "grad_norm", math.nan)
    client.log_param(server.run_id, "lr", "0.1")
    for name, value in {
        "finetune_eval_data": "data-1",
        "finetune.dev/uid": "u1",
        "mlflow.user": "kim",
    }.items():
        client.set_tag(server.run_id, name, value)
    registry = Registry(server.run_id, None, connect=server.client)
    tags = {"eval_loss": "1.25", "finetune_base_version": "7", "promoted_champion_by": "kim"}
    version = registry.register(
        "dev-support", registry.upload(export), export, tags, description="for the help desk"
    )
    client.set_registered_model_alias("dev-support", "champion", version)


def test_a_version_is_copied_with_its_files_and_its_lineage(copy: Copy, tmp_path: Path) -> None:
    assert copy.copy() == [0, 0]
    [version] = copy.versions()
    client = copy.destination.client()
    run = client.get_run(version.run_id)
    digest = SourceVersion.read(copy.folder).compute_digest()
    assert copy.read_files(tmp_path / "read") == FILES
    assert (version.status, version.description, version.aliases) == ("READY", "for the help desk", [])
    assert version.tags == {
        "eval_loss": "1.25",
        "finetune_copy": "d1",
        "finetune_copied_from": ADDRESS,
        "finetune_copied_model": "dev-support",
        "finetune_copied_version": "1",
        "finetune_copied_run": copy.source.run_id,
        "finetune_copied_files": digest,
    }
    assert (run.info.run_id, run.info.status) == (copy.destination.run_id, "FINISHED")
    assert run.data.metrics == pytest.approx({"eval_loss": 1.25, "grad_norm": math.nan}, nan_ok=True)
    assert run.data.params == {"lr": "0.1"}
    assert run.data.tags["finetune_eval_data"] == "data-1"
    assert "finetune.dev/uid" not in run.data.tags


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_a_version_is_copied_once_whichever_run_it_belongs_to(copy: Copy) -> None:
    assert copy.copy() == [0, 0]
    # As after the operator lost its status: another promotion has a run of its own.
    client = copy.destination.client()
    other = client.create_run(client.get_run(copy.destination.run_id).info.experiment_id).info.run_id
    copy.destination = Mlflow(copy.destination.uri, other)
    assert copy.copy() == [0, 0]
    assert [str(version.version) for version in copy.versions()] == ["1"]
    # Another version of the source is another copy.
    assert copy.copy("--to", "support", "--source", ADDRESS, "--digest", "d2") == [0, 0]
    assert sorted(version.tags["finetune_copy"] for version in copy.versions()) == ["d1", "d2"]


@pytest.mark.parametrize("step", ["log_model_artifacts", "log_outputs", "_create_model_version"])
def test_a_copy_that_is_interrupted_leaves_no_version_and_goes_on(
    copy: Copy, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    def interrupt(*_: object, **__: object) -> None:
        raise ConnectionError("the store is away")

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, step, interrupt)
        assert copy.copy() == [0, 1]
    assert copy.versions() == []
    expected = "the version is downloaded, but MLflow was not reachable for 0 s: the store is away"
    assert copy.error() == expected
    assert copy.copy() == [0, 0]
    assert [version.status for version in copy.versions()] == ["READY"]


def test_a_file_that_changes_on_its_way_becomes_no_version(copy: Copy) -> None:
    assert copy.run(copy.source, "--from", "models:/dev-support/1") == 0
    weights = find_files(copy.folder) / "model/weights.safetensors"
    weights.write_bytes(b"x" * 5000)
    assert copy.run(copy.destination, *COPY) == 1
    assert "the file model/weights.safetensors of the copy differs from that of the source" in copy.error()
    assert copy.versions() == []
    # The next pod downloads the files again, and does not take over the damaged upload.
    assert copy.copy() == [0, 0]
    assert copy.read_files(copy.folder / "read") == FILES


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        (
            "models:/dev-support/9",
            "refused the version: Model Version (name=dev-support, version=9) not found",
        ),
        ("models:/empty/1", "spec.source.registry version 1 of empty has no files: name another version"),
    ],
)
def test_a_version_that_cannot_be_copied_is_refused_at_once(
    copy: Copy, tmp_path: Path, uri: str, expected: str
) -> None:
    client = copy.source.client()
    client.create_registered_model("empty")
    client.create_model_version("empty", source=_folder(tmp_path / "empty").as_uri())
    assert copy.run(copy.source, "--from", uri) == contract.EXIT_RECIPE
    assert expected in copy.error()


def test_a_version_whose_run_was_deleted_is_copied_without_its_numbers(copy: Copy) -> None:
    client = copy.source.client()
    client.create_registered_model("orphan")
    export = copy.folder.parent / "export"
    client.create_model_version("orphan", source=export.as_uri(), run_id="f" * 32)
    assert copy.run(copy.source, "--from", "models:/orphan/1") == 0
    record = SourceVersion.read(copy.folder)
    assert (record.metrics, record.run_id, sorted(record.files)) == ({}, "f" * 32, sorted(FILES))


def test_a_file_name_that_leads_out_of_the_folder_is_refused(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "list_mlflow_files", lambda *_: ["../../evil"])
    assert copy.run(copy.source, "--from", "models:/dev-support/1") == contract.EXIT_RECIPE
    assert copy.error().startswith("spec.source.registry models:/dev-support/1 has a file")
