"""The folder of a job's checkpoints: finds complete and damaged checkpoints, publishes saves and deletes them."""

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
    from collections.abc import Iterable, Mapping

    from fsspec import AbstractFileSystem

MARKER = "COMPLETE"
_STEP_FOLDER = re.compile(r"step-(\d{8})$")
_GENERATION_FOLDER = re.compile(r"attempt-(\d+)-[0-9a-f]+$")


class DamagedError(Exception):
    """A checkpoint is published but damaged; the message has the reason."""


@dataclass(frozen=True)
class Marker:
    """The content of a checkpoint's marker: the progress of the run, and the settings that a later run must share.

    `settings` is empty in markers of earlier releases.
    """

    progress: dict[str, Any]
    settings: dict[str, Any]


@dataclass(frozen=True)
class Save:
    """What one generation of pods wrote for one step.

    folder: URI of the checkpoint folder.
    step: the step.
    generation: the token of the generation; empty if an earlier release wrote the save, in the folder of the step itself.
    """

    folder: str
    step: int
    generation: str

    @property
    def uri(self) -> str:
        """URI of the folder with the shards and the marker."""
        return _join(contract.checkpoint_uri(self.folder, self.step), self.generation)

    @property
    def attempt(self) -> int:
        """The attempt that wrote the save; 0 if an earlier release wrote it."""
        match = _GENERATION_FOLDER.match(self.generation)
        return int(match.group(1)) if match else 0


