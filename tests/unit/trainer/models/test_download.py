"""Models by their URI."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import fsspec
import mlflow
import pytest
import yaml

from finetune_trainer.models import base_reference
from finetune_trainer.models.base_reference import Origin
from finetune_trainer.models.download import Source, fetch, fetch_config, fetch_tokenizer
from finetune_trainer.pod.exit_status import RecipeRefusedError, TrainingError
from support.mlflow_server import migrated_database

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Register = Callable[..., str]

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
BASE = "s3://bucket/models/base"


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An object store in memory whose bucket `bucket` has the model in `models/base`."""
    store = fsspec.filesystem("memory")
    store.pipe({f"/bucket/models/base/{name}": content for name, content in FILES.items()})
    monkeypatch.setattr(fsspec, "url_to_fs", lambda uri, **_: (store, uri.removeprefix("s3:/")))
    yield
    store.rm("/bucket", recursive=True)


@pytest.fixture
def register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Register:
    """Registers files and what MLflow's transformers flavor says of them, and returns the version's URI."""
    uri = f"sqlite:///{shutil.copyfile(migrated_database(), tmp_path / 'mlflow.db')}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    client = mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)

    def register_model(name: str, files: dict[str, bytes], **flavor: str) -> str:
        mlmodel = yaml.safe_dump({"flavors": {"transformers": flavor}}).encode()
        save({"MLmodel": mlmodel, **files}, tmp_path / name)
        client.create_registered_model(name)
        client.create_model_version(name, source=(tmp_path / name).as_uri())
        client.set_registered_model_alias(name, "champion", "1")
        return f"models:/{name}@champion"

    return register_model


def save(files: dict[str, bytes], folder: Path) -> Path:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return folder


