"""Names of files that lead out of their folder: nothing is written, read or deleted there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import mlflow
import pytest
import yaml
from mlflow.entities import FileInfo
from mlflow.store.artifact.models_artifact_repo import ModelsArtifactRepository

from finetune_trainer.models.cache import Cache
from finetune_trainer.models.download import fetch, fetch_tokenizer
from finetune_trainer.models.output_folder import MANIFEST
from finetune_trainer.pod.exit_status import PodFailure
from finetune_trainer.storage.relative_paths import UnsafePathError, check_relative_path, locate_inside
from finetune_trainer.train.model.weights import stored_tensors
from fixtures.fake_hub import Hub, Repository, running
from support.mlflow_server import migrated_database

if TYPE_CHECKING:
    from collections.abc import Callable

# MLflow's own use of SQLAlchemy, and its engine, which it never closes.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning"),
]
FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}
UNSAFE = {
    "../evil.json": "leads out of its folder",
    "sub/../../evil.json": "leads out of its folder",
    "..": "leads out of its folder",
    "/evil.json": "is an absolute path",
    "..\\evil.json": "has a backslash",
    "sub//evil.json": "has an empty part",
    "./evil.json": "has an empty part",
    "sub/": "has an empty part",
    "": "has an empty part",
    "evil\n.json": "has a control character",
}
OUTSIDE = [name for name in UNSAFE if name not in ("", "..", "sub/")]


@pytest.mark.parametrize(("path", "problem"), UNSAFE.items())
def test_a_path_that_may_lead_out_of_its_folder_is_refused(tmp_path: Path, path: str, problem: str) -> None:
    for check in (check_relative_path, lambda path: locate_inside(tmp_path / "folder", path)):
        with pytest.raises(UnsafePathError) as caught:
            check(path)
        assert str(caught.value) == f"{path!r}, which {problem}"
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["a", "a/b.json", "a..b/..c", ".hidden", "a b/ä.json", "step=1/x:y"])
def test_other_paths_stay_as_they_are(tmp_path: Path, path: str) -> None:
    assert check_relative_path(path) == path
    assert locate_inside(tmp_path, path) == tmp_path / path
    assert (tmp_path / path).parent.is_dir()


def test_a_link_leads_nowhere(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    with pytest.raises(UnsafePathError, match="leads out of its folder through a link"):
        locate_inside(folder, "link/sub/evil.json")
    assert not (tmp_path / "sub").exists()


def refusal(call: Callable[[], object]) -> PodFailure:
    with pytest.raises(PodFailure) as caught:
        call()
    assert (caught.value.exit_code, caught.value.reason) == (64, "ModelUnsafe")
    return caught.value


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, bytes]], None]]:
    """Writes objects into the folder models/base of a store in memory that takes any key, as S3 does."""
    store = fsspec.filesystem("memory")

    def write(files: dict[str, bytes]) -> None:
        for name, content in files.items():
            # NB: `pipe` would normalize the path.
            store.store[f"/bucket/models/base/{name}"] = file = store.open("/scratch", "wb")
            file.write(content)
            file.commit()

    monkeypatch.setattr(fsspec, "url_to_fs", lambda uri, **_: (store, uri.removeprefix("s3:/")))
    yield write
    store.store.clear()


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("cached", [True, False])
def test_an_object_store(
    tmp_path: Path, bucket: Callable[[dict[str, bytes]], None], name: str, cached: bool
) -> None:
    bucket({**FILES, name: b"evil"})
    cache = Cache(tmp_path / "cache", "models") if cached else None
    error = refusal(lambda: fetch("s3://bucket/models/base", tmp_path / "to" / "model", cache=cache))
    assert error.message == (
        f"model.base s3://bucket/models/base has a file {name!r}, which {UNSAFE[name]}: find out who wrote the file, and delete it"
    )
    assert not list(tmp_path.rglob("*evil*"))


def test_a_file_that_the_manifest_does_not_name_is_not_part_of_the_model(
    tmp_path: Path, bucket: Callable[[dict[str, bytes]], None]
) -> None:
    sizes = {name: len(content) for name, content in FILES.items()}
    manifest = {"job": "a/b", "uid": "1", "attempt": 1, "files": sizes}
    bucket({**FILES, "../evil.json": b"evil", MANIFEST: json.dumps(manifest).encode()})
    assert fetch("s3://bucket/models/base", tmp_path / "to" / "model").base.is_dir()
    assert not list(tmp_path.rglob("*evil*"))
    bucket({MANIFEST: json.dumps({**manifest, "files": {**sizes, "../evil.json": 4}}).encode()})
    refusal(lambda: fetch("s3://bucket/models/base", tmp_path / "again" / "model"))
    assert not list(tmp_path.rglob("*evil*"))


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"sqlite:///{shutil.copyfile(migrated_database(), tmp_path / 'mlflow.db')}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    artifacts = tmp_path / "artifacts"
    artifacts.mkdir()
    (artifacts / "MLmodel").write_text(yaml.safe_dump({"flavors": {}}))
    (tmp_path / "evil.json").write_text("evil")
    client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
    client.create_registered_model("base")
    client.create_model_version("base", source=artifacts.as_uri())
    monkeypatch.setattr(
        ModelsArtifactRepository,
        "list_artifacts",
        lambda *_: [FileInfo("../evil.json", is_dir=False, file_size=4)],
    )
    error = refusal(lambda: fetch("models:/base/1", tmp_path / "to" / "model"))
    assert error.message.startswith(
        "model.base models:/base/1 has a file '../evil.json', which leads out of its folder"
    )
    assert not list((tmp_path / "to").rglob("*evil*"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub, whose client has an empty cache."""
    with running(monkeypatch, tmp_path / "hub", {}) as fake_hub:
        yield fake_hub


