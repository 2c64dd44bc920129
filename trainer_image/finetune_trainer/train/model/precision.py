"""The types of the numbers that a network computes in, and of those that it keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from finetune_trainer.pod.exit_status import RecipeRefusedError

if TYPE_CHECKING:
    from finetune_crds.recipe import Recipe
    from finetune_crds.training import Training
    from finetune_trainer.train.runtime.device import Card

_COMPUTE_DTYPES = {"BF16": torch.bfloat16, "FP16": torch.float16, "FP32": torch.float32}

# The compute capability from which GPUs have instructions for BF16.
_MIN_BF16_CAPABILITY = (8, 0)


def check(recipe: Recipe, card: Card | None) -> None:
    """Check that a GPU computes in the precision of a recipe: an older one emulates BF16, and attention needs memory for all scores.

    Raises:
        RecipeRefusedError: it does not.
    """
    if recipe.training.precision == "BF16" and card is not None and card.capability < _MIN_BF16_CAPABILITY:
        raise RecipeRefusedError(
            f"training.precision BF16, the default, needs a GPU of compute capability {_MIN_BF16_CAPABILITY[0]}.{_MIN_BF16_CAPABILITY[1]} or higher, and {card.name} "
            f"has {card.capability[0]}.{card.capability[1]}: set training.precision to FP16, or ask for another GPU"
        )


def inference_dtype(card: Card | None, trained_in: str) -> torch.dtype:
    """Return what a model answers in on a GPU; without one, or where it was trained in FP32 for lack of BF16, in FP32.

    Args:
        card: the GPU; None: a CPU.
        trained_in: the precision of the training.
    """
    if card is not None and card.capability >= _MIN_BF16_CAPABILITY:
        return torch.bfloat16
    return torch.float32 if card is None or trained_in == "FP32" else torch.float16


def compute_dtype(precision: str) -> torch.dtype:
    """Return what forward and backward compute in."""
    return _COMPUTE_DTYPES[precision]


def trained_dtype(training: Training) -> torch.dtype:
    """Return the type of trained weights and of their gradients."""
    return torch.bfloat16 if training.optimizer.weights == "BF16" else torch.float32


def base_dtype(recipe: Recipe) -> torch.dtype:
    """Return the type of the base model's weights: frozen ones have the precision they compute in."""
    return (
        trained_dtype(recipe.training)
        if recipe.method.type == "Full"
        else compute_dtype(recipe.training.precision)
    )
