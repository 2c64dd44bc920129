"""Models by their URI: a folder of the pod, an object store, MLflow's registry, or the Hugging Face Hub."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_trainer.models import base_reference, model_files
from finetune_trainer.models.base_reference import WEIGHTS, Origin, is_weights
from finetune_trainer.models.model_files import Parts
from finetune_trainer.models.object_store import StoredModel
from finetune_trainer.models.output_folder import MANIFEST, list_model_files
from finetune_trainer.models.unsafe_files import UNSAFE, check_names
from finetune_trainer.pod.exit_status import PodFailure, RecipeRefusedError, TrainingError, first_line
from finetune_trainer.storage import filesystems
from finetune_trainer.storage.relative_paths import is_relative_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from mlflow.store.artifact.models_artifact_repo import ModelsArtifactRepository

    from finetune_trainer.models.cache import Cache

_FIELD = "model.base"
_BASE_OF_ADAPTER = "base-of-adapter"
_NOT_FOUND = "ModelNotFound"
_WHOLE = "whole"
# How the errors of the Hub's client begin that refuse a name.
_UNSAFE_FOR_HUB_CLIENT = ("Invalid filename", "Invalid pointer path")
_LOGIN_REMEDY = "name a Secret with HF_TOKEN in spec.pods.all.envFrom, which applies to all pods"


@dataclass(frozen=True)
class Source:
    """The folders of a model that was fetched.

    base: config and weights of a standalone model.
    tokenizer: the adapter's tokenizer if it has one, or else the base's.
    adapter: peft's adapter to the base, or None.
    adapter_of: how the adapter names its base, or None.
    origin: where the base was fetched from; None if the base has no address of its own.
    """

    base: Path
    tokenizer: Path
    adapter: Path | None = None
    adapter_of: str | None = None
    origin: Origin | None = None


@dataclass(frozen=True)
class _Place:
    """The target of downloads: a folder of the pod, and a cache that outlives the pod, if the job has a cache."""

    folder: Path
    cache: Cache | None

    def within(self, name: str) -> _Place:
        """Return the place of a model that another model needs, such as the base of an adapter."""
        return replace(self, folder=self.folder / name)

    def fill_folder(self, key: Callable[[], Any], part: str, fill: Callable[[Path], None]) -> Path:
        """Return the folder of a model, and fill it unless the cache has the model.

        Args:
            key: returns what the content depends on; called only with a cache.
            part: `whole`, or the part of the model to download.
            fill: downloads the model into a folder.
        """
        if self.cache is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            fill(self.folder)
            return self.folder
        content_key = key()
        # An entry with the whole model also serves a request for a part of it.
        return self.cache.find([content_key, _WHOLE]) or self.cache.get([content_key, part], fill)


def fetch(
    uri: str,
    to: Path,
    *,
    revision: str | None = None,
    cache: Cache | None = None,
    field: str = _FIELD,
    without_weights: bool = False,
) -> Source:
    """Fetch a model into the pod, with the base of an adapter, and return its folders.

    Args:
        uri: absolute path (used in place), folder of an object store, models:/name@alias, or a Hub id.
        to: folder for downloads that are not cached.
        revision: Git revision of a Hub model.
        cache: keeps downloads, and returns existing downloads.
        field: the recipe's field that names the model, for messages.
        without_weights: fetch all files except the weights; the base of an adapter is then not compared with its digest.

    Raises:
        RecipeRefusedError: the model does not exist, access is denied, or the base of an adapter cannot be found.
        TrainingError: the Hub does not answer, or the cache is full.
    """
    place = _Place(to, cache)
    with _renaming_field(_FIELD, field):
        parts = _fetch(uri, place, revision, without_weights=without_weights)
        has_base = parts.base is not None
        base_parts = parts if has_base else _fetch_base(parts, uri, place, without_weights=without_weights)
    assert base_parts.base is not None  # noqa: S101 - or it would have been refused
    tokenizer = parts.tokenizer or base_parts.tokenizer or base_parts.base
    return Source(
        base=base_parts.base,
        tokenizer=tokenizer,
        adapter=parts.adapter,
        adapter_of=parts.of.uri if parts.of else None,
        origin=base_parts.origin,
    )


def fetch_config(uri: str, to: Path, *, revision: str | None = None, cache: Cache | None = None) -> Path:
    """Fetch a model without its weights into the pod, and return the folder of its config.

    Args and errors: as in `fetch`. For an adapter, the result is the config of the adapter's base.
    """
    return fetch(uri, to, revision=revision, cache=cache, without_weights=True).base


def fetch_tokenizer(uri: str, to: Path, *, revision: str | None = None, cache: Cache | None = None) -> Path:
    """Fetch a model without its weights into the pod, and return the folder of its tokenizer.

    Args and errors: as in `fetch`.
    """
    place = _Place(to, cache)
    parts = _fetch(uri, place, revision, without_weights=True)
    if parts.tokenizer is None and parts.base is None:
        parts = _fetch_base(parts, uri, place, without_weights=True)
    folder = parts.tokenizer or parts.base
    assert folder is not None  # noqa: S101 - or it would have been refused
    return folder


@contextmanager
def _renaming_field(wrong: str, right: str) -> Iterator[None]:
    """Replace the first `wrong` in the message of a failure with `right`, which names the model as the recipe does."""
    try:
        yield
    except PodFailure as error:
        error.message = error.message.replace(wrong, right, 1)
        raise


def _fetch_base(adapter: Parts, uri: str, place: _Place, *, without_weights: bool) -> Parts:
    """Fetch the base of an adapter that does not contain it.

    Raises:
        RecipeRefusedError: the adapter names no base; or the base no longer exists, is itself an adapter, or has changed.
    """
    reference = adapter.of
    if reference is None:
        raise RecipeRefusedError(
            f"model.base {uri} is an adapter without a base: set base_model_name_or_path in its adapter_config.json",
            reason="ModelNotLoadable",
        )
    try:
        with _renaming_field(f"{_FIELD} {reference.uri}", f"{_FIELD} {uri}, an adapter of {reference.uri},"):
            base_parts = _fetch(
                reference.uri,
                place.within(_BASE_OF_ADAPTER),
                reference.revision,
                without_weights=without_weights,
            )
    except RecipeRefusedError as error:
        has_one_cause = filesystems.is_object_store(reference.uri) or reference.uri.startswith("models:/")
        # For a Hub id or a path, the message of the error names more causes: a private model, a volume that is not mounted.
        if error.reason != _NOT_FOUND or not has_one_cause:
            raise
        raise RecipeRefusedError(
            (
                f"model.base {uri} is an adapter of {reference.uri}, which no longer exists: restore the base, or start "
                "from another model"
            ),
            reason=_NOT_FOUND,
        ) from error
    if base_parts.base is None or base_parts.adapter is not None:
        raise RecipeRefusedError(
            f"model.base {uri} is an adapter of {reference.uri}, which is itself an adapter: merge {reference.uri} into its base first",
            reason="ModelNotLoadable",
        )
    if reference.digest is None or without_weights:
        return base_parts
    digest = base_reference.compute_digest(base_parts.base)
    if digest != reference.digest:
        raise RecipeRefusedError(
            f"model.base {uri} is an adapter of {reference.uri}, which has changed: its digest is {digest}, but the adapter was "
            f"trained on {reference.digest}: restore the files that the adapter was trained on, or start from another model",
            reason="BaseChanged",
        )
    origin = replace(base_parts.origin, digest=digest) if base_parts.origin else None
    return replace(base_parts, origin=origin)


def _fetch(uri: str, place: _Place, revision: str | None, *, without_weights: bool) -> Parts:
    """Fetch the parts of a model at one address, without the base that an adapter names."""
    if filesystems.is_object_store(uri):
        folder = _fetch_from_object_store(uri, place, without_weights=without_weights)
        return model_files.read_folder(folder, Origin(uri))
    if uri.startswith("/"):
        return model_files.read_folder(_find_on_volume(uri), Origin(uri))
    if uri.startswith("models:/"):
        folder, origin = _fetch_from_mlflow(uri, place, without_weights=without_weights)
        return model_files.read_version(folder, origin)
    snapshot = _fetch_from_hub(uri, revision, place.cache, without_weights=without_weights)
    # The Hub's client names the folder of a snapshot by its commit.
    return model_files.read_folder(snapshot, Origin(uri, snapshot.name))


def _not_found_error(uri: str, what_to_do: str) -> RecipeRefusedError:
    return RecipeRefusedError(f"model.base {uri} does not exist: {what_to_do}", reason=_NOT_FOUND)


def _find_on_volume(uri: str) -> Path:
    if not Path(uri).is_dir():
        raise RecipeRefusedError(
            f"model.base {uri} does not exist in the pod: mount the volume in spec.pods or correct the path",
            reason=_NOT_FOUND,
        )
    folder = Path(uri)
    manifest = folder / MANIFEST
    if manifest.is_file():
        files = (file for file in folder.rglob("*") if file.is_file())
        sizes = {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
        # Refuses an incomplete model.
        list_model_files(uri, manifest.read_bytes(), sizes)
    return folder


def _fetch_from_object_store(uri: str, place: _Place, *, without_weights: bool) -> Path:
    stored = StoredModel.find(uri)
    names = [name for name in stored.entries if not (without_weights and is_weights(name))]
    if not names:
        raise _not_found_error(uri, f"correct the {filesystems.name_container(uri)} or the folder")
    return place.fill_folder(
        stored.key, _name_part(without_weights), lambda folder: stored.download(names, folder)
    )


def _name_part(without_weights: bool) -> str:
    return "without weights" if without_weights else _WHOLE


def _fetch_from_mlflow(uri: str, place: _Place, *, without_weights: bool) -> tuple[Path, Origin]:
    """Fetch a version or a folder in it; return the folder, and its URI with the version number in place of an alias."""
    from mlflow.store.artifact.models_artifact_repo import ModelsArtifactRepository

    version, inner = ModelsArtifactRepository.split_models_uri(uri)
    # NB: for a missing alias, MLflow answers INVALID_PARAMETER_VALUE.
    with _translating_refusals(uri, "INVALID_PARAMETER_VALUE"):
        repository = ModelsArtifactRepository(version)

    def download(folder: Path) -> None:
        names = list(list_mlflow_files(repository, inner))
        check_names(uri, names)
        for name in names:
            if not (without_weights and is_weights(name)):
                repository.download_artifacts(name, str(folder))

    part = _name_part(without_weights)
    if inner:
        part = f"{part} of {inner}"
    # NB: Unity Catalog reports a missing version only when the version is read.
    with _translating_refusals(uri):
        folder = place.fill_folder(lambda: _build_version_key(repository, version), part, download) / inner
    if not folder.is_dir():
        raise _not_found_error(uri, "name a folder of the version")
    # A logged model has no name and no version number, and its URI has no alias to replace.
    if repository.model_name is None:
        return folder, Origin(uri)
    version_uri = f"models:/{repository.model_name}/{repository.model_version}"
    return folder, Origin(f"{version_uri}/{inner}" if inner else version_uri)


@contextmanager
def _translating_refusals(uri: str, *codes: str) -> Iterator[None]:
    """Refuse a model that MLflow reports as missing, with RESOURCE_DOES_NOT_EXIST or one of the codes, and a model with unsafe names."""
    from mlflow import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", *codes):
            raise _not_found_error(uri, "name a model and an alias or version in the registry") from error
        # What MLflow's client finds before a name reaches `check_names`.
        if error.message.startswith("Invalid path"):
            raise RecipeRefusedError(
                f"model.base {uri} has a file whose name leads out of its folder, which MLflow's client refuses: use another version",
                reason=UNSAFE,
            ) from error
        raise


def _build_version_key(repository: ModelsArtifactRepository, uri: str) -> Any:
    """Return what identifies a version. Its number is not enough: a registry may reuse the number after the model was deleted."""
    import mlflow

    name, number = repository.model_name, repository.model_version
    if name is None:
        return ["logged model", mlflow.get_tracking_uri(), uri]
    version = mlflow.MlflowClient().get_model_version(name, number)
    registry = mlflow.get_registry_uri()
    return ["version", registry, name, str(number), version.creation_timestamp, version.source]


def list_mlflow_files(repository: object, folder: str) -> Iterable[str]:
    """Yield the paths of the files in a folder of a repository of MLflow and in its subfolders."""
    for entry in repository.list_artifacts(folder):  # type: ignore[attr-defined]
        if entry.is_dir:
            yield from list_mlflow_files(repository, entry.path)
        else:
            yield entry.path


def _fetch_from_hub(name: str, revision: str | None, cache: Cache | None, *, without_weights: bool) -> Path:
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        return _download_snapshot(name, revision, cache, without_weights=without_weights)
    except GatedRepoError as error:
        raise RecipeRefusedError(
            f"model.base {name} is gated: accept the model's terms on the Hub, and {_LOGIN_REMEDY}",
            reason="ModelForbidden",
        ) from error
    except HFValidationError as error:
        raise RecipeRefusedError(
            f"model.base {name} is not a Hub id: write a Hub id (org/name), an absolute path, or an address with s3://, gs://, abfss:// or "
            "models:/",
            reason=_NOT_FOUND,
        ) from error
    except ValueError as error:
        if not str(error).startswith(_UNSAFE_FOR_HUB_CLIENT):
            raise
        raise RecipeRefusedError(
            f"model.base {name} has a file whose name leads out of its folder, which the Hub's client refuses ({first_line(error)}): use "
            "another model or revision",
            reason=UNSAFE,
        ) from error
    except RevisionNotFoundError as error:
        raise _not_found_error(f"{name} at revision {revision}", "correct model.revision") from error
    except RepositoryNotFoundError as error:
        raise _not_found_error(
            name,
            f"correct the Hub id or, if the model is private, {_LOGIN_REMEDY}",
        ) from error
    except LocalEntryNotFoundError as error:
        raise TrainingError(
            "HubUnreachable",
            f"model.base {name} is not in the cache and the Hub does not respond: allow the pod to reach the Hub, or use "
            "a folder on a volume or in an object store",
        ) from error


def _download_snapshot(
    name: str, revision: str | None, cache: Cache | None, *, without_weights: bool
) -> Path:
    """Download a Hub model, except for files that the Hub's client has already downloaded."""
    from huggingface_hub import snapshot_download

    ignored = [f"*{suffix}" for suffix in WEIGHTS] if without_weights else None

    def download() -> Path:
        folder = cache.hub if cache else None
        with cache.translating_errors() if cache else nullcontext():
            return Path(snapshot_download(name, revision=revision, ignore_patterns=ignored, cache_dir=folder))

    snapshot = download()
    # NB: the client assumes that a file in the cache is complete, so broken files are removed and downloaded again.
    return download() if cache is not None and _remove_broken_files(name, snapshot, cache) else snapshot


def _remove_broken_files(name: str, snapshot: Path, cache: Cache) -> bool:
    """Remove files of a snapshot that do not have the size that the Hub reported; return whether there were any."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        files = get_cached_repo_tree(name, revision=snapshot.name, cache_dir=cache.hub)
    except CachedRepoTreeNotFoundError:
        return False
    # NB: the listing also names files that were not downloaded. The client has not checked their names, and none of them is in the snapshot.
    broken = [
        link
        for file in files
        if is_relative_path(file.path)
        and (link := snapshot / file.path).is_file()
        and link.stat().st_size != file.size
    ]
    # The content is in another folder of the cache, to which the link leads.
    for link in broken:
        link.resolve().unlink(missing_ok=True)
        link.unlink(missing_ok=True)
    return bool(broken)
