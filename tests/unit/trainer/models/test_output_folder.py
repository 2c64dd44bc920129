"""The folder of a model is whole or it is not there, whoever writes it and whoever reads it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from botocore.exceptions import NoCredentialsError
from fsspec.implementations.local import LocalFileSystem

from finetune_crds.recipe import JobReference
from finetune_trainer.models import download
from finetune_trainer.models.output_folder import MANIFEST, ModelFolder
from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.storage import filesystems
from support.pod_failures import refusal

if TYPE_CHECKING:
    from pathlib import Path

MINE = JobReference(name="support", namespace="team", uid="0001")
OTHER = JobReference(name="other", namespace="team", uid="0002")
FILES = {"config.json": "{}", "model.safetensors": "weights", "sub/merges.txt": "a b"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        file = tmp_path / "source" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return tmp_path / "source"


def test_a_model_is_written_once(tmp_path: Path, source: Path) -> None:
    uri = str(tmp_path / "models" / "tiny")
    first = ModelFolder(uri, MINE, 1)
    first.claim()
    assert first.is_finished() is False
    first.publish({"": source, "base": source})
    names = {str(path.relative_to(uri)) for path in (tmp_path / "models/tiny").rglob("*") if path.is_file()}
    assert names == {MANIFEST, *FILES, *(f"base/{name}" for name in FILES)}
    assert download.fetch(uri, tmp_path / "to").base == tmp_path / "models" / "tiny"
    # A later attempt of the job finds it there.
    later = ModelFolder(uri, MINE, 2)
    later.claim()
    assert later.is_finished() is True


def test_a_half_written_model_is_no_base(tmp_path: Path, source: Path) -> None:
    folder = tmp_path / "tiny"
    ModelFolder(str(folder), MINE, 1).claim()
    (folder / "config.json").write_text("{}")
    wrong = f"model.base {folder} is incomplete ({{}}): start this job after that job has succeeded"
    with pytest.raises(RecipeRefusedError) as refused:
        download.fetch(str(folder), tmp_path / "to")
    assert refused.value.message == wrong.format("FineTuneJob team/support has not finished writing it")
    # The next attempt goes on, and a file that is lost later is told of.
    again = ModelFolder(str(folder), MINE, 2)
    again.claim()
    again.publish({"": source})
    (folder / "model.safetensors").write_text("half")
    with pytest.raises(RecipeRefusedError) as refused:
        download.fetch(str(folder), tmp_path / "to")
    assert refused.value.message == wrong.format("file model.safetensors is missing or has the wrong size")


def test_the_configuration_comes_after_the_weights(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    put = LocalFileSystem.put_file

    def noted(self: LocalFileSystem, path: str, target: str, **options: object) -> None:
        written.append(path.removeprefix(f"{source}/"))
        put(self, path, target, **options)

    monkeypatch.setattr(LocalFileSystem, "put_file", noted)
    folder = ModelFolder(str(tmp_path / "tiny"), MINE, 1)
    folder.claim()
    folder.publish({"": source})
    assert written == ["model.safetensors", "sub/merges.txt", "config.json"]


SHARDED = {
    "config.json": "{}",
    "base/config.json": "{}",
    "model.safetensors.index.json": "{}",
    **{f"model-{number}.safetensors": "one" for number in (1, 2, 3)},
}
WHOLE = {"config.json": "{...}", "model.safetensors": "two"}


def written(folder: Path, contents: dict[str, str]) -> Path:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def read_texts(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def kill_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pod is killed when it has written so many files."""
    put, done = LocalFileSystem.put_file, iter(range(count))

    def counted(self: LocalFileSystem, path: str, target: str, **options: object) -> None:
        if next(done, None) is None:
            raise KeyboardInterrupt
        put(self, path, target, **options)

    monkeypatch.setattr(LocalFileSystem, "put_file", counted)


def test_a_model_that_is_written_again_has_nothing_of_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, first, again = tmp_path / "tiny", tmp_path / "first", tmp_path / "again"
    earlier = ModelFolder(str(folder), MINE, 1)
    earlier.claim()
    earlier.publish({"": written(first, SHARDED)})
    # Of nobody that writes models.
    (folder / "NOTES.md").write_text("ours")
    (folder / "other").mkdir()
    (folder / "other" / "config.json").write_text("theirs")
    foreign = {"NOTES.md": "ours", "other/config.json": "theirs"}
    later = ModelFolder(str(folder), MINE, 2)
    later.claim()
    written(again, {**SHARDED, "model-1.safetensors": "two"})
    with monkeypatch.context() as killed:
        kill_after(1, killed)
        with pytest.raises(KeyboardInterrupt):
            later.publish({"": again})
    # Half a model has no configuration.
    half = {name: text for name, text in SHARDED.items() if not name.endswith("config.json")}
    assert read_texts(folder) == {**half, "model-1.safetensors": "two", **foreign}
    last = ModelFolder(str(folder), MINE, 3)
    last.claim()
    last.publish({"": written(tmp_path / "last", WHOLE)})
    assert read_texts(folder) == {**WHOLE, **foreign}
    assert json.loads((folder / MANIFEST).read_text()) == {
        "job": "team/support",
        "uid": "0001",
        "attempt": 3,
        "files": {"config.json": 5, "model.safetensors": 3},
        "begun": [],
    }


