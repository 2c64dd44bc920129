"""Reads how many experts a layer has and a token uses, and how wide they are, from the fields of transformers' configs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# The number of experts of a layer, and the number of those that a token is sent to.
_PER_LAYER_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN_FIELDS = ("num_experts_per_tok", "top_k_experts")
# Experts that every token uses: a config has either their total size, or their number if each has the usual size.
_SHARED_SIZE_FIELDS = ("shared_expert_intermediate_size", "shared_intermediate_size")
_SHARED_COUNT_FIELDS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
# Models with a dense layer of intermediate_size in addition to the experts.
_MODELS_WITH_DENSE_LAYER = ("gemma4_text", "hunyuan_v1_moe", "llama4_text")

Config = Callable[[str], Any]
"""Returns the value of a field, or None: `get` of a config.json, or `field_reader` of a config of transformers."""


def field_reader(config: PreTrainedConfig) -> Config:
    """Return a function that reads the fields of a config by the names that transformers uses for all models."""
    return lambda name: getattr(config, name, None)


def count_per_layer(read_field: Config) -> int:
    """Return the number of experts of a layer; 0 if the model has no experts."""
    return _read_first(read_field, _PER_LAYER_FIELDS)


def count_per_token(read_field: Config) -> int:
    """Return the number of experts of a layer that a token is sent to; 0 if the model has no experts."""
    return _read_first(read_field, _PER_TOKEN_FIELDS) if count_per_layer(read_field) else 0


def compute_feed_forward_width(read_field: Config) -> int:
    """Return the width of a token between the products of a feed-forward layer, summed over all experts that the token uses."""
    # Without the field, four times the hidden size, as in GPT-2.
    default_width = _read_first(read_field, ("intermediate_size",)) or 4 * int(read_field("hidden_size"))
    experts_per_token = count_per_token(read_field)
    if not experts_per_token:
        return default_width
    expert_width = _read_first(read_field, ("moe_intermediate_size",)) or default_width
    experts = experts_per_token + _read_first(read_field, _SHARED_COUNT_FIELDS)
    shared_width = _read_first(read_field, _SHARED_SIZE_FIELDS)
    dense_width = default_width if read_field("model_type") in _MODELS_WITH_DENSE_LAYER else 0
    return experts * expert_width + shared_width + dense_width


def _read_first(read_field: Config, names: tuple[str, ...]) -> int:
    """Return the value of the first field that is set; 0 if none is."""
    for name in names:
        value = read_field(name)
        if value:
            # Some configs have a number for each layer.
            return max(value) if isinstance(value, list | tuple) else int(value)
    return 0
