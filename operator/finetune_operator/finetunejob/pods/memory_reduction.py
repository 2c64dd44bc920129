"""Reduces the memory that the built-in loop uses, after an attempt that ran out of memory.

First, a rank splits a step into more passes of fewer sequences each: the sequences of a step, and the steps of the run, stay the same.
Next, it recomputes activations. If all weights are trained and a step has one pass, recomputation comes first: during a second pass, the
gradients of the first pass would stay in memory, and could need more than smaller passes save.

The trainer estimates the memory of these settings before it loads weights, and may refuse them. Then the next attempt uses even
less. If a training on GPUs runs out of host memory instead, the next attempt saves checkpoints synchronously: an asynchronous
checkpoint needs a copy in host memory.
"""

from __future__ import annotations

from typing import Any

from finetune_crds import contract
from finetune_crds.base import join_names
from finetune_crds.recipe import JobRecipe
from finetune_crds.status import LastFailure, ReducedMemory
from finetune_crds.training import Training
from finetune_operator.finetunejob.draft.draft import Draft

OUT_OF_HOST_MEMORY = "OOMKilled"
"""The kubelet's reason for a container that exceeded its memory limit."""
_OUT_OF_GPU_MEMORY = "OutOfMemory"
"""The trainer's reason for an attempt that ran out of GPU memory, or that does not fit by the trainer's estimate."""
_CANNOT_RECOMPUTE = "RecomputationUnsupported"
"""The trainer's reason for a model whose activations cannot be recomputed."""
# For each method, the one that needs less memory for weights and optimizer.
_SMALLER_METHODS = {"Full": "LoRA", "LoRA": "QLoRA", "DoRA": "QLoRA"}


def has_gpus(draft: Draft) -> bool:
    """Whether the training runs on GPUs. On CPUs, the training itself uses the host memory."""
    return draft.status.device is not None and draft.status.device.type == "GPU"


def is_out_of_memory(draft: Draft, failure: LastFailure) -> bool:
    """Whether the built-in loop ran out of memory. The memory of a custom command does not depend on `spec.training`."""
    return not draft.spec.trainer.command and failure.reason in (_OUT_OF_GPU_MEMORY, OUT_OF_HOST_MEMORY)


def was_reduction_refused(draft: Draft, failure: LastFailure) -> bool:
    """Whether the trainer refused the settings in the status, which use less memory: they do not fit, or the model does not support them."""
    return (
        draft.status.reduced_memory is not None
        and failure.exit_code == contract.EXIT_RECIPE
        and failure.reason in (_OUT_OF_GPU_MEMORY, _CANNOT_RECOMPUTE)
    )


def find_reduction(draft: Draft, failure: LastFailure) -> ReducedMemory | None:
    """The settings of the next attempt; None if no setting is left that uses less."""
    if failure.reason == OUT_OF_HOST_MEMORY and has_gpus(draft):
        return _reduce_checkpoints(draft)
    reduced = draft.status.reduced_memory or ReducedMemory()
    if failure.reason == _CANNOT_RECOMPUTE:
        # For all later attempts: they must not try it again.
        reduced = reduced.model_copy(update={"activation_checkpointing": "None"})
    return _reduce_training(draft, reduced)


def _reduce_training(draft: Draft, reduced: ReducedMemory) -> ReducedMemory | None:
    """The next smaller settings of the training: smaller passes, or recomputation, and smaller evaluation passes; None if none is left.

    Args:
        reduced: the settings that the next ones reduce further.
    """
    can_recompute = reduced.activation_checkpointing != "None"
    training = apply_to_training(draft.spec.training, reduced)
    batch_size, eval_size = training.per_device_batch_size, training.per_device_eval_batch_size
    changes: dict[str, Any] = {}
    # NB: KTO estimates a divergence from the sequences of one pass, so their number must not change.
    is_divisible = draft.spec.objective.type != "KTO"
    can_split = is_divisible and batch_size > 1
    # Of a single pass, a split would make a second pass, during which the gradients of the first stay in memory.
    would_keep_gradients = draft.spec.method.type == "Full" and training.gradient_accumulation == 1
    prefers_recomputation = would_keep_gradients or not can_split
    if can_recompute and training.activation_checkpointing != "Full" and prefers_recomputation:
        changes["activation_checkpointing"] = "Full"
    elif can_split:
        # A divisor, so that batch size times accumulation stays the same; the smallest, so that the batch shrinks least.
        divisor = next(number for number in range(2, batch_size + 1) if batch_size % number == 0)
        batch_size //= divisor
        changes["per_device_batch_size"] = batch_size
        changes["gradient_accumulation"] = training.gradient_accumulation * divisor
        plan = draft.status.plan
        # NB: for smaller passes, Auto would recompute less, by the estimate that was too low.
        if training.activation_checkpointing == "Auto" and plan and plan.activation_checkpointing != "None":
            changes["activation_checkpointing"] = plan.activation_checkpointing
    # NB: it may have been an evaluation that ran out of memory.
    if is_divisible and eval_size and eval_size > batch_size:
        changes["per_device_eval_batch_size"] = batch_size
    return reduced.model_copy(update=changes) if changes else None


def _reduce_checkpoints(draft: Draft) -> ReducedMemory | None:
    checkpoint, reduced = draft.spec.checkpoint, draft.status.reduced_memory or ReducedMemory()
    if checkpoint is None or "Sync" in (checkpoint.mode, reduced.checkpoint_mode):
        return None
    return reduced.model_copy(update={"checkpoint_mode": "Sync"})


def apply_to_training(training: Training, reduced: ReducedMemory | None) -> Training:
    """The hyperparameters with the settings that use less memory. The mode of checkpoints in `reduced` is no hyperparameter."""
    fields = type(training).model_fields
    # A pydantic model iterates over (name, value) of its fields.
    settings = {name: value for name, value in reduced or () if value is not None and name in fields}
    return training.model_copy(update=settings)


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


def describe_lack(number: int, failure: LastFailure) -> str:
    """What an attempt lacked, as the beginning of a sentence."""
    if failure.reason == OUT_OF_HOST_MEMORY:
        return f"attempt {number} used more memory than the limit of its container"
    if failure.reason == _CANNOT_RECOMPUTE:
        return f"attempt {number} cannot recompute the activations of this model"
    if failure.exit_code == contract.EXIT_RECIPE:
        return f"attempt {number} does not fit into memory, by the estimate of the trainer"
    return f"attempt {number} ran out of GPU memory"


def describe_remedy(draft: Draft) -> str:
    """What to change if no setting is left that uses less, as the end of a sentence."""
    changes = ["a lower training.maxLength"]
    if has_gpus(draft):
        changes.append("more GPUs with strategy FSDP")
    else:
        changes.append("a higher memory limit of the training pods")
    method = _SMALLER_METHODS.get(draft.spec.method.type)
    if method:
        changes.append(f"method {method}")
    return f"create a FineTuneJob with another name and {join_names(changes, 'or')}"
