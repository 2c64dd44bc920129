"""A model in an object store."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from finetune_trainer.models.output_folder import MANIFEST, list_model_files
from finetune_trainer.pod.exit_status import PodFailure, RecipeRefusedError, TrainingError
from finetune_trainer.storage import filesystems

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from fsspec import AbstractFileSystem


@dataclass(frozen=True)
class StoredModel:
    """The files of a model in an object store; none where there is no such folder.

    entries: what the store says of each file, by its name.
    """

    uri: str
    files: AbstractFileSystem
    root: str
    entries: dict[str, dict[str, Any]]

    @classmethod
    def find(cls, uri: str) -> StoredModel:
        """List a model.

        Raises:
            RecipeRefusedError: the pod's login may not read it, or a job has not written all of it.
            TrainingError: the store, or the server of its logins, does not answer.
        """
        with _translating_errors(uri):
            files, root = filesystems.open_filesystem(uri)
            model = cls(uri, files, root.rstrip("/"), _list_files(files, root))
            return model._without_foreign_files()

    def _without_foreign_files(self) -> StoredModel:
        """The model without files that its manifest does not name, if it has one."""
        manifest = f"{self.root}/{MANIFEST}"
        if manifest not in self.entries:
            return self
        within = {name: str(self._within(name)) for name in self.entries}
        sizes = {within[name]: info["size"] for name, info in self.entries.items()}
        model_files = list_model_files(self.uri, self.files.cat_file(manifest), sizes)
        return replace(
            self, entries={name: info for name, info in self.entries.items() if within[name] in model_files}
        )

    def _within(self, name: str) -> PurePosixPath:
        return PurePosixPath(name).relative_to(self.root)

    def download(self, names: Iterable[str], folder: Path) -> None:
        """Download some of its files into a folder.

        Raises:
            TrainingError: one has changed meanwhile.
        """
        for name in names:
            target = folder / self._within(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            self.files.get_file(name, str(target))
            if target.stat().st_size != self.entries[name]["size"]:
                raise TrainingError(
                    "ModelChanged", f"{name} of model.base {self.uri} changed while it was downloaded"
                )

    def key(self) -> Any:
        """What its content depends on, as JSON."""
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
    """Say in one sentence why a model cannot be entries."""
    try:
        yield
    except PodFailure:
        raise
    except Exception as error:
        if filesystems.is_forbidden(error):
            raise RecipeRefusedError(
                f"model.base {uri} cannot be read with the pod's credentials: grant them access",
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
    """What differs between two contents of an object: its ETag, or when it was written."""
    candidates = (info.get(name) for name in ("ETag", "etag", "LastModified", "created"))
    return str(next((value for value in candidates if value is not None), ""))
