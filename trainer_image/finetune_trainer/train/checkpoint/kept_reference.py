"""The reference of an objective, kept beside the checkpoints: a resumed attempt does not compute it again."""

from __future__ import annotations

import io
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING

import numpy as np

from finetune_trainer.train.runtime import storage

if TYPE_CHECKING:
    from finetune_trainer.train.data.dataset import Split
    from finetune_trainer.train.runtime.distributed import World


class KeptReference:
    """The references of a job's splits, by the digests of recipe and split.

    A storage failure never stops training: the reference is then computed by each attempt.

    Args:
        folder: the folder of the job's checkpoints.
        recipe: digest of the recipe.
        world: the ranks, all of which call the methods together.
    """

    def __init__(self, folder: str, recipe: str, world: World) -> None:
        self._files, path = storage.filesystem(folder)
        # Another release may compute it otherwise.
        self._path = f"{path.rstrip('/')}/reference-{recipe}-{version('finetune-trainer')}"
        self._world = world

    def found(self, split: Split) -> Split | None:
        """Return the split with its reference; None where no attempt has written it."""
        read = self._world.agree(lambda: self._read(split) if self._world.leads else None)
        reference = self._world.broadcast(read)
        return None if reference is None else replace(split, reference=reference)

    def keep(self, split: Split) -> None:
        """Write the reference of a split."""
        self._world.agree(lambda: self._try_to_write(split) if self._world.leads else None)

    def _try_to_write(self, split: Split) -> None:
        with storage.tolerated("the reference is not kept for later attempts, which compute it again"):
            self._write(split)

    def _read(self, split: Split) -> np.ndarray | None:
        try:
            reference: np.ndarray = np.load(io.BytesIO(self._files.cat_file(self._name(split))))
        except FileNotFoundError:
            return None
        except Exception as error:
            # NB: an array that was cut short raises ValueError or EOFError.
            reason = storage.failure(error) or (
                str(error) if isinstance(error, ValueError | EOFError) else None
            )
            if reason is None:
                raise
            print(f"the kept reference cannot be read and is computed again: {reason}", flush=True)
            return None
        return reference

    def _write(self, split: Split) -> None:
        assert split.reference is not None  # noqa: S101 - it was just computed
        written = io.BytesIO()
        np.save(written, split.reference)
        name = self._name(split)
        self._files.makedirs(self._path, exist_ok=True)
        self._files.pipe_file(f"{name}.tmp", written.getvalue())
        self._files.mv(f"{name}.tmp", name)

    def _name(self, split: Split) -> str:
        return f"{self._path}/{split.digest}.npy"
