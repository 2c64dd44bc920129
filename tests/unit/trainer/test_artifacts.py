"""Models by their URI."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fsspec
import mlflow
import pytest

from finetune_trainer.artifacts import fetch
from finetune_trainer.outcome import RecipeRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# MLflow's own use of SQLAlchemy, and its engine, which it never closes.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning"),
]
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model-00001.safetensors": b"weights",
    "sub/merges.txt": b"a b",
}
TOKENIZER = sorted(name for name in FILES if "safetensors" not in name)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An object store in memory whose bucket `bucket` has the model in `models/base`."""
    store = fsspec.filesystem("memory")
    store.pipe({f"/bucket/models/base/{name}": content for name, content in FILES.items()})
    monkeypatch.setattr(fsspec, "url_to_fs", lambda uri: (store, uri.removeprefix("s3:/")))
    yield
    store.rm("/bucket", recursive=True)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry whose model `base` has the alias `champion`."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    for name, content in {
        "MLmodel": b"",
        **{f"model/{name}": content for name, content in FILES.items()},
    }.items():
        file = tmp_path / "logged" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)
    client.create_registered_model("base")
    version = client.create_model_version("base", source=(tmp_path / "logged").as_uri())
    client.set_registered_model_alias("base", "champion", version.version)


def test_folder_of_a_volume_is_used_where_it_is(tmp_path: Path) -> None:
    assert fetch(str(tmp_path), tmp_path / "to") == tmp_path
    assert not (tmp_path / "to").exists()


@pytest.mark.usefixtures("bucket")
def test_object_store(tmp_path: Path) -> None:
    whole = fetch("s3://bucket/models/base", tmp_path / "whole")
    tokenizer = fetch("s3://bucket/models/base/", tmp_path / "tokenizer", only_tokenizer=True)
    assert (names(whole), names(tokenizer)) == (sorted(FILES), TOKENIZER)
    assert (whole / "model-00001.safetensors").read_bytes() == b"weights"


@pytest.mark.usefixtures("registry")
def test_registered_model(tmp_path: Path) -> None:
    whole = fetch("models:/base@champion", tmp_path / "whole")
    tokenizer = fetch("models:/base/1", tmp_path / "tokenizer", only_tokenizer=True)
    assert (whole.name, names(whole), names(tokenizer)) == ("model", sorted(FILES), TOKENIZER)


MISSING = [
    (
        "/nowhere/model",
        "model.base /nowhere/model does not exist in the pod: mount the volume in podTemplate or correct the path",
    ),
    (
        "s3://bucket/nothing",
        "model.base s3://bucket/nothing does not exist: correct the bucket or the folder",
    ),
    (
        "models:/base@nobody",
        "model.base models:/base@nobody does not exist: name a model and an alias or version that the registry has",
    ),
    (
        "models:/nothing/1",
        "model.base models:/nothing/1 does not exist: name a model and an alias or version that the registry has",
    ),
    (
        "a/b/c",
        "model.base a/b/c does not exist: write a Hub id (org/name), an absolute path, s3:// or models:/",
    ),
]


@pytest.mark.usefixtures("bucket", "registry")
@pytest.mark.parametrize(("uri", "sentence"), MISSING, ids=[uri for uri, _ in MISSING])
def test_missing(uri: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeRefusedError) as refused:
        fetch(uri, tmp_path / "to")
    assert (refused.value.reason, refused.value.message) == ("ModelNotFound", sentence)
