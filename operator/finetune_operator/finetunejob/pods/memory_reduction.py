"""Reduces the memory that the built-in loop uses, after an attempt that ran out of memory.

First, a rank splits a step into more passes of fewer sequences each: the sequences of a step, and the steps of the run, stay the same.
Next, it recomputes activations. If a training on GPUs runs out of host memory instead, it saves checkpoints synchronously: an
asynchronous checkpoint needs a copy in host memory.
"""

from __future__ import annotations

from finetune_crds.base import join_names
from finetune_crds.checkpoint import Checkpoint
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_crds.recipe import JobRecipe
from finetune_crds.status import LastFailure, ReducedMemory
from finetune_crds.training import Training
from finetune_operator.finetunejob.draft.draft import Draft

OUT_OF_GPU_MEMORY = "OutOfMemory"
"""The trainer's reason for an attempt that ran out of GPU memory."""
_OUT_OF_HOST_MEMORY = "OOMKilled"
"""The kubelet's reason for a container that exceeded its memory limit."""


def is_out_of_memory(draft: Draft, failure: LastFailure) -> bool:
    """Whether the built-in loop ran out of memory. The memory of another command does not depend on `spec.training`."""
    return not draft.spec.trainer.command and failure.reason in (OUT_OF_GPU_MEMORY, _OUT_OF_HOST_MEMORY)


def find_reduction(draft: Draft, failure: LastFailure) -> ReducedMemory | None:
    """The settings of the next attempt; None if no setting is left that reduces the memory."""
    spec, reduced = draft.spec, draft.status.reduced_memory or ReducedMemory()
    # NB: without GPUs, the training itself uses the host memory.
    has_gpus = draft.status.device is not None and draft.status.device.type == "GPU"
    if failure.reason == OUT_OF_GPU_MEMORY or not has_gpus:
        return _reduce_training(spec, reduced)
    return _reduce_checkpoints(spec.checkpoint, reduced)


def _reduce_training(spec: FineTuneJobSpec, reduced: ReducedMemory) -> ReducedMemory | None:
    training = apply_to_training(spec.training, reduced)
    batch_size = training.per_device_batch_size
    # NB: KTO estimates a divergence from the sequences of one pass, so their number must not change.
    if batch_size > 1 and spec.objective.type != "KTO":
        # A divisor, so that batch size times accumulation stays the same; the smallest, so that the batch shrinks least.
        divisor = next(number for number in range(2, batch_size + 1) if batch_size % number == 0)
        smaller_size, eval_size = batch_size // divisor, training.per_device_eval_batch_size
        return reduced.model_copy(
            update={
                "per_device_batch_size": smaller_size,
                "gradient_accumulation": training.gradient_accumulation * divisor,
                "per_device_eval_batch_size": min(eval_size, smaller_size) if eval_size else None,
            }
        )
    if training.activation_checkpointing != "Full":
        return reduced.model_copy(update={"activation_checkpointing": "Full"})
    return None


def _reduce_checkpoints(checkpoint: Checkpoint | None, reduced: ReducedMemory) -> ReducedMemory | None:
    if checkpoint is None or "Sync" in (checkpoint.mode, reduced.checkpoint_mode):
        return None
    return reduced.model_copy(update={"checkpoint_mode": "Sync"})


def apply_to_training(training: Training, reduced: ReducedMemory) -> Training:
    """The hyperparameters with the settings that use less memory. `reduced` also has the mode of checkpoints, which is not part of them."""
    fields = type(training).model_fields
    return training.model_copy(
        update={name: value for name, value in reduced if value is not None and name in fields}
    )


def apply_to_recipe(draft: Draft, recipe: JobRecipe) -> JobRecipe:
    """The recipe with the settings that use less memory."""
    reduced = draft.status.reduced_memory
    if reduced is None:
        return recipe
    checkpoint = recipe.checkpoint
    if checkpoint and reduced.checkpoint_mode:
        checkpoint = checkpoint.model_copy(update={"mode": reduced.checkpoint_mode})
    training = apply_to_training(recipe.training, reduced)
    return recipe.model_copy(update={"training": training, "checkpoint": checkpoint})


def describe(reduced: ReducedMemory) -> str:
    """The settings that use less memory, such as `perDeviceBatchSize 2 and gradientAccumulation 4`."""
    settings = [
        f"{name} {value}" for name, value in reduced.model_dump(by_alias=True, exclude_none=True).items()
    ]
    return join_names(settings)
