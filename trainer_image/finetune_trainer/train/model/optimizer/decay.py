"""Selects the weights that decay, and the matrices of layers.

The number of dimensions alone is not enough: the biases of gpt-oss's experts and Jamba's `A_log` are tensors
of two dimensions.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import nn

from finetune_trainer.train.model.network.trained_network import is_linear

if TYPE_CHECKING:
    from collections.abc import Iterable

# Biases and norms, by their names in lower case. Source: transformers' Trainer.get_decay_parameter_names.
_NOT_DECAYING = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
# The rates of state space models. Source: their reference code marks A_log and D with `_no_weight_decay`
# (github.com/state-spaces/mamba, mamba_simple.py); D has one dimension, so it does not decay anyway.
_STATE_SPACE_RATES = re.compile(r"(?:^|\.)A_log$")


def find_decaying(model: nn.Module) -> set[nn.Parameter]:
    """Return the weights that decay: weights with at least two dimensions that are not biases, norms or rates by their names."""
    inside_norms = {
        weight
        for module in model.modules()
        if isinstance(module, nn.LayerNorm)
        for weight in module.parameters()
    }

    def is_decaying(name: str, weight: nn.Parameter) -> bool:
        is_bias_or_norm = weight in inside_norms or _NOT_DECAYING.search(name.lower())
        return weight.ndim > 1 and not is_bias_or_norm and not _STATE_SPACE_RATES.search(name)

    return {weight for name, weight in model.named_parameters() if is_decaying(name, weight)}


def find_matrices(layers: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the trained matrices that layers multiply their inputs with, in order: the weights of Linear and Conv1D."""
    weights: list[Any] = [
        module.weight for layer in layers for module in layer.modules() if is_linear(module)
    ]
    return [weight for weight in dict.fromkeys(weights) if weight.requires_grad]
