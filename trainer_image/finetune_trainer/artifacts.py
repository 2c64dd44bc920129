"""Models by their URI: a folder of the pod, an object store, MLflow's registry, or the Hugging Face Hub."""

from __future__ import annotations

import shutil
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import urlparse

from finetune_trainer.outcome import PodFailure, RecipeRefusedError, TrainingError

if TYPE_CHECKING:
    from collections.abc import Iterable

_FIELD = "model.base"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".ckpt", ".npz")
# MLflow keeps what was saved with save_pretrained in one of these, beside its own files.
_MLFLOW_FOLDERS = ("model", "components/tokenizer")


def fetch(
    uri: str,
    to: Path,
    *,
    revision: str | None = None,
    only_tokenizer: bool = False,
    field: str = _FIELD,
) -> Path:
    """Bring a model into the pod and return the folder it lies in.

    Args:
        uri: absolute path (used where it is), s3://bucket/folder, models:/name@alias, or a Hub id.
        to: folder for what is downloaded.
        revision: Git revision of a Hub model.
        only_tokenizer: leave the weights where they are.
        field: the recipe's field that names it, for what is wrong with it.

    Raises:
        RecipeRefusedError: there is no such model, or no access to it.
        TrainingError: the Hub does not answer.
    """
    try:
        return _fetch(uri, to, revision, only_tokenizer=only_tokenizer)
    except PodFailure as error:
        error.message = error.message.replace(_FIELD, field, 1)
        raise


def _fetch(uri: str, to: Path, revision: str | None, *, only_tokenizer: bool) -> Path:
    if uri.startswith("/"):
        return _on_volume(uri)
    if urlparse(uri).scheme in ("s3", "s3a"):
        return _from_object_store(uri, to, only_tokenizer=only_tokenizer)
    if uri.startswith("models:/"):
        return _from_mlflow(uri, to, only_tokenizer=only_tokenizer)
    return _from_hub(uri, revision, only_tokenizer=only_tokenizer)


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
    inner = (to / folder for folder in _MLFLOW_FOLDERS)
    return next((folder for folder in inner if folder.is_dir()), to)


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
