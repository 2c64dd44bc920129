"""Checkpoints: all ranks write shards while training continues, and a marker publishes the complete checkpoint."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

from finetune_crds import contract
from finetune_trainer.outcome import PodFailure, RecipeRefusedError, TrainingError
from finetune_trainer.train.checkpoint.folder import CheckpointFolder, DamagedError
from finetune_trainer.train.checkpoint.shards import (
    TRAINED_ONLY,
    Writer,
    first_failure,
    options_of,
    stager,
    trained_state,
    training_state,
    unreadable,
)
from finetune_trainer.train.runtime import storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import nn

    from finetune_crds.recipe import Recipe
    from finetune_trainer.train.runtime.distributed import World


@dataclass(frozen=True)
class Progress:
    """The state of a run beside weights and optimizer: all that the next attempt needs.

    Data order, learning rate and random numbers are functions of the seed and the step.
    """

    step: int = 0
    recipe: str = ""
    data_version: int | None = None
    base_eval_loss: float | None = None
    best_eval_loss: float | None = None
    best_step: int | None = None
    """Step of the checkpoint with the least evaluation loss, which is kept."""
    best_step_loss: float | None = None
    """Evaluation loss of that checkpoint; above `best_eval_loss` where a later save failed."""
    evals_without_gain: int = 0
    evaluated_step: int = 0
    """Step of the newest evaluation."""
    productive_seconds: float = 0.0
    """In steps whose result is kept, of all attempts."""
    elapsed_seconds: float = 0.0
    """From the start of each attempt to its newest checkpoint."""
    skipped_steps: int = 0
    """Steps whose gradients were not finite, which changed nothing."""


class Checkpointer:
    """The checkpoints of one job.

    A storage failure never stops training: `failure` has the reason until a later save succeeds. Every attribute is
    the same on all ranks.

    Args:
        recipe: with `checkpoint` set.
        world: the ranks, each of which constructs a Checkpointer.
        on_published: called on rank 0 with the step of each published checkpoint.
        on_failed: called on rank 0 with the step of each failed save, and the reason.
    """

    def __init__(
        self,
        recipe: Recipe,
        world: World,
        on_published: Callable[[int], None] = lambda _step: None,
        on_failed: Callable[[int, str], None] = lambda _step, _sentence: None,
    ) -> None:
        assert recipe.checkpoint is not None  # noqa: S101 - the caller checks it
        self.folder = contract.checkpoint_folder(
            recipe.checkpoint.uri, namespace=recipe.job.namespace, name=recipe.job.name, uid=recipe.job.uid
        )
        self.every_steps = recipe.checkpoint.every_steps
        self.published: int | None = None
        """Step of the newest complete checkpoint."""
        self.best_step: int | None = None
        """Step of the checkpoint with the least evaluation loss."""
        self.best_step_loss: float | None = None
        """Its evaluation loss."""
        self.failure: str | None = None
        """Why the last save failed; None after a successful one."""
        self._keep = recipe.checkpoint.keep
        self._asynchronous = recipe.checkpoint.mode == "Async"
        self._digest = recipe.digest()
        self._base = recipe.model.base
        self._world = world
        self._on_published = on_published
        self._on_failed = on_failed
        self._checkpoints = CheckpointFolder(self.folder)
        # NB: an asynchronous save runs collectives in another thread; a separate group keeps them apart from those
        # of the loop.
        timeout = timedelta(seconds=recipe.distributed.collective_timeout_seconds)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._stager = stager(pinned=world.device.type == "cuda")
        self._in_flight: Future[None] | None = None

    def newest(self) -> Progress | None:
        """Return the progress of the newest complete, undamaged checkpoint, the same on all ranks.

        Raises:
            RecipeRefusedError: it belongs to another recipe, or all are damaged.
            TrainingError: the storage failed.
        """
        found = self._world.agree(lambda: self._find_newest() if self._world.leads else None)
        newest = self._world.broadcast(found)
        self.published = newest.step if newest else None
        self.best_step = newest.best_step if newest else None
        self.best_step_loss = newest.best_step_loss if newest else None
        return newest

    def _find_newest(self) -> Progress | None:
        with self._storage_errors():
            damaged: list[str] = []
            for step in reversed(self._checkpoints.marked()):
                try:
                    progress = self._read_progress(step)
                except DamagedError as error:
                    damaged.append(f"the checkpoint {self._checkpoints.uri_of(step)} is damaged ({error})")
                    continue
                for sentence in damaged:
                    print(f"{sentence}: the older one of step {step} is used", flush=True)
                return self._checked(progress)
        if damaged:
            raise RecipeRefusedError(
                f"{damaged[0]} and there is no older one: restore its files, or delete the folder "
                f"{self.folder} to start over",
                reason="CheckpointDamaged",
            )
        return None

    def _read_progress(self, step: int) -> Progress:
        read = self._checkpoints.read(step)
        try:
            return Progress(**read)
        except TypeError as error:
            raise DamagedError(f"it was written by another version of the trainer: {error}") from error

    def _checked(self, progress: Progress) -> Progress:
        """Return the progress after checking that it belongs to this recipe; without an unusable best checkpoint."""
        if progress.recipe != self._digest:
            raise RecipeRefusedError(
                f"the checkpoint {self._checkpoints.uri_of(progress.step)} was made by recipe {progress.recipe}, and "
                f"this is recipe {self._digest}: delete the folder, or run the job under another name",
                reason="ForeignCheckpoint",
            )
        best = progress.best_step
        if best is None or best == progress.step:
            return progress
        try:
            self._checkpoints.read(best)
        except (DamagedError, FileNotFoundError) as error:
            uri = self._checkpoints.uri_of(best)
            print(f"the best checkpoint {uri} is unusable ({error})", flush=True)
            return replace(progress, best_step=None, best_step_loss=None)
        return progress

    def load(self, progress: Progress, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Load weights and optimizer state; the checkpoint may come from another number of ranks.

        Raises:
            RecipeRefusedError: the checkpoint is damaged, or belongs to another model.
            TrainingError: the storage failed.
        """
        state = training_state(model, optimizer)
        self._read(progress.step, state)
        set_model_state_dict(model, state["model"], options=TRAINED_ONLY)
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=TRAINED_ONLY)

    def load_weights(self, step: int, model: nn.Module) -> None:
        """Load only the weights of a complete checkpoint; errors as in `load`."""
        self.drain()
        state = {"model": trained_state(model)}
        self._read(step, state)
        set_model_state_dict(model, state["model"], options=TRAINED_ONLY)

    def _read(self, step: int, state: dict[str, Any]) -> None:
        uri = self._checkpoints.uri_of(step)
        reader = FsspecReader(uri, **options_of(uri))
        self._world.agree(
            lambda: self._check_model(uri, reader, state["model"]) if self._world.leads else None
        )
        try:
            dcp.load(state, storage_reader=reader, process_group=self._group)
        except CheckpointException as error:
            _rank, cause = first_failure(error)
            raise unreadable(uri, cause) from error

    def _check_model(self, uri: str, reader: FsspecReader, weights: dict[str, torch.Tensor]) -> None:
        """Compare names and shapes: DCP's own errors repeat a long message for each weight."""
        try:
            stored = reader.read_metadata().state_dict_metadata
        except Exception as error:
            raise unreadable(uri, error) from error
        prefix = "model."
        there = {
            name.removeprefix(prefix): tuple(entry.size)
            for name, entry in stored.items()
            if name.startswith(prefix)
        }
        here = {name: tuple(weight.shape) for name, weight in weights.items()}
        for name in sorted(there.keys() | here.keys()):
            if there.get(name) != here.get(name):
                raise RecipeRefusedError(
                    f"the checkpoint {uri} was made from another model than model.base {self._base} is now: {name} "
                    f"is {_shape(there.get(name))} there and {_shape(here.get(name))} here; restore that model, "
                    f"or delete the folder {self.folder} to start over",
                    reason="ForeignCheckpoint",
                )

    @contextmanager
    def _storage_errors(self) -> Iterator[None]:
        try:
            yield
        except PodFailure:
            raise
        except Exception as error:
            reason = storage.failure(error)
            if reason is None:
                raise
            raise TrainingError(
                "CheckpointUnreadable", f"the checkpoints in {self.folder} cannot be read: {reason}"
            ) from error

    def save(
        self,
        progress: Progress,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        wait: bool = False,
        best: bool = False,
    ) -> None:
        """Write a checkpoint, asynchronously unless `wait` is set or the recipe says otherwise.

        The previous save finishes first. When the storage fails, `failure` has the reason and `published` does not
        change.

        Args:
            progress: of the run; this method sets its `best_step` and `best_step_loss`.
            model: the sharded model.
            optimizer: its optimizer.
            wait: return after the checkpoint is published or has failed.
            best: keep it until a better checkpoint is saved.
        """
        self.drain()
        written = self.published == progress.step
        if written and (not best or self.best_step == progress.step):
            return
        progress = replace(
            progress,
            best_step=progress.step if best else self.best_step,
            best_step_loss=progress.best_eval_loss if best else self.best_step_loss,
        )
        state = None if written else training_state(model, optimizer)
        if wait or not self._asynchronous:
            self._write(progress, state)
        else:
            # NB: the next steps change the tensors in place, so the save writes a copy.
            staged = None if state is None else self._stager.stage(state)
            self._in_flight = _in_thread(lambda: self._write(progress, staged))

    def drain(self) -> None:
        """Wait until the save in flight, if any, is published or has failed."""
        if self._in_flight is not None:
            in_flight, self._in_flight = self._in_flight, None
            in_flight.result()

    def _write(self, progress: Progress, state: dict[str, Any] | None) -> None:
        """Write the shards unless they exist, and publish as soon as all are complete."""
        step = progress.step
        problem = None
        if state is not None:
            # A killed attempt may have left shards of the same step.
            problem = self._on_leader(lambda: self._checkpoints.remove(step))
            problem = problem or self._write_shards(step, state)
        problem = problem or self._on_leader(lambda: self._checkpoints.publish(step, asdict(progress)))
        if problem is None:
            self.published, self.failure = step, None
            self.best_step, self.best_step_loss = progress.best_step, progress.best_step_loss
            if self._world.leads:
                self._on_published(step)
                self._remove_old(step)
        else:
            self._failed(step, problem, half_written=state is not None)

    def _write_shards(self, step: int, state: dict[str, Any]) -> str | None:
        """Write the shards of every rank; returns the first storage error, on all ranks."""
        uri = self._checkpoints.uri_of(step)
        try:
            dcp.save(state, storage_writer=Writer(uri, **options_of(uri)), process_group=self._group)
        except CheckpointException as error:
            rank, cause = first_failure(error)
            reason = storage.failure(cause)
            if reason is None:
                raise cause from error
            return f"rank {rank}: {reason}"
        return None

    def _on_leader(self, call: Callable[[], None]) -> str | None:
        """Call on rank 0; returns its storage error, if any, on all ranks."""
        reason: str | None = None
        unexpected: Exception | None = None
        if self._world.leads:
            try:
                call()
            except Exception as error:  # noqa: BLE001 - raised on all ranks
                reason = storage.failure(error)
                unexpected = error if reason is None else None
        errors = [reason, None if unexpected is None else repr(unexpected)]
        dist.broadcast_object_list(errors, src=0, group=self._group)
        if unexpected is not None:
            raise unexpected
        if errors[1] is not None:
            raise TrainingError(
                "CheckpointFailed", f"rank 0 could not publish a checkpoint: {errors[1]}", rank=0
            )
        return errors[0] if errors[0] is None else f"rank 0: {errors[0]}"

    def _failed(self, step: int, problem: str, *, half_written: bool) -> None:
        newest = (
            "there is none yet" if self.published is None else f"the newest is that of step {self.published}"
        )
        self.failure = (
            f"the checkpoint of step {step} could not be written ({problem}): {newest}, and the next one is tried "
            "when it is due"
        )
        if not self._world.leads:
            return
        print(self.failure, flush=True)
        if half_written:
            # Files that remain have no marker; the next save of this step deletes them.
            with suppress(Exception):
                self._checkpoints.remove(step)
        self._on_failed(step, self.failure)

    def _remove_old(self, newest: int) -> None:
        """Delete all checkpoints but the newest `keep` and the best."""
        with storage.tolerated(
            f"old checkpoints in {self.folder} could not be deleted, and the next save retries"
        ):
            complete = [step for step in self._checkpoints.marked() if step <= newest]
            kept = {*complete[-self._keep :], self.best_step}
            for step in self._checkpoints.steps():
                if step not in kept and step < newest:
                    self._checkpoints.remove(step)


def _in_thread(work: Callable[[], None]) -> Future[None]:
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - drain() raises it
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="checkpoint").start()
    return done


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else " x ".join(map(str, shape)) or "a number"
