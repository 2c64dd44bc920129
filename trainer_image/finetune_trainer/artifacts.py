"""Models by their URI: a folder of the pod, an object store, MLflow's registry, or the Hugging Face Hub."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

import yaml

from finetune_trainer.outcome import PodFailure, RecipeRefusedError, TrainingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from mlflow.store.artifact.models_artifact_repo import ModelsArtifactRepository

    from finetune_trainer.cache import Cache

_FIELD = "model.base"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ckpt", ".npz")
# Folders of MLflow's transformers flavor.
_MLFLOW_MODEL, _MLFLOW_TOKENIZER = "model", "components/tokenizer"
_ADAPTER_CONFIG = "adapter_config.json"
# A saved tokenizer has at least one of these files.
_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_BASE_OF_ADAPTER = "base-of-adapter"
_WHOLE = "whole"


@dataclass(frozen=True)
class Source:
    """The folders of a model that was fetched.

    base: config and weights of a standalone model.
    tokenizer: the tokenizer, of the adapter where it has one.
    adapter: peft's adapter to the base, or None.
    adapter_of: how the adapter names its base, or None.
    """

    base: Path
    tokenizer: Path
    adapter: Path | None = None
    adapter_of: str | None = None


@dataclass(frozen=True)
class _Parts:
    """The parts of one artifact; the base of an adapter may be another artifact."""

    base: Path | None
    tokenizer: Path | None
    adapter: Path | None
    adapter_of: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class _Place:
    """Where models are downloaded to: a folder of the pod, or a cache that outlives it."""

    folder: Path
    cache: Cache | None

    def within(self, name: str) -> _Place:
        """The place of a model that belongs to another one."""
        return replace(self, folder=self.folder / name)

    def filled(self, key: Callable[[], Any], part: str, fill: Callable[[Path], None]) -> Path:
        """Return the folder of a model; a cache may have it already.

        Args:
            key: what the content depends on; asked for a cache alone.
            part: `whole`, or which part of the model is wanted.
            fill: downloads it into a folder.
        """
        if self.cache is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            fill(self.folder)
            return self.folder
        known = key()
        return self.cache.find([known, _WHOLE]) or self.cache.get([known, part], fill)


def fetch(
    uri: str, to: Path, *, revision: str | None = None, cache: Cache | None = None, field: str = _FIELD
) -> Source:
    """Fetch a model into the pod, with the base of an adapter, and return its folders.

    Args:
        uri: absolute path (used where it is), s3://bucket/folder, models:/name@alias, or a Hub id.
        to: folder for what is downloaded and not cached.
        revision: Git revision of a Hub model.
        cache: where what is downloaded is kept, and taken from.
        field: the recipe's field that names it, for what is wrong with it.

    Raises:
        RecipeRefusedError: the model does not exist, access is denied, or the base of an adapter cannot be found.
        TrainingError: the Hub does not answer, or the cache is full.
    """
    place = _Place(to, cache)
    with _naming(_FIELD, field):
        found = _fetch(uri, place, revision, without_weights=False)
        base = found if found.base is not None else _base_of(found, uri, place, without_weights=False)
    assert base.base is not None  # noqa: S101 - or it would have been refused
    return Source(base.base, found.tokenizer or base.tokenizer or base.base, found.adapter, found.adapter_of)


def fetch_config(uri: str, to: Path, *, revision: str | None = None, cache: Cache | None = None) -> Path:
    """Bring a model's config into the pod, without its weights, and return the folder that it lies in.

    Args and errors are those of `fetch`. Of an adapter it is the config of its base.
    """
    place = _Place(to, cache)
    found = _fetch(uri, place, revision, without_weights=True)
    if found.base is None:
        found = _base_of(found, uri, place, without_weights=True)
    assert found.base is not None  # noqa: S101 - or it would have been refused
    return found.base


def fetch_tokenizer(uri: str, to: Path, *, revision: str | None = None, cache: Cache | None = None) -> Path:
    """Bring a model's tokenizer into the pod, without its weights, and return the folder that it lies in.

    Args and errors are those of `fetch`.
    """
    place = _Place(to, cache)
    found = _fetch(uri, place, revision, without_weights=True)
    if found.tokenizer is None and found.base is None:
        found = _base_of(found, uri, place, without_weights=True)
    folder = found.tokenizer or found.base
    assert folder is not None  # noqa: S101 - or it would have been refused
    return folder


@contextmanager
def _naming(wrong: str, right: str) -> Iterator[None]:
    """Have failures name what the recipe names."""
    try:
        yield
    except PodFailure as error:
        error.message = error.message.replace(wrong, right, 1)
        raise


def _base_of(adapter: _Parts, uri: str, place: _Place, *, without_weights: bool) -> _Parts:
    """The base of an adapter that another artifact holds."""
    name = adapter.adapter_of
    if not name:
        raise RecipeRefusedError(
            f"model.base {uri} is an adapter that names no base: set base_model_name_or_path in its {_ADAPTER_CONFIG}",
            reason="ModelNotLoadable",
        )
    with _naming(f"{_FIELD} {name}", f"{_FIELD} {uri}, an adapter of {name},"):
        base = _fetch(name, place.within(_BASE_OF_ADAPTER), adapter.revision, without_weights=without_weights)
    if base.adapter is not None:
        raise RecipeRefusedError(
            f"model.base {uri} is an adapter of {name}, which is an adapter itself: merge {name} into its base first",
            reason="ModelNotLoadable",
        )
    return base


def _parts(folder: Path) -> _Parts:
    """The parts of a folder that `save_pretrained` of transformers or peft wrote."""
    tokenizer = folder if any((folder / name).exists() for name in _TOKENIZER_FILES) else None
    config = folder / _ADAPTER_CONFIG
    if not config.exists():
        return _Parts(folder, tokenizer, None)
    stored = json.loads(config.read_text(encoding="utf-8"))
    return _Parts(None, tokenizer, folder, stored.get("base_model_name_or_path"), stored.get("revision"))


def _mlflow_parts(folder: Path) -> _Parts:
    """The parts of a folder that MLflow's transformers flavor wrote; of any other, those of a plain folder."""
    flavor = _transformers_flavor(folder / "MLmodel")
    model, inner = folder / flavor.get("model_binary", _MLFLOW_MODEL), folder / _MLFLOW_TOKENIZER
    base = model if model.is_dir() else None
    tokenizer = inner if inner.is_dir() else None
    # NB: a merged model has its adapter beside it too; the flavor names only one that is still to be merged.
    if "peft_adaptor" not in flavor:
        plain = _parts(base or folder)
        return replace(plain, tokenizer=tokenizer or plain.tokenizer)
    return _Parts(
        base,
        tokenizer,
        folder / flavor["peft_adaptor"],
        flavor.get("local_base_model_path") or flavor.get("source_model_name"),
        flavor.get("source_model_revision"),
    )


