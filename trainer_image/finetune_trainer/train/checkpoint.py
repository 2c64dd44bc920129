"""Checkpoints: written in shards by all ranks, published by a marker, found again by it."""

from __future__ import annotations

import json
import re
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from finetune_crds import contract
from finetune_trainer.outcome import RecipeRefusedError
from finetune_trainer.train import storage

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from finetune_crds.recipe import Recipe
    from finetune_trainer.train.distributed import World

MARKER = "COMPLETE"
_STEP_FOLDER = re.compile(r"step-(\d{8})$")
# The frozen base of an adapter is not part of a checkpoint.
_TRAINED_ONLY = StateDictOptions(ignore_frozen_params=True, strict=False)


@dataclass(frozen=True)
class Progress:
    """Where a run stands; with the weights and the optimizer, all that the next attempt needs.

    The order of the data, the learning rate and every random draw are functions of the seed and the step.
    """

    step: int = 0
    recipe: str = ""
    data_version: int | None = None
    base_eval_loss: float | None = None
    best_eval_loss: float | None = None
    evals_without_gain: int = 0
    productive_seconds: float = 0.0
    """Spent in the steps that count, in all attempts."""
    elapsed_seconds: float = 0.0
    """From the start of each attempt to its newest checkpoint."""


class Checkpointer:
    """The checkpoints of one job.

    A checkpoint is a folder `step-<8 digits>`. It counts once its marker is there, which is written last, when all
    ranks have written their shards; whatever has no marker is left from an attempt that died.
    """

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        on_published: Callable[[int], None] = lambda _step: None,
    ) -> None:
        assert recipe.checkpoint is not None  # noqa: S101 - the worker makes one only then
        self.folder = contract.checkpoint_folder(
            recipe.checkpoint.uri, namespace=recipe.job.namespace, name=recipe.job.name, uid=recipe.job.uid
        )
        self.every_steps = recipe.checkpoint.every_steps
        self.published: int | None = None
        self._keep = recipe.checkpoint.keep
        self._asynchronous = recipe.checkpoint.asynchronous
        self._digest = recipe.digest()
        self._world = world
        self._on_published = on_published
        self._files, self._path = storage.filesystem(self.folder)
        # NB: an asynchronous save runs collectives in another thread; on a group of its own they cannot be
        # taken for the loop's.
        self._group = dist.new_group(backend="gloo")
        self._saved: int | None = None
        self._in_flight: Future[None] | None = None

    def newest(self) -> Progress | None:
        """The newest complete checkpoint, the same for all ranks.

        Raises:
            RecipeRefusedError: it was made by another recipe.
        """
        found = self._world.agree(lambda: self._read_newest() if self._world.leads else None)
        newest = self._world.broadcast(found)
        self.published = self._saved = newest.step if newest else None
        return newest

    def _read_newest(self) -> Progress | None:
        steps = self._complete_steps()
        if not steps:
            return None
        progress = Progress(**json.loads(self._files.cat_file(f"{self._folder_of(steps[-1])}/{MARKER}")))
        if progress.recipe != self._digest:
            raise RecipeRefusedError(
                f"the checkpoint {contract.checkpoint_uri(self.folder, progress.step)} was made by recipe {progress.recipe}, and "
                f"this is recipe {self._digest}: delete the folder, or run the job under another name",
                reason="ForeignCheckpoint",
            )
        return progress

    def load(self, progress: Progress, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Put a checkpoint's weights and optimizer state in place, whatever the number of ranks it came from."""
        state = _state(model, optimizer)
        dcp.load(
            state,
            storage_reader=FsspecReader(
                contract.checkpoint_uri(self.folder, progress.step), **_options(self.folder)
            ),
        )
        set_model_state_dict(model, state["model"], options=_TRAINED_ONLY)
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=_TRAINED_ONLY)

    def save(
        self, progress: Progress, model: nn.Module, optimizer: torch.optim.Optimizer, *, wait: bool = False
    ) -> None:
        """Write a checkpoint; unless told to wait, and where the recipe allows, while training goes on.

        A save that is still in flight is finished first.
        """
        self.drain()
        if self._saved == progress.step:
            return
        self._saved = progress.step
        state = _state(model, optimizer)
        writer = FsspecWriter(contract.checkpoint_uri(self.folder, progress.step), **_options(self.folder))
        if wait or not self._asynchronous:
            dcp.save(state, storage_writer=writer, process_group=self._group)
            self._publish(progress)
        else:
            written = dcp.async_save(state, storage_writer=writer, process_group=self._group)
            self._in_flight = self._published_after(written, progress)

    def drain(self) -> None:
        """Wait until the save in flight, if any, is published, and raise its error."""
        if self._in_flight is not None:
            in_flight, self._in_flight = self._in_flight, None
            in_flight.result()

    def _published_after(self, written: Future, progress: Progress) -> Future[None]:
        """Publish as soon as all shards are there, not at the next save: the run may be killed in between."""
        published: Future[None] = Future()

        def publish(done: Future) -> None:
            try:
                done.result()
                self._publish(progress)
            except BaseException as error:  # noqa: BLE001 - drain() raises it
                published.set_exception(error)
            else:
                published.set_result(None)

        written.add_done_callback(publish)
        return published

    def _publish(self, progress: Progress) -> None:
        """Make a checkpoint count, and delete those that no longer do."""
        self.published = progress.step
        if not self._world.leads:
            return
        marker = f"{self._folder_of(progress.step)}/{MARKER}"
        self._files.pipe_file(f"{marker}.tmp", json.dumps(asdict(progress)).encode())
        self._files.mv(f"{marker}.tmp", marker)
        self._on_published(progress.step)
        kept = self._complete_steps()[-self._keep :]
        for step in self._all_steps():
            if step not in kept and step < progress.step:
                with suppress(FileNotFoundError):
                    self._files.rm(self._folder_of(step), recursive=True)

    def _complete_steps(self) -> list[int]:
        return [step for step in self._all_steps() if self._files.exists(f"{self._folder_of(step)}/{MARKER}")]

    def _all_steps(self) -> list[int]:
        try:
            names = self._files.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        matches = (_STEP_FOLDER.search(name.rstrip("/")) for name in names)
        return sorted(int(match.group(1)) for match in matches if match)

    def _folder_of(self, step: int) -> str:
        return contract.checkpoint_uri(self._path, step)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model, options=_TRAINED_ONLY),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=_TRAINED_ONLY),
    }


def _options(uri: str) -> dict[str, Any]:
    return {"use_listings_cache": False} if storage.is_object_store(uri) else {}