@pytest.mark.parametrize("name", ["../../../../evil.json", "/evil.json", "..\\evil.json"])
def test_the_hub(tmp_path: Path, hub: Hub, name: str) -> None:
    hub.models["org/base"] = Repository({**FILES, name: b"evil"})
    error = refusal(lambda: fetch("org/base", tmp_path / "to", cache=Cache(tmp_path / "cache", "models")))
    assert error.message.startswith(
        "model.base org/base has a file whose name leads out of its folder, which the Hub's client refuses (Invalid filename "
    )
    assert name in error.message
    assert not [path for path in tmp_path.rglob("*evil*") if "snapshots" not in path.parts]


def test_a_listing_of_the_hub_deletes_nothing(tmp_path: Path, hub: Hub) -> None:
    """The client does not download what is not asked for, and its listing names the file all the same."""
    victim = tmp_path / "cache" / "models" / "victim.safetensors"
    victim.parent.mkdir(parents=True)
    victim.write_bytes(b"of another model")
    path = "../../../../models/victim.safetensors"
    hub.models["org/base"] = Repository({**FILES, path: b"evil"})
    fetch_tokenizer("org/base", tmp_path / "to", cache=Cache(tmp_path / "cache", "models"))
    assert victim.read_bytes() == b"of another model"


def test_an_index_of_weights(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "../other/model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(PodFailure) as caught:
        stored_tensors.open_tensors(tmp_path)
    assert (caught.value.exit_code, caught.value.reason) == (64, "ModelUnsafe")
    assert (
        "model.safetensors.index.json names '../other/model.safetensors', which leads out of its folder"
        in caught.value.message
    )


@pytest.mark.parametrize(
    "index",
    [
        [],
        {},
        {"weight_map": ["model.safetensors"]},
        {"weight_map": {"a": None}},
        {"weight_map": {"a": 1, "b": "x"}},
        {"weight_map": {"a": ["x"]}},
    ],
)
def test_an_index_of_weights_without_names(tmp_path: Path, index: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    error = refusal(lambda: stored_tensors.open_tensors(tmp_path))
    assert "model.safetensors.index.json does not name a file for each weight" in error.message
