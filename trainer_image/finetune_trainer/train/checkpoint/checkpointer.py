"""Checkpoints: all ranks write shards while training continues, and a marker publishes the complete checkpoint."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

from finetune_crds import contract
from finetune_crds.continuation import differences_of_examples, settings
from finetune_trainer.pod.attempt import read_attempt
from finetune_trainer.pod.exit_status import RecipeRefusedError, SupersededError
from finetune_trainer.storage import filesystems
from finetune_trainer.train.checkpoint import newest
from finetune_trainer.train.checkpoint.background import run_in_thread
from finetune_trainer.train.checkpoint.claim import Claim, build_token
from finetune_trainer.train.checkpoint.folder import CheckpointFolder, Marker, Save
from finetune_trainer.train.checkpoint.leader import run_on_leader
from finetune_trainer.train.checkpoint.retention import select_left_over, select_old
from finetune_trainer.train.checkpoint.shards import (
    TRAINED_ONLY,
    Writer,
    build_stager,
    first_failure,
    get_trained_state,
    get_training_state,
)
from finetune_trainer.train.checkpoint.stored_checkpoint import StoredCheckpoint
from finetune_trainer.train.model.adapters import pissa

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from torch import nn

    from finetune_crds.recipe import Recipe
    from finetune_trainer.train.checkpoint.newest import ResumePoint
    from finetune_trainer.train.checkpoint.progress import Progress
    from finetune_trainer.train.runtime.distributed import World


class Checkpointer:
    """The checkpoints of one job.

    A failed save never stops training: `failure` has the reason until a later save succeeds. If newer pods of the job claim
    the folder, all ranks raise SupersededError before they write, publish or delete a checkpoint. Every attribute is
    the same on all ranks.

    Args:
        recipe: a recipe with `checkpoint`.
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
        self.folder = contract.job_folder(
            recipe.checkpoint.uri, namespace=recipe.job.namespace, name=recipe.job.name, uid=recipe.job.uid
        )
        self.every_steps = recipe.checkpoint.every_steps
        self.published: int | None = None
        """Step of the newest complete checkpoint."""
        self.best_step: int | None = None
        """Step of the best checkpoint: the checkpoint with the least evaluation loss."""
        self.best_step_loss: float | None = None
        """Evaluation loss of the best checkpoint."""
        self.failure: str | None = None
        """Why the last save failed; None after a successful one."""
        self._keep = recipe.checkpoint.keep
        self._asynchronous = recipe.checkpoint.mode == "Async"
        self._recipe = recipe
        self._settings = settings(recipe)
        self._world = world
        self._on_published = on_published
        self._on_failed = on_failed
        self._checkpoints = CheckpointFolder(self.folder)
        attempt = read_attempt()
        self.claim = Claim(self.folder, attempt, world.broadcast(build_token(attempt)))
        """The claim on the folder; only rank 0 confirms it."""
        # NB: an asynchronous save runs collectives in another thread; a separate group keeps them apart from the
        # collectives of the loop.
        timeout = timedelta(seconds=recipe.distributed.collective_timeout_seconds)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._run_on_leader = partial(run_on_leader, world=world, group=self._group)
        self._stager = build_stager(pinned=world.device.type == "cuda")
        self._in_flight: Future[None] | None = None
        self._resume_point: ResumePoint | None = None
        # By step, the saves that this attempt may read: those of the resume point, and those that it published.
        self._saves: dict[int, Save] = {}

    def find_newest(self) -> Progress | None:
        """Return the progress of the checkpoint that the attempt begins with, the same on all ranks.

        It is the newest complete and undamaged checkpoint of this job, or else of the job that this job continues.

        Raises:
            RecipeRefusedError: the checkpoint belongs to another recipe, or all checkpoints are damaged.
            SupersededError: a higher attempt of the job has claimed the folder.
            TrainingError: the storage failed.
        """

        def claim_and_find() -> ResumePoint | None:
            # NB: in this order: older pods then neither publish nor delete a checkpoint after the search.
            self.claim.try_to_confirm("the next save will claim the folder")
            return newest.find_newest(self.folder, self._recipe)

        resume_point = self._world.agree(lambda: claim_and_find() if self._world.leads else None)
        self._resume_point = self._world.broadcast(resume_point)
        if self._resume_point is None:
            return None
        progress, save, best = self._resume_point.progress, self._resume_point.save, self._resume_point.best
        self.best_step, self.best_step_loss = progress.best_step, progress.best_step_loss
        # If both have the same step, `save` counts.
        self._saves = {each.step: each for each in (best, save) if each is not None}
        self.published = None if self._is_foreign(progress.step) else progress.step
        return progress

    def begin_on(
        self, progress: Progress, *, examples: str, eval_data: str | None, max_steps: int
    ) -> Progress:
        """Return the progress that the attempt starts with, after checking that it has the data of the checkpoint.

        Args:
            progress: of the checkpoint, or of step 0.
            examples: digest of the tokenized training split.
            eval_data: identifies the evaluation data: losses on data with the same identity are comparable.
            max_steps: steps of the plan.

        Raises:
            RecipeRefusedError: the checkpoint has other examples, or a step after the last of the plan.
        """
        saved_settings = self._resume_point.settings if self._resume_point is not None else {}
        uri = self._uri_of(progress.step)
        # Checkpoints of earlier releases do not have the digest.
        if progress.examples and progress.examples != examples:
            changes = "; ".join(differences_of_examples(saved_settings, self._recipe))
            cause = (
                changes or "the files of the splits, the tokenizer or the image of the trainer have changed"
            )
            remedy = (
                "create the job without checkpoint.resumeFrom"
                if self._is_foreign(progress.step)
                else newest.explain_start_over(self.folder, self._recipe)
            )
            raise RecipeRefusedError(
                f"the checkpoint {uri} was written for other training examples ({cause}): "
                f"restore the examples, or {remedy}",
                reason="ForeignCheckpoint",
            )
        if progress.step > max_steps:
            raise RecipeRefusedError(
                f"the checkpoint {uri} is at step {progress.step}, but this run has only {max_steps} steps: raise training.epochs "
                "or training.maxSteps, or resume from an earlier checkpoint",
                reason="ForeignCheckpoint",
            )
        started = replace(progress.on_eval_data(eval_data), examples=examples)
        self.best_step, self.best_step_loss = started.best_step, started.best_step_loss
        return started

    def load(self, progress: Progress, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Load weights and optimizer state; the checkpoint may come from another number of ranks.

        Raises:
            RecipeRefusedError: the checkpoint is damaged, or belongs to another model.
            TrainingError: the storage failed, or another job has deleted the checkpoint.
        """
        state = get_training_state(model, optimizers)
        self._read(progress.step, state, state["model"], state["optimizer"]["state"])
        set_model_state_dict(model, state["model"], options=TRAINED_ONLY)
        set_optimizer_state_dict(model, tuple(optimizers), state["optimizer"], options=TRAINED_ONLY)

    def load_weights(self, step: int, model: nn.Module) -> None:
        """Load only the weights of a complete checkpoint; errors as in `load`."""
        self.drain()
        weights = get_trained_state(model)
        self._read(step, {"model": weights}, weights)
        set_model_state_dict(model, weights, options=TRAINED_ONLY)

    def load_initial(self, model: nn.Module) -> None:
        """Load only the initial weights of PiSSA layers, from the checkpoint that `find_newest` found; errors as in `load`."""
        assert self._resume_point is not None  # noqa: S101 - the caller checks it
        weights = get_trained_state(model)
        initial = {name: weight for name, weight in weights.items() if pissa.is_initial(name)}
        self._read(self._resume_point.progress.step, {"model": initial}, weights)
        set_model_state_dict(model, initial, options=TRAINED_ONLY)

    def _read(
        self,
        step: int,
        state: dict[str, Any],
        weights: dict[str, torch.Tensor],
        moments: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Read a part of a checkpoint, after checking that it has the names and shapes of `weights` and the dtypes of `moments`."""
        stored = StoredCheckpoint(
            self._uri_of(step),
            self._saves[step].uri,
            base=str(self._recipe.model.base),
            remedy=self._suggest_remedy(step),
            start_over=self._explain_start_over(step),
            is_foreign=self._is_foreign(step),
        )
        stored.read(state, weights, moments or {}, self._world, self._group)

    def _uri_of(self, step: int) -> str:
        """Return the URI of the checkpoint of a step, in the folder of this job or of the job that it continues."""
        save = self._saves.get(step)
        return contract.checkpoint_uri(self.folder if save is None else save.folder, step)

    def _is_foreign(self, step: int) -> bool:
        """Whether another job has written the save of a step; this job only reads such a save."""
        return step in self._saves and self._saves[step].folder != self.folder

    def _suggest_remedy(self, step: int) -> str:
        """Say what to do if the checkpoint is damaged."""
        if self._is_foreign(step):
            return "set checkpoint.resumeFrom to another checkpoint"
        fallback = "the start" if newest.locate_resume_from(self._recipe) is None else "checkpoint.resumeFrom"
        return f"delete this folder to resume from an older checkpoint, or from {fallback} if no older one exists"

    def _explain_start_over(self, step: int) -> str:
        """Say how to train without the checkpoint."""
        if self._is_foreign(step):
            return self._suggest_remedy(step)
        return newest.explain_start_over(self.folder, self._recipe)

    def save(
        self,
        progress: Progress,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        wait: bool = False,
        best: bool = False,
    ) -> None:
        """Write a checkpoint, asynchronously unless `wait` is set or checkpoint.mode is Sync.

        The previous save finishes first. If the storage fails, `failure` has the reason and `published` does not
        change.

        Args:
            progress: the progress of the run; this method sets `recipe`, `best_step`, `best_step_loss` and `best_in`.
            model: the sharded model.
            optimizers: its optimizers.
            wait: return after the checkpoint is published or has failed.
            best: keep the checkpoint until a better checkpoint is saved.

        Raises:
            SupersededError: newer pods of the job have claimed the folder; after an asynchronous save, the next call raises it.
        """
        self.drain()
        # A published checkpoint is published again only to record that it is the best.
        is_written = self.published == progress.step
        if is_written and (not best or self.best_step == progress.step):
            return
        best_step = progress.step if best else self.best_step
        best_in = ""
        # This save is in the job's own folder, even if another job's save of the same step was read.
        if best_step is not None and best_step != progress.step and self._is_foreign(best_step):
            best_in = self._saves[best_step].folder
        progress = replace(
            progress,
            recipe=self._recipe.digest(),
            best_step=best_step,
            best_step_loss=progress.best_eval_loss if best else self.best_step_loss,
            best_in=best_in,
        )
        state = None if is_written else get_training_state(model, optimizers)
        if wait or not self._asynchronous:
            self._write(progress, state)
        else:
            # NB: the next steps change the tensors in place, so the save writes a copy.
            staged = None if state is None else self._stager.stage(state)
            self._in_flight = run_in_thread(lambda: self._write(progress, staged), self._world.device)

    @property
    def has_failed(self) -> bool:
        """Whether the save in flight has ended with an error, which the next `save` or `drain` raises."""
        return self._in_flight is not None and self._in_flight.done() and bool(self._in_flight.exception())

    def drain(self) -> None:
        """Wait until the save in flight, if any, is published or has failed; errors as in `save`."""
        if self._in_flight is not None:
            in_flight, self._in_flight = self._in_flight, None
            in_flight.result()

    def _write(self, progress: Progress, state: dict[str, Any] | None) -> None:
        """Write the shards, and publish the checkpoint when all shards are complete; if `state` is None, the shards exist already."""
        step = progress.step
        save = self._saves[step] if state is None else Save(self.folder, step, self.claim.token)
        problem = None
        try:
            if state is not None:
                problem = self._run_on_leader(lambda: self._remove_left_over(step))
                problem = problem or self._write_shards(save, state)
            marker = Marker(asdict(progress), self._settings)
            problem = problem or self._run_on_leader(lambda: self._publish(save, marker))
            if problem is not None:
                # The cause may be that newer pods have deleted the shards: then this raises SupersededError.
                self._run_on_leader(self.claim.confirm)
        except SupersededError:
            if state is not None:
                self._remove_half_written(save)
            raise
        if problem is None:
            self.published, self.failure = step, None
            self._saves[step] = save
            self.best_step, self.best_step_loss = progress.best_step, progress.best_step_loss
            if self._world.leads:
                self._on_published(step)
            self._run_on_leader(lambda: self._remove_old(step))
        else:
            if state is not None:
                self._remove_half_written(save)
            self._record_failure(step, problem)

    def _remove_left_over(self, step: int) -> None:
        """Delete what killed attempts wrote for a step without publishing it."""
        saves = self._checkpoints.list_saves(step)
        complete = self._checkpoints.list_complete(saves)
        left_over = select_left_over(saves, complete, attempt=self.claim.attempt)
        self.claim.confirm()
        # NB: pods that are being killed may still write to these saves; then the deletion fails.
        with filesystems.tolerate_failures(
            f"what an earlier attempt left of step {step} could not be deleted"
        ):
            self._checkpoints.remove(left_over)

    def _publish(self, save: Save, marker: Marker) -> None:
        """Write the marker of a save, if no newer pods have claimed the folder."""
        # NB: newer pods that claim the folder after `confirm` may delete the shards. The save then counts as damaged, because the
        # marker lists them.
        sizes = self._checkpoints.list_sizes(save)
        self.claim.confirm()
        self._checkpoints.publish(save, marker, sizes)

    def _write_shards(self, save: Save, state: dict[str, Any]) -> str | None:
        """Write the shards of every rank; returns the first storage error, on all ranks."""
        try:
            dcp.save(state, storage_writer=Writer(save.uri), process_group=self._group)
        except CheckpointException as error:
            rank, cause = first_failure(error)
            reason = filesystems.describe_failure(cause)
            if reason is None:
                raise cause from error
            return f"rank {rank}: {reason}"
        return None

    def _remove_half_written(self, save: Save) -> None:
        """Delete the shards of an unpublished save. Shards that cannot be deleted have no marker, and a later save deletes them."""
        if self._world.leads:
            with suppress(Exception):
                self._checkpoints.remove([save])

    def _record_failure(self, step: int, problem: str) -> None:
        fallback = (
            "there is no checkpoint yet"
            if self.published is None
            else f"the newest checkpoint is at step {self.published}"
        )
        self.failure = (
            f"the checkpoint of step {step} could not be written ({problem}): {fallback}; training continues and "
            "tries again at the next checkpoint"
        )
        if not self._world.leads:
            return
        print(self.failure, flush=True)
        self._on_failed(step, self.failure)

    def _remove_old(self, newest_step: int) -> None:
        """Delete all checkpoints except the newest `keep` and the best."""
        with filesystems.tolerate_failures(
            f"old checkpoints in {self.folder} could not be deleted; the next save will try again"
        ):
            saves = self._checkpoints.list_saves()
            complete = self._checkpoints.list_complete(saves)
            old = select_old(
                saves,
                complete,
                attempt=self.claim.attempt,
                newest_step=newest_step,
                keep=self._keep,
                best_step=self.best_step,
            )
            # NB: newer pods that claim the folder after `confirm` lose nothing, since only what was listed before it is deleted.
            self.claim.confirm()
            self._checkpoints.remove(old)