def test_a_folder_that_is_taken_over_keeps_nothing_of_the_deleted_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tiny"
    deleted = ModelFolder(str(folder), MINE, 1)
    deleted.claim()
    with monkeypatch.context() as killed:
        kill_after(3, killed)
        with pytest.raises(KeyboardInterrupt):
            deleted.publish({"": written(tmp_path / "first", SHARDED)})
    assert len(read_texts(folder)) == 3
    job = JobReference(name=MINE.name, namespace=MINE.namespace, uid="0003")
    # An attempt that ends before it writes forgets nothing.
    for attempt in (1, 2):
        successor = ModelFolder(str(folder), job, attempt)
        successor.claim()
    successor.publish({"": written(tmp_path / "again", WHOLE)})
    assert read_texts(folder) == WHOLE


TAKEN = "output.uri {} {}: choose another folder, or empty it"


def test_folders_of_others(tmp_path: Path, source: Path) -> None:
    own_folder, foreign, people, broken = (
        str(tmp_path / name) for name in ("own", "foreign", "people", "broken")
    )
    ModelFolder(foreign, OTHER, 1).claim()
    for folder, name in ((people, "a.txt"), (broken, MANIFEST)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text("[]")
    ModelFolder(own_folder, MINE, 2).claim()
    refusals = {
        folder: refusal(ModelFolder(folder, MINE, 1).claim)
        for folder in (foreign, people, broken, own_folder)
    }
    assert refusals == {
        foreign: (
            64,
            "OutputTaken",
            TAKEN.format(foreign, "contains files that FineTuneJob team/other started to write"),
        ),
        people: (64, "OutputTaken", TAKEN.format(people, "contains files that no FineTuneJob wrote")),
        broken: (64, "OutputTaken", TAKEN.format(broken, f"contains a {MANIFEST} that no FineTuneJob wrote")),
        own_folder: (
            75,
            "Superseded",
            f"attempt 2 of the job writes output.uri {own_folder}: this attempt does not publish the model",
        ),
    }


def test_a_job_that_was_deleted_and_applied_again(tmp_path: Path, source: Path) -> None:
    uri = str(tmp_path / "tiny")
    again = JobReference(name=MINE.name, namespace=MINE.namespace, uid="0003")
    deleted = ModelFolder(uri, MINE, 2)
    deleted.claim()
    first = ModelFolder(uri, again, 1)
    first.claim()
    # A pod of the deleted job that still runs publishes nothing.
    begun = TAKEN.format(uri, "contains files that FineTuneJob team/support started to write")
    assert refusal(lambda: deleted.publish({"": source})) == (64, "OutputTaken", begun)
    first.publish({"": source})
    refused_text = TAKEN.format(uri, "is the model of an earlier FineTuneJob team/support")
    assert refusal(deleted.claim) == (64, "OutputTaken", refused_text)


def test_an_attempt_that_was_overtaken_publishes_nothing(tmp_path: Path, source: Path) -> None:
    uri = str(tmp_path / "tiny")
    first = ModelFolder(uri, MINE, 1)
    first.claim()
    ModelFolder(uri, MINE, 2).claim()
    assert refusal(lambda: first.publish({"": source}))[1] == "Superseded"
    assert [path.name for path in (tmp_path / "tiny").iterdir()] == [MANIFEST]
    assert json.loads((tmp_path / "tiny" / MANIFEST).read_text())["attempt"] == 2


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PermissionError("no access"), "OutputForbidden"),
        (NoCredentialsError(), "OutputForbidden"),
        (FileNotFoundError("lake"), "OutputNotFound"),
        (OSError("no space"), "OutputUnwritable"),
    ],
    ids=repr,
)
def test_a_trained_model_whose_place_is_refused_is_tried_again(
    error: Exception, reason: str, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise error

    folder = ModelFolder(str(tmp_path / "tiny"), MINE, 1)
    folder.claim()
    monkeypatch.setattr(LocalFileSystem, "put_file", refused)
    assert refusal(lambda: folder.publish({"": source}))[:2] == (1, reason)


@pytest.mark.parametrize(("name", "content"), [(MANIFEST, ""), (f"{MANIFEST}.0f3a.tmp", "{")])
def test_a_manifest_that_was_not_written_to_its_end_is_written_again(
    name: str, content: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    ModelFolder(str(tmp_path), MINE, 2).claim()
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    assert (manifest["attempt"], manifest["files"]) == (2, None)


def test_of_two_jobs_that_find_a_folder_empty_one_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, make = str(tmp_path / "tiny"), filesystems.make_folder

    def make_slowly(files: object, path: str) -> None:
        monkeypatch.setattr(filesystems, "make_folder", make)
        ModelFolder(uri, OTHER, 1).claim()

    monkeypatch.setattr(filesystems, "make_folder", make_slowly)
    begun = TAKEN.format(uri, "contains files that FineTuneJob team/other started to write")
    assert refusal(ModelFolder(uri, MINE, 1).claim) == (64, "OutputTaken", begun)
