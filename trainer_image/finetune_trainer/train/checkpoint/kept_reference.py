"""The log-probabilities of the reference, stored next to the checkpoints: a resumed attempt does not compute them again."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from finetune_trainer.pod.release import get_release
from finetune_trainer.storage import filesystems

if TYPE_CHECKING:
    from collections.abc import Callable

    from fsspec import AbstractFileSystem

    from finetune_trainer.train.data.dataset import Split
    from finetune_trainer.train.data.feed import Examples
    from finetune_trainer.train.runtime.distributed import World


class KeptReference:
    """The stored reference of each split of a job, in files named by the digests of the settings and the split.

    A storage failure never stops training: each attempt then computes the reference.

    Args:
        folder: the folder of the job's checkpoints.
        settings: digest of the settings that a resumed run must share.
        world: the ranks, all of which call the methods together.
        foreign_folder: the folder of checkpoints of the job that this job continues. This folder is only read.
        confirm: called on rank 0 before each write; raises SupersededError if newer pods of the job have claimed the folder.
    """

    def __init__(
        self,
        folder: str,
        settings: str,
        world: World,
        *,
        foreign_folder: str | None = None,
        confirm: Callable[[], None] = lambda: None,
    ) -> None:
        # Another release may compute other values.
        self._name = f"reference-{settings}-{get_release()}"
        self._folder = folder
        self._folders = [folder, *([foreign_folder] if foreign_folder else [])]
        self._world = world
        self._confirm = confirm

    def load(self, examples: Examples) -> Split | None:
        """Return the split with its stored reference; None if the value of any example that this run uses is missing."""
        split = examples.split
        read = self._world.agree(lambda: self._read(examples) if self._world.leads else None)
        reference = self._world.broadcast(read)
        return None if reference is None else replace(split, reference=reference)

    def save(self, split: Split) -> None:
        """Write the reference of a split; stored values of examples that this attempt did not compute are kept."""
        self._world.agree(lambda: self._try_to_write(split) if self._world.leads else None)

    def _try_to_write(self, split: Split) -> None:
        with filesystems.tolerate_failures("cannot store the reference; later attempts compute it again"):
            self._confirm()
            self._write(split)

    def _read(self, examples: Examples) -> np.ndarray | None:
        # NB: an attempt computes only the examples that its steps need; the values of all other examples are 0. So a stored reference may
        # lack examples that this attempt needs.
        needed = np.array([example for row in examples.sequences for example in row], np.int64)
        for folder in self._folders:
            reference = self._read_in(folder, examples.split)
            if reference is not None and reference[needed].any(axis=1).all():
                return reference
        return None

    def _read_in(self, folder: str, split: Split) -> np.ndarray | None:
        """Return the stored reference of a split in a folder; None if there is none, or if it cannot be read."""
        try:
            files, path = self._open_folder(folder)
            reference: np.ndarray = np.load(io.BytesIO(files.cat_file(f"{path}/{split.digest}.npy")))
        except FileNotFoundError:
            return None
        except Exception as error:
            # NB: an array that was cut short raises ValueError or EOFError.
            is_cut_short = isinstance(error, ValueError | EOFError)
            reason = filesystems.describe_failure(error) or (str(error) if is_cut_short else None)
            if reason is None:
                raise
            print(f"cannot read the stored reference; computing it again: {reason}", flush=True)
            return None
        return reference

    def _write(self, split: Split) -> None:
        assert split.reference is not None  # noqa: S101 - it was just computed
        reference = split.reference
        # As in `_read`: the values of an example that was not computed are 0.
        computed = reference.any(axis=1, keepdims=True)
        stored = None if computed.all() else self._read_in(self._folder, split)
        if stored is not None:
            reference = np.where(computed, reference, stored)
        buffer = io.BytesIO()
        np.save(buffer, reference)
        files, path = self._open_folder(self._folder)
        name = f"{path}/{split.digest}.npy"
        filesystems.make_folder(files, path)
        filesystems.write_atomically(files, name, buffer.getvalue())

    def _open_folder(self, folder: str) -> tuple[AbstractFileSystem, str]:
        """Return the file system of a folder, and the path of the references in it."""
        files, path = filesystems.open_filesystem(folder)
        return files, f"{path.rstrip('/')}/{self._name}"
