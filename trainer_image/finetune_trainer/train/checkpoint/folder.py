"""The folder of a job's checkpoints: which of them are complete, and which are damaged."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

from finetune_crds import contract
from finetune_trainer.train.runtime import storage

MARKER = "COMPLETE"
_STEP_FOLDER = re.compile(r"step-(\d{8})$")


class DamagedError(Exception):
    """A checkpoint has its marker and cannot be used; the message says what is wrong with it."""


class CheckpointFolder:
    """Folders `step-<8 digits>`, on a volume or in an object store.

    One counts once its marker is there, which is written last and lists the folder's files with their sizes. Whatever
    has no marker is left from an attempt that died. Every method but `uri_of` raises the storage's errors.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._files, self._path = storage.filesystem(uri)

    def uri_of(self, step: int) -> str:
        """Where the checkpoint of a step is."""
        return contract.checkpoint_uri(self.uri, step)

    def steps(self) -> list[int]:
        """The steps that have a folder, complete or not, in order."""
        try:
            names = self._files.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        matches = (_STEP_FOLDER.search(name.rstrip("/")) for name in names)
        return sorted(int(match.group(1)) for match in matches if match)

    def marked(self) -> list[int]:
        """The steps whose checkpoint has its marker, in order."""
        return [step for step in self.steps() if self._files.exists(self._marker(step))]

    def publish(self, step: int, progress: dict[str, Any]) -> None:
        """Make a checkpoint whose files are all written count."""
        text = json.dumps({"progress": progress, "files": self._sizes(step)})
        temporary = f"{self._marker(step)}.tmp"
        self._files.pipe_file(temporary, text.encode())
        self._files.mv(temporary, self._marker(step))

    def read(self, step: int) -> dict[str, Any]:
        """The progress that a marked checkpoint was published with.

        Raises:
            DamagedError: its marker cannot be read, or its files are not all there in their sizes.
        """
        try:
            marker = json.loads(self._files.cat_file(self._marker(step)))
            progress: dict[str, Any] = marker["progress"]
            wanted: dict[str, int] = marker["files"]
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"its file {MARKER} cannot be read") from error
        found = self._sizes(step)
        for name, size in wanted.items():
            if name not in found:
                raise DamagedError(f"its file {name} is missing")
            if found[name] != size:
                raise DamagedError(f"its file {name} has {found[name]:,} bytes instead of {size:,}")
        return progress

    def remove(self, step: int) -> None:
        """Delete what there is of a checkpoint; from the first moment on it does not count any more."""
        for path, everything in ((self._marker(step), False), (self._folder(step), True)):
            with suppress(FileNotFoundError):
                self._files.rm(path, recursive=everything)

    def _sizes(self, step: int) -> dict[str, int]:
        """The files of a checkpoint but its marker, with their sizes in bytes."""
        entries = self._files.ls(self._folder(step), detail=True)
        sizes = {str(entry["name"]).rsplit("/", 1)[-1]: int(entry["size"] or 0) for entry in entries}
        return {name: size for name, size in sizes.items() if name and not name.startswith(MARKER)}

    def _folder(self, step: int) -> str:
        return contract.checkpoint_uri(self._path, step)

    def _marker(self, step: int) -> str:
        return f"{self._folder(step)}/{MARKER}"
