"""The dropout of a base model: whether its attention has one, and how to take it all out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.modules.dropout import _DropoutNd

if TYPE_CHECKING:
    from torch import nn


def remove(model: nn.Module) -> None:
    """Set each probability of dropout in a model to 0, in training too; its config keeps what it says.

    Losses that compare answers are about differences of log-probabilities, and dropout differs between the two answers. References are
    computed without it: with it, the policy of DPO and KTO would not begin as its reference. The mode of the modules cannot say this, since their activation checkpointing depends
    on it.

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


def in_attention(model: nn.Module) -> bool:
    """Whether the model drops out weights of its attention in training, by whatever name its config has for that."""
    for module in model.modules():
        if "Attention" not in type(module).__name__:
            continue
        for name, value in {**vars(module), **dict(module.named_children())}.items():
            # `attention_dropout`, `attn_dropout`; `dropout` in OPT. The others, such as `resid_dropout`, are of what attention gives.
            if name == "dropout" or ("drop" in name and "att" in name):
                share = value.p if isinstance(value, _DropoutNd) else value
                if isinstance(share, float) and share > 0:
                    return True
    return False