def under(folder: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{folder}/{name}": content for name, content in files.items()}


def adapter(base: str | None, **config: str) -> dict[str, bytes]:
    stored = {"peft_type": "LORA", "base_model_name_or_path": base, **config}
    return {"adapter_config.json": json.dumps(stored).encode(), "adapter_model.safetensors": b"adapter"}


def test_folder_of_a_volume_is_used_where_it_is(tmp_path: Path) -> None:
    expected = Source(tmp_path, tmp_path, origin=Origin(str(tmp_path)))
    assert fetch(str(tmp_path), tmp_path / "to") == expected
    assert not (tmp_path / "to").exists()


@pytest.mark.usefixtures("bucket")
def test_object_store(tmp_path: Path) -> None:
    complete = fetch("s3://bucket/models/base", tmp_path / "whole").base
    tokenizer = fetch_tokenizer("s3://bucket/models/base/", tmp_path / "tokenizer")
    assert (names(complete), names(tokenizer)) == (sorted(FILES), TOKENIZER)
    assert (complete / "model-00001.safetensors").read_bytes() == b"weights"


def test_registered_model(tmp_path: Path, register: Register) -> None:
    register("base", under("model", FILES), model_binary="model")
    complete = fetch("models:/base@champion", tmp_path / "whole")
    tokenizer = fetch_tokenizer("models:/base/1", tmp_path / "tokenizer")
    assert (complete.adapter, names(complete.base), names(tokenizer)) == (None, sorted(FILES), TOKENIZER)


# What the folders of an MLflow model are, by what its flavor says; all of them have a tokenizer of their own.
LOGGED: dict[str, tuple[dict[str, bytes], dict[str, str], dict[str, str | None]]] = {
    "a model": (
        under("model", FILES),
        {"model_binary": "model"},
        {"base": "model", "adapter": None, "adapter_of": None, "origin": "models:/logged/1/model"},
    ),
    "a merged adapter": (
        {**under("model", FILES), **under("peft", adapter("s3://bucket/models/base"))},
        {"model_binary": "model", "source_model_name": "s3://bucket/models/base"},
        {"base": "model", "adapter": None, "adapter_of": None, "origin": "models:/logged/1/model"},
    ),
    "an adapter with a copy of its base": (
        {**under("model", FILES), **under("peft", adapter("s3://bucket/models/base"))},
        {"model_binary": "model", "peft_adaptor": "peft", "source_model_name": "s3://bucket/models/base"},
        {
            "base": "model",
            "adapter": "peft",
            "adapter_of": "s3://bucket/models/base",
            "origin": "models:/logged/1/model",
        },
    ),
    "an adapter of an object store's base": (
        under("peft", adapter("elsewhere")),
        {"peft_adaptor": "peft", "source_model_name": "s3://bucket/models/base"},
        {
            "base": "base-of-adapter",
            "adapter": "peft",
            "adapter_of": "s3://bucket/models/base",
            "origin": "s3://bucket/models/base",
        },
    ),
}


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize("kind", LOGGED)
def test_the_parts_of_a_registered_model(kind: str, tmp_path: Path, register: Register) -> None:
    files, flavor, expected = LOGGED[kind]
    uri = register("logged", {**files, "components/tokenizer/tokenizer.json": b"{}"}, **flavor)
    to = tmp_path / "to"
    source = fetch(uri, to)
    assert source.origin is not None
    relative: dict[str, Any] = {
        name: str(value.relative_to(to)) if hasattr(value, "relative_to") else value
        for name, value in (vars(source) | {"origin": source.origin.uri}).items()
    }
    assert relative == {**expected, "tokenizer": "components/tokenizer"}
    # The base is found where it says.
    again = fetch(source.origin.uri, tmp_path / "again")
    assert (again.adapter, again.origin) == (None, source.origin)
    assert base_reference.compute_digest(again.base) == base_reference.compute_digest(source.base)
    assert (source.base / "model-00001.safetensors").read_bytes() == b"weights"
    tokenizer = fetch_tokenizer(uri, tmp_path / "tokenizer")
    assert tokenizer == tmp_path / "tokenizer/components/tokenizer"
    assert not list((tmp_path / "tokenizer").rglob("*.safetensors"))


@pytest.mark.usefixtures("bucket")
def test_an_adapter_in_a_folder_brings_its_base_and_keeps_its_tokenizer(tmp_path: Path) -> None:
    bare = save(adapter("s3://bucket/models/base"), tmp_path / "bare")
    adapter_folder = save({**adapter("s3://bucket/models/base"), "tokenizer.json": b"own"}, tmp_path / "own")
    base = tmp_path / "to/base-of-adapter"
    assert fetch(str(bare), tmp_path / "to") == Source(base, base, bare, BASE, Origin(BASE))
    assert names(base) == sorted(FILES)
    assert fetch(str(adapter_folder), tmp_path / "to") == Source(
        base, adapter_folder, adapter_folder, BASE, Origin(BASE)
    )
    assert names(fetch_tokenizer(str(bare), tmp_path / "tokenizer")) == TOKENIZER
    assert fetch_tokenizer(str(adapter_folder), tmp_path / "unused") == adapter_folder
    assert not (tmp_path / "unused").exists()


def test_an_adapter_without_a_way_to_its_base_is_refused(tmp_path: Path) -> None:
    def sentence(base: str | None) -> str:
        folder = save(adapter(base), tmp_path / "adapter")
        with pytest.raises(RecipeRefusedError) as refused:
            fetch(str(folder), tmp_path / "to", field="objective.distillation.teacher")
        return refused.value.message.replace(str(tmp_path), "")

    assert sentence(None) == (
        "objective.distillation.teacher /adapter is an adapter without a base: set base_model_name_or_path in its "
        "adapter_config.json"
    )
    assert sentence("/nowhere") == (
        "objective.distillation.teacher /adapter, an adapter of /nowhere, does not exist in the pod: mount the volume "
        "in spec.pods or correct the path"
    )
    assert sentence(str(save(adapter("/models/base"), tmp_path / "first"))) == (
        "objective.distillation.teacher /adapter is an adapter of /first, which is itself an adapter: merge /first "
        "into its base first"
    )


def noting(of: Origin, folder: Path) -> str:
    """An adapter in a folder that names its base by a note, and another one in its configuration."""
    save(adapter("elsewhere"), folder)
    base_reference.write_reference(of, folder)
    return str(folder)


NAMED = {
    "an object store's": (BASE, "base-of-adapter"),
    "a version's": ("models:/plain/1/model", "base-of-adapter/model"),
}


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize(("uri", "folder"), NAMED.values(), ids=NAMED)
def test_the_base_that_an_adapter_names_is_the_one_that_it_was_trained_on(
    uri: str, folder: str, tmp_path: Path, register: Register
) -> None:
    register("plain", under("model", FILES), model_binary="model")
    of = Origin(uri, digest=base_reference.compute_digest(save(FILES, tmp_path / "base")))
    adapter_uri = noting(of, tmp_path / "adapter")
    source = fetch(adapter_uri, tmp_path / "to")
    assert source == Source(tmp_path / "to" / folder, source.base, tmp_path / "adapter", uri, of)
    # Where the weights are not needed, they are neither fetched nor compared.
    config = fetch_config(adapter_uri, tmp_path / "config")
    assert names(config) == TOKENIZER


GONE = {
    "s3://bucket/nothing": "no longer exists: restore the base, or start from another model",
    "models:/nothing/1/model": "no longer exists: restore the base, or start from another model",
    "models:/plain/1/nothing": "no longer exists: restore the base, or start from another model",
    BASE: "has changed: its digest is DIGEST, but the adapter was trained on sha256:0: "
    "restore the files that the adapter was trained on, or start from another model",
}


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize(("uri", "sentence"), GONE.items(), ids=GONE)
def test_a_base_that_is_gone_or_another_one_is_refused(
    uri: str, sentence: str, tmp_path: Path, register: Register
) -> None:
    register("plain", under("model", FILES), model_binary="model")
    adapter_uri = noting(Origin(uri, digest="sha256:0"), tmp_path / "adapter")
    for field in ("model.base", "objective.distillation.teacher"):
        with pytest.raises(RecipeRefusedError) as refused:
            fetch(adapter_uri, tmp_path / "to", field=field)
        expected = f"{field} {adapter_uri} is an adapter of {uri}, which {sentence}"
        assert refused.value.message == expected.replace(
            "DIGEST", base_reference.compute_digest(save(FILES, tmp_path / "base"))
        )
        assert refused.value.reason == ("BaseChanged" if uri == BASE else "ModelNotFound")


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the Hub's client, in the layout that it downloads to, and no way out: holds org/base and an adapter."""
    cache = tmp_path / "hub"
    for name, files in {"base": FILES, "adapter": adapter("org/base", revision="main")}.items():
        repository = cache / f"models--org--{name}"
        for file, content in files.items():
            # Contents lie by their hash; snapshots link to them.
            blob = repository / "blobs" / content.hex()[:40]
            link = repository / "snapshots" / COMMIT / file
            for path in (blob, link):
                path.parent.mkdir(parents=True, exist_ok=True)
            blob.write_bytes(content)
            link.symlink_to(blob)
        (repository / "refs").mkdir()
        (repository / "refs/main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return cache


def test_hub(tmp_path: Path, hub: Path) -> None:
    base = hub / "models--org--base/snapshots" / COMMIT
    adapted = hub / "models--org--adapter/snapshots" / COMMIT
    to = tmp_path / "to"
    at = Origin("org/base", COMMIT)
    assert fetch("org/base", to) == Source(base, base, origin=at)
    assert fetch("org/base", to, revision=COMMIT) == Source(base, base, origin=at)
    assert fetch("org/adapter", to) == Source(base, base, adapted, "org/base", at)
    assert fetch_tokenizer("org/base", to) == base
    assert not to.exists()
    with pytest.raises(TrainingError) as failed:
        fetch("org/absent", to)
    assert (failed.value.reason, failed.value.message) == (
        "HubUnreachable",
        "model.base org/absent is not in the cache and the Hub does not respond: allow the pod to reach the Hub, or use a folder "
        "on a volume or in an object store",
    )


MISSING = [
    (
        "/nowhere/model",
        "model.base /nowhere/model does not exist in the pod: mount the volume in spec.pods or correct the path",
    ),
    (
        "s3://bucket/nothing",
        "model.base s3://bucket/nothing does not exist: correct the bucket or the folder",
    ),
    (
        "models:/base@nobody",
        "model.base models:/base@nobody does not exist: name a model and an alias or version in the registry",
    ),
    (
        "models:/nothing/1",
        "model.base models:/nothing/1 does not exist: name a model and an alias or version in the registry",
    ),
    (
        "a/b/c",
        (
            "model.base a/b/c is not a Hub id: write a Hub id (org/name), an absolute path, or an address "
            "with s3://, gs://, abfss:// or models:/"
        ),
    ),
]


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize(("uri", "sentence"), MISSING, ids=[uri for uri, _ in MISSING])
def test_missing(uri: str, sentence: str, tmp_path: Path, register: Register) -> None:
    register("base", under("model", FILES))
    with pytest.raises(RecipeRefusedError) as refused:
        fetch(uri, tmp_path / "to")
    assert (refused.value.reason, refused.value.message) == ("ModelNotFound", sentence)


def test_a_store_without_credentials_is_refused_with_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    with pytest.raises(RecipeRefusedError) as refused:
        fetch(BASE, tmp_path)
    assert (refused.value.reason, str(refused.value)) == (
        "ModelForbidden",
        f"model.base {BASE} requires credentials, but the environment has none: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, in a pod "
        "by envFrom",
    )
