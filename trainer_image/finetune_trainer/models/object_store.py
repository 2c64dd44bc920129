"""A model in an object store."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from finetune_trainer.models.output_folder import MANIFEST, list_model_files
from finetune_trainer.models.unsafe_files import check_names
from finetune_trainer.pod.exit_status import PodFailure, RecipeRefusedError, TrainingError
from finetune_trainer.storage import filesystems
from finetune_trainer.storage.relative_paths import locate_inside

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from fsspec import AbstractFileSystem


@dataclass(frozen=True)
class StoredModel:
    """The files of a model in an object store; empty if there is no such folder.

    root: the path of the folder in the store.
    entries: the store's entry for each file, by the file's path in the store.
    """

    uri: str
    files: AbstractFileSystem
    root: str
    entries: dict[str, dict[str, Any]]

    @classmethod
    def find(cls, uri: str) -> StoredModel:
        """List a model.

        Raises:
            RecipeRefusedError: the pod has no login that may read the model, a job has not finished writing the model, or the name of a
                file leads out of the folder.
            TrainingError: the store, or the server of its logins, does not answer.
        """
        with _translating_errors(uri):
            files, root = filesystems.open_filesystem(uri)
            model = cls(uri, files, root.rstrip("/"), _list_files(files, root))
            return model._without_foreign_files()

    def _without_foreign_files(self) -> StoredModel:
        """Return the model without files that its manifest, if it has one, does not name.

        Raises:
            RecipeRefusedError: the model is incomplete, or the name of a file leads out of the folder.
        """
        relative_names = {name: self._within(name) for name in self.entries}
        manifest = f"{self.root}/{MANIFEST}"
        if manifest in self.entries:
            sizes = {relative_names[name]: info["size"] for name, info in self.entries.items()}
            names = list_model_files(self.uri, self.files.cat_file(manifest), sizes)
        else:
            names = set(relative_names.values())
        check_names(self.uri, sorted(names))
        entries = {name: info for name, info in self.entries.items() if relative_names[name] in names}
        return replace(self, entries=entries)

    def _within(self, name: str) -> str:
        """Return the path of a file in the folder, exactly as the store lists it."""
        return name.removeprefix(f"{self.root}/")

    def download(self, names: Iterable[str], folder: Path) -> None:
        """Download the named files into a folder.

        Raises:
            TrainingError: a file has changed since it was listed.
        """
        for name in names:
            target = locate_inside(folder, self._within(name))
            self.files.get_file(name, str(target))
            if target.stat().st_size != self.entries[name]["size"]:
                raise TrainingError(
                    "ModelChanged", f"{name} of model.base {self.uri} changed while it was downloaded"
                )

    def key(self) -> Any:
        """Return what the content depends on, as JSON."""
        contents = [
            [name, info["size"], _find_content_tag(info)] for name, info in sorted(self.entries.items())
        ]
        return ["object store", self.root, contents]


def _list_files(files: AbstractFileSystem, root: str) -> dict[str, dict[str, Any]]:
    try:
        return filesystems.list_files(files, root)
    except Exception as error:
        if filesystems.is_missing(error):
            return {}
        raise


@contextmanager
def _translating_errors(uri: str) -> Iterator[None]:
    """Translate errors of the store into errors of the pod."""
    try:
        yield
    except PodFailure:
        raise
    except Exception as error:
        if filesystems.is_forbidden(error):
            raise RecipeRefusedError(
                f"model.base {uri} cannot be read with the pod's credentials: grant these credentials access",
                reason="ModelForbidden",
            ) from error
        if filesystems.has_no_login(error):
            raise RecipeRefusedError(
                f"model.base {uri} requires credentials, but the environment has none: set {filesystems.describe_logins(uri)}, in a "
                "pod by envFrom",
                reason="ModelForbidden",
            ) from error
        reason = filesystems.describe_failure(error)
        if reason is None:
            raise
        raise TrainingError("ModelUnreadable", f"model.base {uri} cannot be read: {reason}") from error


def _find_content_tag(info: dict[str, Any]) -> str:
    """Return the identity of an object's content: its ETag, or the time when it was written."""
    candidates = (info.get(name) for name in ("ETag", "etag", "LastModified", "created"))
    return str(next((value for value in candidates if value is not None), ""))
