"""Takes the dropout out of a base model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.modules.dropout import _DropoutNd

if TYPE_CHECKING:
    from torch import nn


def remove(model: nn.Module) -> None:
    """Set each probability of dropout in a model to 0, in training too; its config keeps what it says.

    Losses that compare answers are about differences of log-probabilities, and dropout differs between the two answers. References are
    computed without it: with it, the policy of DPO and KTO would not begin as its reference. The mode of the modules cannot say this, since
    their activation checkpointing depends on it.

    Args:
        model: of transformers, without an adapter, whose dropout is the recipe's.
    """
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        # Attention and some layers have a number: `attention_dropout`, `dropout`, `layerdrop`, `resid_pdrop`.
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
