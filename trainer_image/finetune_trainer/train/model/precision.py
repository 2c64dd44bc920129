"""The dtypes of a network's computation and of its weights."""

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
    """Check that a GPU supports the precision of a recipe: an older GPU emulates BF16, and its attention keeps all scores in memory.

    Raises:
        RecipeRefusedError: the GPU does not support the precision.
    """
    if recipe.training.precision == "BF16" and card is not None and card.capability < _MIN_BF16_CAPABILITY:
        (min_major, min_minor), (major, minor) = _MIN_BF16_CAPABILITY, card.capability
        raise RecipeRefusedError(
            f"training.precision BF16, the default, requires a GPU of compute capability {min_major}.{min_minor} or higher, but {card.name} "
            f"has {major}.{minor}: set training.precision to FP16, or request another GPU"
        )


def inference_dtype(card: Card | None, trained_in: str) -> torch.dtype:
    """Return the dtype for inference.

    - BF16 on a GPU that supports it
    - FP32 on a CPU, and on an older GPU after training in FP32
    - FP16 on an older GPU after training in another precision

    Args:
        card: the GPU; None for a CPU.
        trained_in: the precision of the training.
    """
    if card is not None and card.capability >= _MIN_BF16_CAPABILITY:
        return torch.bfloat16
    return torch.float32 if card is None or trained_in == "FP32" else torch.float16


def compute_dtype(precision: str) -> torch.dtype:
    """Return the dtype of the forward and backward passes."""
    return _COMPUTE_DTYPES[precision]


def trained_dtype(training: Training) -> torch.dtype:
    """Return the dtype of trained weights and of their gradients."""
    return torch.bfloat16 if training.optimizer.weights == "BF16" else torch.float32


def base_dtype(recipe: Recipe) -> torch.dtype:
    """Return the dtype of the base model's weights: frozen weights have the precision of the computation."""
    return (
        trained_dtype(recipe.training)
        if recipe.method.type == "Full"
        else compute_dtype(recipe.training.precision)
    )
