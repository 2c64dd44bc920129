"""Reads a complete checkpoint into a model, after comparing what it stores with what the model needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train.checkpoint.restricted_pickle import RestrictedLoadPlanner
from finetune_trainer.train.checkpoint.shards import (
    Reader,
    build_read_error,
    describe_other_model,
    describe_other_optimizer,
    first_failure,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    import torch.distributed as dist

    from finetune_trainer.train.runtime.distributed import World


@dataclass(frozen=True)
class StoredCheckpoint:
    """A complete checkpoint.

    Attributes:
        uri: its folder, for messages.
        shards: URI of the folder with its shards.
        base: the model.base of the recipe, for messages.
        remedy: what to do if the checkpoint is damaged, for messages.
        start_over: what to do to train without the checkpoint, for messages.
        is_foreign: whether another job wrote it, and may delete it.
    """

    uri: str
    shards: str
    base: str
    remedy: str
    start_over: str
    is_foreign: bool

    def read(
        self,
        state: dict[str, Any],
        weights: Mapping[str, torch.Tensor],
        moments: Mapping[str, Mapping[str, Any]],
        world: World,
        group: dist.ProcessGroup,
    ) -> None:
        """Read into the tensors of `state`, on all ranks of a group.

        Args:
            state: a part of the stored state, nested as it was stored, for example `{"model": weights}`.
            weights: the weights of the model: the checkpoint must have their names and shapes.
            moments: the optimizer state by weight, for example `{"lm_head.weight": {"exp_avg": ...}}`: the checkpoint must have the dtypes
                of its tensors.

        Raises:
            RecipeRefusedError: the checkpoint is damaged, or belongs to another model.
            TrainingError: the storage failed, or another job has deleted the checkpoint.
        """
        reader = Reader(self.shards)
        world.agree(lambda: self._check(reader, weights, moments) if world.leads else None)
        try:
            # NB: a new planner for each read: it keeps the state.
            planner = RestrictedLoadPlanner()
            dcp.load(state, storage_reader=reader, planner=planner, process_group=group)
        except CheckpointException as error:
            _rank, cause = first_failure(error)
            raise build_read_error(self.uri, cause, self.remedy, shared=self.is_foreign) from error

    def _check(
        self, reader: Reader, weights: Mapping[str, torch.Tensor], moments: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Compare names, shapes and types, because DCP repeats a long message for each weight, and converts types silently."""
        try:
            stored = reader.read_metadata().state_dict_metadata
        except Exception as error:
            raise build_read_error(self.uri, error, self.remedy, shared=self.is_foreign) from error
        other_model = describe_other_model(stored, weights)
        other_optimizer = describe_other_optimizer(stored, moments)
        if other_model or other_optimizer:
            cause = (
                f"for another model than the current model.base {self.base} ({other_model}): restore that model"
                if other_model
                else f"by another release, {other_optimizer}: finish the job with that release"
            )
            raise RecipeRefusedError(
                f"the checkpoint {self.uri} was written {cause}, or {self.start_over}",
                reason="ForeignCheckpoint",
            )
