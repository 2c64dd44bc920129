"""Checkpoints that somebody forged: files that a reader of pickles runs code for."""

from __future__ import annotations

import io
import json
import os
import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from finetune_trainer.train.checkpoint.folder import MARKER

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fsspec import AbstractFileSystem

METADATA = ".metadata"
SHARD = "__0_0.distcp"


class MakeFolder:
    """Makes a folder as soon as it is unpickled: the proof that code of the file has run."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.proof),)


def forge_metadata(files: AbstractFileSystem, save: str, proof: Path) -> None:
    """Add code to the metadata of a save; all else stays as it was."""
    metadata = _read_metadata(files, save)
    metadata.planner_data["proof"] = MakeFolder(proof)
    _write(files, save, METADATA, pickle.dumps(metadata))


def forge_bytes_entry(files: AbstractFileSystem, save: str, proof: Path) -> None:
    """Replace the content of an entry that is no tensor with code."""
    content = io.BytesIO()
    torch.save(MakeFolder(proof), content)
    _replace_entry(files, save, content.getvalue(), is_tensor=False)


def forge_tensor(files: AbstractFileSystem, save: str, proof: Path) -> None:
    """Replace the content of a tensor with code."""
    content = io.BytesIO()
    torch.save(MakeFolder(proof), content)
    _replace_entry(files, save, content.getvalue(), is_tensor=True)


def forge_path(files: AbstractFileSystem, save: str, path: str) -> None:
    """Let the metadata name a file outside of the save as the file of every entry."""
    metadata = _read_metadata(files, save)
    metadata.storage_data = {
        index: replace(info, relative_path=path) for index, info in metadata.storage_data.items()
    }
    _write(files, save, METADATA, pickle.dumps(metadata))


FORGERIES: list[tuple[Callable[[AbstractFileSystem, str, Path], None], str]] = [
    (forge_metadata, f"its file {METADATA} refers to posix.mkdir"),
    (forge_bytes_entry, f"its file {SHARD} refers to posix.mkdir"),
    (forge_tensor, f"its file {SHARD} refers to posix.mkdir"),
]
"""Each kind of forgery, and what the refusal says of it."""


def _read_metadata(files: AbstractFileSystem, save: str) -> Any:
    return pickle.loads(files.cat_file(f"{save}/{METADATA}"))  # noqa: S301 - the test wrote it


def _replace_entry(files: AbstractFileSystem, save: str, content: bytes, *, is_tensor: bool) -> None:
    """Append a content to the first shard, and let the metadata name it as the content of one entry."""
    metadata = _read_metadata(files, save)
    shard = files.cat_file(f"{save}/{SHARD}")
    index = next(
        index
        for index, info in metadata.storage_data.items()
        if info.relative_path == SHARD
        and hasattr(metadata.state_dict_metadata[index.fqn], "size") is is_tensor
    )
    metadata.storage_data[index] = replace(
        metadata.storage_data[index], offset=len(shard), length=len(content)
    )
    _write(files, save, SHARD, shard + content)
    _write(files, save, METADATA, pickle.dumps(metadata))


def _write(files: AbstractFileSystem, save: str, name: str, content: bytes) -> None:
    """Replace a file, and its size in the marker."""
    files.pipe_file(f"{save}/{name}", content)
    marker = json.loads(files.cat_file(f"{save}/{MARKER}"))
    marker["files"][name] = len(content)
    files.pipe_file(f"{save}/{MARKER}", json.dumps(marker).encode())