def _transformers_flavor(mlmodel: Path) -> dict[str, Any]:
    """What MLflow's transformers flavor notes of a model; nothing where it did not save it."""
    stored = yaml.safe_load(mlmodel.read_text(encoding="utf-8")) if mlmodel.exists() else None
    found: dict[str, Any] = ((stored or {}).get("flavors") or {}).get("transformers") or {}
    return found


def _fetch(uri: str, place: _Place, revision: str | None, *, without_weights: bool) -> _Parts:
    if uri.startswith("/"):
        return _parts(_on_volume(uri))
    if urlparse(uri).scheme in ("s3", "s3a"):
        return _parts(_from_object_store(uri, place, without_weights=without_weights))
    if uri.startswith("models:/"):
        return _mlflow_parts(_from_mlflow(uri, place, without_weights=without_weights))
    return _parts(_from_hub(uri, revision, place.cache, without_weights=without_weights))


def is_weights(name: str) -> bool:
    """Whether a file of a model holds its weights."""
    return PurePosixPath(name).suffix in _WEIGHTS


def _not_found(uri: str, what_to_do: str) -> RecipeRefusedError:
    return RecipeRefusedError(f"model.base {uri} does not exist: {what_to_do}", reason="ModelNotFound")


def _on_volume(uri: str) -> Path:
    if not Path(uri).is_dir():
        raise RecipeRefusedError(
            f"model.base {uri} does not exist in the pod: mount the volume in podTemplate or correct the path",
            reason="ModelNotFound",
        )
    return Path(uri)


def _from_object_store(uri: str, place: _Place, *, without_weights: bool) -> Path:
    import fsspec

    files, root = fsspec.url_to_fs(uri)
    try:
        listed: dict[str, dict[str, Any]] = files.find(root, detail=True)
    except FileNotFoundError:
        listed = {}
    except PermissionError as error:
        raise RecipeRefusedError(
            f"model.base {uri} may not be read with the pod's credentials: grant them access",
            reason="ModelForbidden",
        ) from error
    wanted = [name for name in listed if not (without_weights and is_weights(name))]
    if not wanted:
        raise _not_found(uri, "correct the bucket or the folder")

    def download(folder: Path) -> None:
        for name in wanted:
            target = folder / PurePosixPath(name).relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            with files.open(name, "rb") as remote, target.open("wb") as local:
                shutil.copyfileobj(remote, local)
            if target.stat().st_size != listed[name]["size"]:
                raise TrainingError(
                    "ModelChanged", f"{name} of model.base {uri} changed while it was downloaded"
                )

    def key() -> Any:
        contents = [[name, info["size"], _content_tag(info)] for name, info in sorted(listed.items())]
        return ["object store", root.rstrip("/"), contents]

    return place.filled(key, _part(without_weights), download)


