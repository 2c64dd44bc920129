"""Models that an earlier attempt has downloaded: what the second one asks for."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
import yaml
from mlflow.store.artifact.models_artifact_repo import ModelsArtifactRepository

from finetune_crds import contract
from finetune_crds.training import Model
from finetune_trainer.models.cache import Cache
from finetune_trainer.models.download import fetch, fetch_config, fetch_tokenizer
from finetune_trainer.pod.exit_status import TrainingError
from finetune_trainer.train.model.memory import model_size
from finetune_trainer.train.model.weights import merge
from support.http_server import Answer, Request, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from finetune_trainer.train.runtime.distributed import World
    from support.training import Mlflow

# MLflow's own use of SQLAlchemy, and its engine, which it never closes.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning"),
]
FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}
BASE = "s3://bucket/models/base"


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", "models")


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """The requests to an object store in memory, which has the model in `models/base` of the bucket `bucket`."""
    store, requests = fsspec.filesystem("memory"), Counter[str]()
    store.pipe({f"/bucket/models/base/{name}": content for name, content in FILES.items()})

    def counting(name: str) -> Callable[..., Any]:
        method = getattr(store, name)

        def counted(path: str, *args: Any, **options: Any) -> Any:
            requests[f"{name} {path}"] += 1
            return method(path, *args, **options)

        return counted

    monkeypatch.setattr(fsspec, "url_to_fs", lambda uri, **_: (store, uri.removeprefix("s3:/")))
    for name in ("find", "open"):
        monkeypatch.setattr(store, name, counting(name))
    yield requests
    store.rm("/bucket", recursive=True)


LIST = {"find /bucket/models/base": 1}


def test_a_second_attempt_lists_the_object_store_and_reads_nothing(
    tmp_path: Path, cache: Cache, requests: Counter[str]
) -> None:
    first = fetch(BASE, tmp_path / "first", cache=cache)
    assert requests == LIST | {f"open /bucket/models/base/{name}": 1 for name in FILES}
    requests.clear()
    again = fetch(BASE, tmp_path / "again", cache=cache)
    assert (again, dict(requests)) == (first, LIST)
    # What a pod needs beside the weights is in the same entry.
    requests.clear()
    config, tokenizer = (get(BASE, tmp_path / "to", cache=cache) for get in (fetch_config, fetch_tokenizer))
    assert (config, tokenizer, dict(requests)) == (first.base, first.base, {"find /bucket/models/base": 2})
    assert not any((tmp_path / name).exists() for name in ("first", "again", "to"))


@pytest.mark.usefixtures("requests")
def test_a_model_without_its_weights_is_an_entry_of_its_own(tmp_path: Path, cache: Cache) -> None:
    config = fetch_config(BASE, tmp_path, cache=cache)
    assert sorted(path.name for path in config.iterdir()) == ["config.json", "tokenizer.json"]
    assert fetch_tokenizer(BASE, tmp_path, cache=cache) == config
    assert (fetch(BASE, tmp_path, cache=cache).base / "model.safetensors").read_bytes() == b"weights"


def test_training_keeps_what_it_downloads_on_the_claim_of_its_recipe(
    tmp_path: Path,
    base_model: Path,
    world: World,
    requests: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contract, "MODEL_CACHE_PATH", str(tmp_path / "cache"))
    files = {f"/bucket/models/base/{file.name}": file.read_bytes() for file in base_model.iterdir()}
    fsspec.filesystem("memory").pipe(files)
    model = Model.model_validate({"base": BASE, "cache": {"claimName": "models"}})
    fetched = merge.fetch(model, tmp_path / "to", world)
    requests.clear()
    assert merge.fetch(model, tmp_path / "to", world) == fetched
    assert model_size.count_parameters(model, tmp_path / "to") > 0
    # A list for the config before the weights, one for the weights, and one for the size.
    assert (fetched.base.is_relative_to(tmp_path / "cache"), sum(requests.values())) == (True, 3)


def test_a_model_that_was_written_anew_is_downloaded_anew(
    tmp_path: Path, cache: Cache, requests: Counter[str]
) -> None:
    first = fetch(BASE, tmp_path, cache=cache).base
    fsspec.filesystem("memory").pipe("/bucket/models/base/model.safetensors", b"WEIGHTS")
    requests.clear()
    second = fetch(BASE, tmp_path, cache=cache).base
    assert (second != first, requests["open /bucket/models/base/model.safetensors"]) == (True, 1)
    assert (second / "model.safetensors").read_bytes() == b"WEIGHTS"


def test_a_broken_entry_is_downloaded_again(tmp_path: Path, cache: Cache, requests: Counter[str]) -> None:
    first = fetch(BASE, tmp_path, cache=cache).base
    (first / "model.safetensors").write_bytes(b"weig")
    assert (fetch(BASE, tmp_path, cache=cache).base / "model.safetensors").read_bytes() == b"weights"
    assert requests["open /bucket/models/base/model.safetensors"] == 2


def test_an_object_that_changes_while_it_is_read_makes_no_entry(
    tmp_path: Path, cache: Cache, requests: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(_: fsspec.AbstractFileSystem, _name: str, target: str) -> None:
        Path(target).write_bytes(b"half")

    monkeypatch.setattr("fsspec.AbstractFileSystem.get_file", half)
    with pytest.raises(TrainingError) as failed:
        fetch(BASE, tmp_path, cache=cache)
    assert failed.value.message == (
        f"/bucket/models/base/config.json of model.base {BASE} changed while it was downloaded"
    )
    assert list((cache.root / "models").iterdir()) == []


def test_a_second_attempt_downloads_nothing_from_the_registry(
    tmp_path: Path, cache: Cache, mlflow: Mlflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow.uri)
    client = mlflow.client()
    client.create_registered_model("base")

    def version(weights: bytes) -> None:
        folder = tmp_path / weights.decode()
        folder.mkdir()
        flavors = {"flavors": {"transformers": {"model_binary": "model"}}}
        (folder / "MLmodel").write_text(yaml.safe_dump(flavors))
        (folder / "model").mkdir()
        for name, content in (FILES | {"model.safetensors": weights}).items():
            (folder / "model" / name).write_bytes(content)
        model_version = client.create_model_version("base", source=folder.as_uri())
        client.set_registered_model_alias("base", "champion", model_version.version)

    downloaded: list[str] = []
    download = ModelsArtifactRepository.download_artifacts

    def noted(self: Any, path: str, *args: Any, **options: Any) -> Any:
        downloaded.append(path)
        return download(self, path, *args, **options)

    monkeypatch.setattr(ModelsArtifactRepository, "download_artifacts", noted)
    version(b"one")
    first = fetch("models:/base@champion", tmp_path, cache=cache)
    assert len(downloaded) == 4
    assert fetch("models:/base/1", tmp_path, cache=cache) == first
    assert fetch_tokenizer("models:/base@champion", tmp_path, cache=cache) == first.base
    assert len(downloaded) == 4
    # The alias goes on to another version.
    version(b"two")
    second = fetch("models:/base@champion", tmp_path, cache=cache)
    assert [(source.base / "model.safetensors").read_bytes() for source in (first, second)] == [
        b"one",
        b"two",
    ]


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A stand-in for the Hugging Face Hub, with the model org/base; counts the requests by what they are for."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.away = False

    def __call__(self, request: Request) -> Answer:
        path = request.target.partition("?")[0]
        if self.away:
            return Answer(503)
        if path == "/api/models/org/base/revision/main":
            self.requests["revision"] += 1
            return Answer(200, {"id": "org/base", "sha": COMMIT, "siblings": []})
        if path == f"/api/models/org/base/tree/{COMMIT}":
            self.requests["tree"] += 1
            return Answer(200, [entry(name, content) for name, content in FILES.items()])
        name = path.removeprefix(f"/org/base/resolve/{COMMIT}/")
        self.requests[f"{request.method} {name}"] += 1
        headers = {"ETag": f'"{etag(FILES[name])}"', "X-Repo-Commit": COMMIT}
        return Answer(200, FILES[name], headers)


def etag(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def entry(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(content), "oid": etag(content)}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    fake_hub = Hub()
    with serving(fake_hub) as address:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        files = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
        yield fake_hub


def test_a_second_attempt_asks_the_hub_for_the_commit_alone(tmp_path: Path, cache: Cache, hub: Hub) -> None:
    first = fetch("org/base", tmp_path, cache=cache)
    assert first.base == cache.root / "hub/models--org--base/snapshots" / COMMIT
    assert {path.name: path.read_bytes() for path in first.base.iterdir()} == FILES
    hub.requests.clear()
    assert fetch("org/base", tmp_path, cache=cache) == first
    assert dict(hub.requests) == {"revision": 1}
    # Without the Hub, a whole model is used, and a part of one is not.
    hub.away = True
    assert fetch("org/base", tmp_path, cache=cache) == first
    (first.base / "model.safetensors").unlink()
    with pytest.raises(TrainingError) as failed:
        fetch("org/base", tmp_path, cache=cache)
    assert failed.value.reason == "HubUnreachable"


def test_a_file_of_the_hub_that_was_cut_is_downloaded_again(tmp_path: Path, cache: Cache, hub: Hub) -> None:
    first = fetch("org/base", tmp_path, cache=cache)
    (first.base / "model.safetensors").resolve().write_bytes(b"weig")
    hub.requests.clear()
    assert fetch("org/base", tmp_path, cache=cache) == first
    assert (first.base / "model.safetensors").read_bytes() == b"weights"
    assert {name for name in hub.requests if "config" in name or "tokenizer" in name} == set()
