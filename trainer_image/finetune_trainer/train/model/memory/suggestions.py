"""Suggests changes of a recipe whose job does not fit into memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from finetune_trainer.train.model.memory.estimate import count_shards, estimate

if TYPE_CHECKING:
    from collections.abc import Callable

    from finetune_crds.distributed import Distributed
    from finetune_crds.recipe import Recipe
    from finetune_crds.training import Training
    from finetune_trainer.train.model.memory.model_shape import Shape
    from finetune_trainer.train.runtime.distributed import World

# Optimizers with smaller states that are suggested to a Full run.
_SMALLER_OPTIMIZERS: tuple[dict[str, str], ...] = (
    {"type": "AdamW8bit"},
    {"type": "AdamW8bit", "weights": "BF16"},
)


def suggest_changes(shape: Shape, recipe: Recipe, world: World, *, row_tokens: int, limit: float) -> str:
    """Describe the smallest changes of the recipe that make the estimate fit, with the most recomputation that the model supports.

    Args:
        shape: the model.
        recipe: of the job that does not fit.
        world: the ranks.
        row_tokens: tokens per row of a batch.
        limit: the bytes that a rank may use.
    """
    training, suggestions = recipe.training, []
    recompute = "Full" if shape.can_recompute else "None"

    def fits(
        shards: int,
        *,
        fitted_shape: Shape = shape,
        training: Training = training,
        batch_size: int = training.per_device_batch_size,
        distributed: Distributed = recipe.distributed,
    ) -> bool:
        """Whether the job fits with these changes, if it recomputes as much as the model supports."""
        changed_training = training.model_copy(update={"per_device_batch_size": batch_size})
        changed_recipe = recipe.model_copy(update={"training": changed_training, "distributed": distributed})
        needed_memory = estimate(
            fitted_shape, changed_recipe, shards=shards, row_tokens=row_tokens, recompute=recompute
        )
        return needed_memory.total <= limit

    shards = count_shards(recipe, world)
    # If the job already fits here, the recipe only recomputes less than `fits` assumes.
    if fits(shards):
        return "what would fit: training.activationCheckpointing Full (or Auto)"
    if training.per_device_batch_size > 1 and fits(shards, batch_size=1):
        addition = " with activationCheckpointing Full" if recompute == "Full" else ""
        suggestions.append(f"training.perDeviceBatchSize 1{addition}")
    # NB: not only the number of shards depends on the strategy, but also the precision in which gradients accumulate.
    with_fsdp = recipe.distributed.model_copy(update={"strategy": "FSDP"})
    if recipe.distributed.strategy != "FSDP" and fits(world.size, distributed=with_fsdp):
        suggestions.append("distributed.strategy FSDP")
    # Powers of two times the ranks, up to 2,048 times as many.
    ranks = world.size
    while ranks <= 1024 * world.size:
        ranks *= 2
        if fits(ranks, distributed=with_fsdp):
            suggestions.append(f"{ranks} ranks with FSDP")
            break
    if recipe.method.type == "Full":
        suggestions += _suggest_optimizer(recipe, lambda training: fits(shards, training=training))
    if recipe.method.type == "Full" and fits(
        shards, fitted_shape=_with_adapter(shape), training=_with_default_optimizer(training)
    ):
        suggestions.append("method LoRA")
    return (
        f"what would fit: {'; '.join(suggestions)}"
        if suggestions
        else "use a smaller model, or lower training.maxLength"
    )


def _suggest_optimizer(recipe: Recipe, fits: Callable[[Training], bool]) -> list[str]:
    """Describe the first smaller optimizer that fits, preferring to keep the precision of the weights."""
    # The BF16 weights of the second optimizer require precision BF16.
    optimizers = _SMALLER_OPTIMIZERS if recipe.training.precision == "BF16" else _SMALLER_OPTIMIZERS[:1]
    for fields in optimizers:
        smaller_optimizer = recipe.training.optimizer.model_copy(update={**fields, "momentum": None})
        if fits(recipe.training.model_copy(update={"optimizer": smaller_optimizer})):
            settings = " with ".join(f"{name} {value}" for name, value in fields.items())
            without = " without momentum" if recipe.training.optimizer.momentum is not None else ""
            return [f"training.optimizer.{settings}{without}"]
    return []


def _with_default_optimizer(training: Training) -> Training:
    """Return the hyperparameters with the default optimizer: adapters may not support the optimizer of a Full run."""
    return training.model_copy(update={"optimizer": type(training.optimizer)()})


def _with_adapter(shape: Shape) -> Shape:
    """Return the shape of the model with an adapter of about a hundredth of its parameters."""
    trained = shape.parameters // 100
    return replace(
        shape,
        trained=trained,
        embedding_trained=0,
        output_trained=0,
        copied=0,
        head=0,
        matrices=0,
        embeddings=0,
    )
