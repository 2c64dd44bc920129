"""The folder of a job's checkpoints: finds complete and damaged ones, publishes and deletes."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from finetune_crds import contract
from finetune_trainer.storage import filesystems

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

MARKER = "COMPLETE"
_STEP_FOLDER = re.compile(r"step-(\d{8})$")


class DamagedError(Exception):
    """A checkpoint is published but damaged; the message has the reason."""


@dataclass(frozen=True)
class Marker:
    """The content of a checkpoint's marker: the progress of the run, and the settings that a later run must share.

    `settings` is empty in markers of earlier releases.
    """

    progress: dict[str, Any]
    settings: dict[str, Any]


class CheckpointFolder:
    """Folders `step-<8 digits>`, on a volume or in an object store.

    A checkpoint is complete when it has its marker, which is written last and lists all files with their sizes. A
    folder without a marker was left by a killed attempt. All methods but `uri_of` raise storage errors.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri

    @cached_property
    def _place(self) -> tuple[AbstractFileSystem, str]:
        # NB: opened on first use, because an object store's client may look for credentials immediately.
        return filesystems.open_filesystem(self.uri)

    @property
    def _files(self) -> AbstractFileSystem:
        return self._place[0]

    @property
    def _path(self) -> str:
        return self._place[1]

    def uri_of(self, step: int) -> str:
        """Return the URI of the checkpoint of a step."""
        return contract.checkpoint_uri(self.uri, step)

    def steps(self) -> list[int]:
        """Return the steps with a folder, complete or not, in ascending order."""
        try:
            names = self._files.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        matches = (_STEP_FOLDER.search(name.rstrip("/")) for name in names)
        return sorted(int(match.group(1)) for match in matches if match)

    def list_complete_steps(self) -> list[int]:
        """Return the steps with a marker, in ascending order."""
        return [step for step in self.steps() if self._files.exists(self._marker(step))]

    def publish(self, step: int, marker: Marker) -> None:
        """Write the marker of a checkpoint whose files are all written."""
        text = json.dumps({**asdict(marker), "files": self._list_sizes(step)})
        filesystems.write_atomically(self._files, self._marker(step), text.encode())

    def read(self, step: int) -> Marker:
        """Return the marker of a checkpoint.

        Raises:
            DamagedError: the marker is unreadable, or a file is missing or has another size.
        """
        try:
            content = json.loads(self._files.cat_file(self._marker(step)))
            marker = Marker(dict(content["progress"]), content.get("settings") or {})
            expected_sizes: dict[str, int] = content["files"]
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"its file {MARKER} cannot be read") from error
        actual_sizes = self._list_sizes(step)
        for name, size in expected_sizes.items():
            if name not in actual_sizes:
                raise DamagedError(f"its file {name} is missing")
            if actual_sizes[name] != size:
                raise DamagedError(f"its file {name} has {actual_sizes[name]:,} bytes instead of {size:,}")
        return marker

    def remove(self, step: int) -> None:
        """Delete a checkpoint, the marker first."""
        for path, recursive in ((self._marker(step), False), (self._folder(step), True)):
            with suppress(FileNotFoundError):
                self._files.rm(path, recursive=recursive)

    def _list_sizes(self, step: int) -> dict[str, int]:
        """Return the size in bytes of each file of a checkpoint except the marker, by name."""
        entries = self._files.ls(self._folder(step), detail=True)
        sizes = {str(entry["name"]).rsplit("/", 1)[-1]: int(entry["size"] or 0) for entry in entries}
        return {name: size for name, size in sizes.items() if name and not name.startswith(MARKER)}

    def _folder(self, step: int) -> str:
        return contract.checkpoint_uri(self._path, step)

    def _marker(self, step: int) -> str:
        return f"{self._folder(step)}/{MARKER}"