class CheckpointFolder:
    """Folders `step-<8 digits>/<generation>`, for example step-00000100/attempt-2-1a2b3c4d, on a volume or in an object store.

    A generation writes only to folders with its own token, so that pods of an older generation never change what a newer generation wrote.
    A save is complete when it has its marker, which is written last and lists all files with their sizes. A save without a
    marker was left by a killed attempt. A checkpoint is complete when one of its saves is. All methods raise storage errors.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri

    @cached_property
    def _place(self) -> tuple[AbstractFileSystem, str]:
        # NB: opened on first use, because an object store's client may look for credentials immediately.
        return filesystems.open_filesystem(self.uri)

    @property
    def _files(self) -> AbstractFileSystem:
        files, _path = self._place
        return files

    @property
    def _path(self) -> str:
        _files, path = self._place
        return path

    def list_saves(self, only: int | None = None) -> list[Save]:
        """Return all saves, or the saves of step `only`, complete or not, in ascending order of step and attempt."""
        steps = self._list_steps() if only is None else [only]
        return [save for step in steps for save in self._list_saves_of(step)]

    def list_complete_steps(self) -> list[int]:
        """Return the steps with a complete save, in ascending order."""
        return sorted({save.step for save in self.list_complete(self.list_saves())})

    def list_complete(self, saves: Iterable[Save]) -> list[Save]:
        """Return the saves that have their marker."""
        return [save for save in saves if self._files.exists(self._marker(save))]

    def list_sizes(self, save: Save) -> dict[str, int]:
        """Return the size in bytes of each file of a save except the marker, by name."""
        entries = self._files.ls(self._locate(save), detail=True)
        sizes = {_name(entry): int(entry["size"] or 0) for entry in entries if entry["type"] == "file"}
        # The name of a marker's temporary file (`filesystems.PART`) begins with MARKER too.
        return {name: size for name, size in sizes.items() if not name.startswith(MARKER)}

    def publish(self, save: Save, marker: Marker, sizes: Mapping[str, int]) -> None:
        """Write the marker of a save whose files are all written.

        Args:
            save: the save.
            marker: its marker.
            sizes: the sizes of its files, as `list_sizes` returns them.
        """
        text = json.dumps({**asdict(marker), "files": dict(sizes)})
        filesystems.write_atomically(self._files, self._marker(save), text.encode())

    def read(self, step: int) -> tuple[Marker, Save]:
        """Return the marker of a checkpoint, and its undamaged save; of several saves, the save of the highest attempt.

        Raises:
            DamagedError: each complete save has an unreadable marker, or a file that is missing or has another size.
            FileNotFoundError: the checkpoint has no complete save.
        """
        newest_damage: DamagedError | None = None
        for save in reversed(self._list_saves_of(step)):
            try:
                return self._read(save), save
            except DamagedError as error:
                newest_damage = newest_damage or error
            except FileNotFoundError:
                # The save has no marker, or is being deleted.
                continue
        raise newest_damage or FileNotFoundError(
            f"{contract.checkpoint_uri(self.uri, step)} has no file {MARKER}"
        )

    def remove(self, saves: Iterable[Save]) -> None:
        """Delete saves, each marker first, and the folders of steps that are then empty."""
        steps = set()
        for save in saves:
            steps.add(save.step)
            with suppress(FileNotFoundError):
                self._files.rm_file(self._marker(save))
            with suppress(FileNotFoundError):
                self._remove_files(save)
        for step in steps:
            filesystems.remove_empty_folder(self._files, contract.checkpoint_uri(self._path, step))

    def _remove_files(self, save: Save) -> None:
        """Delete the files of a save; of a save of an earlier release, only the files that are directly in its folder."""
        if save.generation:
            self._files.rm(self._locate(save), recursive=True)
            return
        # NB: a newer generation may write to a folder inside this folder.
        for entry in self._list(self._locate(save)):
            if entry["type"] == "file":
                self._files.rm_file(entry["name"])

    def _read(self, save: Save) -> Marker:
        """Return the marker of a save; raises as `read` does."""
        text = self._files.cat_file(self._marker(save))
        try:
            content = json.loads(text)
            marker = Marker(dict(content["progress"]), content.get("settings") or {})
            expected_sizes: dict[str, int] = content["files"]
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"its file {MARKER} cannot be read") from error
        actual_sizes = self.list_sizes(save)
        for name, size in expected_sizes.items():
            if name not in actual_sizes:
                raise DamagedError(f"its file {name} is missing")
            if actual_sizes[name] != size:
                raise DamagedError(f"its file {name} has {actual_sizes[name]:,} bytes instead of {size:,}")
        return marker

    def _list_steps(self) -> list[int]:
        """Return the steps with a folder, in ascending order."""
        matches = (_STEP_FOLDER.match(_name(entry)) for entry in self._list(self._path))
        return sorted(int(match.group(1)) for match in matches if match)

    def _list_saves_of(self, step: int) -> list[Save]:
        """Return all saves of a step, complete or not, in ascending order of the attempt; within an attempt, in any fixed order."""
        entries = self._list(contract.checkpoint_uri(self._path, step))
        generations = [_name(entry) for entry in entries if entry["type"] == "directory"]
        saves = [
            Save(self.uri, step, generation)
            for generation in generations
            if _GENERATION_FOLDER.match(generation)
        ]
        if any(entry["type"] == "file" for entry in entries):
            saves.append(Save(self.uri, step, ""))
        return sorted(saves, key=lambda save: (save.attempt, save.generation))

    def _list(self, path: str) -> list[dict[str, Any]]:
        try:
            entries: list[dict[str, Any]] = self._files.ls(path, detail=True)
        except FileNotFoundError:
            return []
        # NB: the folder may list itself: a web console makes a folder by writing an empty object with its name.
        return [entry for entry in entries if str(entry["name"]).rstrip("/") != path.rstrip("/")]

    def _locate(self, save: Save) -> str:
        return _join(contract.checkpoint_uri(self._path, save.step), save.generation)

    def _marker(self, save: Save) -> str:
        return f"{self._locate(save)}/{MARKER}"


def _join(folder: str, generation: str) -> str:
    return f"{folder}/{generation}" if generation else folder


def _name(entry: Mapping[str, Any]) -> str:
    """Return the name of an entry of a folder; a store may append a slash to the name of a folder."""
    return str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]
