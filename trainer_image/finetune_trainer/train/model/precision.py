"""The types of the numbers that a network computes in, and of those that it keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from finetune_crds.recipe import Recipe
    from finetune_crds.training import Training

_COMPUTE = {"BF16": torch.bfloat16, "FP16": torch.float16, "FP32": torch.float32}


def compute(precision: str) -> torch.dtype:
    """Return what forward and backward compute in."""
    return _COMPUTE[precision]


def trained(training: Training) -> torch.dtype:
    """Return the type of trained weights and of their gradients."""
    return torch.bfloat16 if training.optimizer.weights == "BF16" else torch.float32


def base(recipe: Recipe) -> torch.dtype:
    """Return the type of the base model's weights: frozen ones have the precision they compute in."""
    return trained(recipe.training) if recipe.method.type == "Full" else compute(recipe.training.precision)
