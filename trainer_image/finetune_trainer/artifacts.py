"""Models by their URI: a folder of the pod, an object store, MLflow's registry, or the Hugging Face Hub."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import urlparse

import yaml

from finetune_trainer.outcome import PodFailure, RecipeRefusedError, TrainingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_FIELD = "model.base"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ckpt", ".npz")
# Folders of MLflow's transformers flavor.
_MLFLOW_MODEL, _MLFLOW_TOKENIZER = "model", "components/tokenizer"
_ADAPTER_CONFIG = "adapter_config.json"
# A saved tokenizer has at least one of these files.
_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_BASE_OF_ADAPTER = "base-of-adapter"


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


def fetch(uri: str, to: Path, *, revision: str | None = None, field: str = _FIELD) -> Source:
    """Fetch a model into the pod, with the base of an adapter, and return its folders.

    Args:
        uri: absolute path (used where it is), s3://bucket/folder, models:/name@alias, or a Hub id.
        to: folder for what is downloaded.
        revision: Git revision of a Hub model.
        field: the recipe's field that names it, for what is wrong with it.

    Raises:
        RecipeRefusedError: the model does not exist, access is denied, or the base of an adapter cannot be found.
        TrainingError: the Hub does not answer.
    """
    with _naming(_FIELD, field):
        found = _fetch(uri, to, revision, only_tokenizer=False)
        base = found if found.base is not None else _base_of(found, uri, to, only_tokenizer=False)
    assert base.base is not None  # noqa: S101 - or it would have been refused
    return Source(base.base, found.tokenizer or base.tokenizer or base.base, found.adapter, found.adapter_of)


def fetch_tokenizer(uri: str, to: Path, *, revision: str | None = None) -> Path:
    """Bring a model's tokenizer into the pod, without its weights, and return the folder that it lies in.

    Args and errors are those of `fetch`.
    """
    found = _fetch(uri, to, revision, only_tokenizer=True)
    if found.tokenizer is None and found.base is None:
        found = _base_of(found, uri, to, only_tokenizer=True)
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


def _base_of(adapter: _Parts, uri: str, to: Path, *, only_tokenizer: bool) -> _Parts:
    """The base of an adapter that another artifact holds."""
    name = adapter.adapter_of
    if not name:
        raise RecipeRefusedError(
            f"model.base {uri} is an adapter that names no base: set base_model_name_or_path in its {_ADAPTER_CONFIG}",
            reason="ModelNotLoadable",
        )
    with _naming(f"{_FIELD} {name}", f"{_FIELD} {uri}, an adapter of {name},"):
        base = _fetch(name, to / _BASE_OF_ADAPTER, adapter.revision, only_tokenizer=only_tokenizer)
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


def _fetch(uri: str, to: Path, revision: str | None, *, only_tokenizer: bool) -> _Parts:
    if uri.startswith("/"):
        return _parts(_on_volume(uri))
    if urlparse(uri).scheme in ("s3", "s3a"):
        return _parts(_from_object_store(uri, to, only_tokenizer=only_tokenizer))
    if uri.startswith("models:/"):
        return _mlflow_parts(_from_mlflow(uri, to, only_tokenizer=only_tokenizer))
    return _parts(_from_hub(uri, revision, only_tokenizer=only_tokenizer))


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


def _from_object_store(uri: str, to: Path, *, only_tokenizer: bool) -> Path:
    import fsspec

    files, root = fsspec.url_to_fs(uri)
    try:
        found = [name for name in files.find(root) if not (only_tokenizer and is_weights(name))]
    except FileNotFoundError:
        found = []
    except PermissionError as error:
        raise RecipeRefusedError(
            f"model.base {uri} may not be read with the pod's credentials: grant them access",
            reason="ModelForbidden",
        ) from error
    if not found:
        raise _not_found(uri, "correct the bucket or the folder")
    for name in found:
        target = to / PurePosixPath(name).relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        with files.open(name, "rb") as remote, target.open("wb") as local:
            shutil.copyfileobj(remote, local)
    return to


def _from_mlflow(uri: str, to: Path, *, only_tokenizer: bool) -> Path:
    from mlflow import MlflowException
    from mlflow.store.artifact.models_artifact_repo import ModelsArtifactRepository

    try:
        repository = ModelsArtifactRepository(uri)
    except MlflowException as error:
        # NB: a missing alias answers INVALID_PARAMETER_VALUE, a missing model RESOURCE_DOES_NOT_EXIST.
        if error.error_code in ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST"):
            raise _not_found(uri, "name a model and an alias or version that the registry has") from error
        raise
    to.mkdir(parents=True, exist_ok=True)
    for name in _mlflow_files(repository, ""):
        if not (only_tokenizer and is_weights(name)):
            repository.download_artifacts(name, str(to))
    return to


def _mlflow_files(repository: object, folder: str) -> Iterable[str]:
    for entry in repository.list_artifacts(folder):  # type: ignore[attr-defined]
        if entry.is_dir:
            yield from _mlflow_files(repository, entry.path)
        else:
            yield entry.path


def _from_hub(name: str, revision: str | None, *, only_tokenizer: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    ignored = [f"*{suffix}" for suffix in _WEIGHTS] if only_tokenizer else None
    try:
        return Path(snapshot_download(name, revision=revision, ignore_patterns=ignored))
    except GatedRepoError as error:
        raise RecipeRefusedError(
            f"model.base {name} is gated: accept its terms and set HF_TOKEN in env", reason="ModelForbidden"
        ) from error
    except HFValidationError as error:
        raise _not_found(name, "write a Hub id (org/name), an absolute path, s3:// or models:/") from error
    except RevisionNotFoundError as error:
        raise _not_found(f"{name} at revision {revision}", "correct model.revision") from error
    except RepositoryNotFoundError as error:
        raise _not_found(name, "correct the Hub id, or set HF_TOKEN in env if it is private") from error
    except LocalEntryNotFoundError as error:
        raise TrainingError(
            "HubUnreachable",
            f"model.base {name} is not in the cache and the Hub does not answer: give the pod a way out, or use "
            "a folder on a volume or in an object store",
        ) from error