def _content_tag(info: Mapping[str, Any]) -> str:
    """What differs between two contents of an object: its ETag, or when it was written."""
    known = (info.get(name) for name in ("ETag", "etag", "LastModified", "created"))
    return str(next((value for value in known if value is not None), ""))


def _part(without_weights: bool) -> str:
    return "without weights" if without_weights else _WHOLE


def _from_mlflow(uri: str, place: _Place, *, without_weights: bool) -> Path:
    from mlflow import MlflowException
    from mlflow.store.artifact.models_artifact_repo import ModelsArtifactRepository

    try:
        repository = ModelsArtifactRepository(uri)
    except MlflowException as error:
        # NB: a missing alias answers INVALID_PARAMETER_VALUE, a missing model RESOURCE_DOES_NOT_EXIST.
        if error.error_code in ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST"):
            raise _not_found(uri, "name a model and an alias or version that the registry has") from error
        raise

    def download(folder: Path) -> None:
        for name in _mlflow_files(repository, ""):
            if not (without_weights and is_weights(name)):
                repository.download_artifacts(name, str(folder))

    return place.filled(lambda: _version_key(repository, uri), _part(without_weights), download)


def _version_key(repository: ModelsArtifactRepository, uri: str) -> Any:
    """What identifies a version: a registry may give its number again, after the model was deleted."""
    import mlflow

    name, number = repository.model_name, repository.model_version
    if name is None:
        return ["logged model", mlflow.get_tracking_uri(), uri]
    version = mlflow.MlflowClient().get_model_version(name, number)
    registry = mlflow.get_registry_uri()
    return ["version", registry, name, str(number), version.creation_timestamp, version.source]


def _mlflow_files(repository: object, folder: str) -> Iterable[str]:
    for entry in repository.list_artifacts(folder):  # type: ignore[attr-defined]
        if entry.is_dir:
            yield from _mlflow_files(repository, entry.path)
        else:
            yield entry.path


_ALL_PODS = "name a Secret with HF_TOKEN in spec.envFrom, which reaches all pods"


def _from_hub(name: str, revision: str | None, cache: Cache | None, *, without_weights: bool) -> Path:
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return _snapshot(name, revision, cache, without_weights=without_weights)
    except GatedRepoError as error:
        raise RecipeRefusedError(
            f"model.base {name} is gated: accept its terms, and {_ALL_PODS}",
            reason="ModelForbidden",
        ) from error
    except HFValidationError as error:
        raise _not_found(name, "write a Hub id (org/name), an absolute path, s3:// or models:/") from error
    except RevisionNotFoundError as error:
        raise _not_found(f"{name} at revision {revision}", "correct model.revision") from error
    except RepositoryNotFoundError as error:
        raise _not_found(
            name,
            f"correct the Hub id or, if it is private, {_ALL_PODS}",
        ) from error
    except LocalEntryNotFoundError as error:
        raise TrainingError(
            "HubUnreachable",
            f"model.base {name} is not in the cache and the Hub does not answer: give the pod a way out, or use "
            "a folder on a volume or in an object store",
        ) from error


def _snapshot(name: str, revision: str | None, cache: Cache | None, *, without_weights: bool) -> Path:
    """Download a Hub model, or what is missing of it: the Hub's client keeps what it has downloaded."""
    from huggingface_hub import snapshot_download

    ignored = [f"*{suffix}" for suffix in _WEIGHTS] if without_weights else None

    def download() -> Path:
        folder = cache.hub if cache else None
        with cache.telling() if cache else nullcontext():
            return Path(snapshot_download(name, revision=revision, ignore_patterns=ignored, cache_dir=folder))

    found = download()
    # NB: the client takes a file that is there for whole.
    return download() if cache is not None and _removed_broken(name, found, cache) else found


def _removed_broken(name: str, snapshot: Path, cache: Cache) -> bool:
    """Remove the files of a snapshot that do not have the size that the Hub told; whether there were any."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        told = get_cached_repo_tree(name, revision=snapshot.name, cache_dir=cache.hub)
    except CachedRepoTreeNotFoundError:
        return False
    broken = [
        link for file in told if (link := snapshot / file.path).is_file() and link.stat().st_size != file.size
    ]
    for link in broken:
        link.resolve().unlink(missing_ok=True)
        link.unlink(missing_ok=True)
    return bool(broken)
