"""How many experts a model has, and how many a token uses, by the names that configs of transformers give the numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_PER_LAYER_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN_FIELDS = ("num_experts_per_tok", "top_k_experts")
# The size of the experts that every token uses: as one, or of each of several.
_SHARED_SIZE_FIELDS = ("shared_expert_intermediate_size", "shared_intermediate_size")
_SHARED_COUNT_FIELDS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
# Models with a layer of intermediate_size beside the experts.
_MODELS_WITH_DENSE_LAYER = ("gemma4_text", "hunyuan_v1_moe", "llama4_text")

Config = Callable[[str], Any]
"""Gives the value of a field, or None: `get` of a config.json, or `fields` of a config of transformers."""


def field_reader(config: PreTrainedConfig) -> Config:
    """The fields of a config, by the names that transformers gives them for all models."""
    return lambda name: getattr(config, name, None)


def count_per_layer(config: Config) -> int:
    """Return the number of experts of a layer; 0 where the model has none."""
    return _read_first(config, _PER_LAYER_FIELDS)


def count_per_token(config: Config) -> int:
    """Return how many of the experts of a layer a token is sent to; 0 where the model has none."""
    return _read_first(config, _PER_TOKEN_FIELDS) if count_per_layer(config) else 0


def compute_feed_forward_width(config: Config) -> int:
    """Return the numbers that a token has between the products of a feed-forward layer, in all experts that it uses."""
    default_width = _read_first(config, ("intermediate_size",)) or 4 * int(config("hidden_size"))
    experts_per_token = count_per_token(config)
    if not experts_per_token:
        return default_width
    expert_width = _read_first(config, ("moe_intermediate_size",)) or default_width
    dense_width = default_width if config("model_type") in _MODELS_WITH_DENSE_LAYER else 0
    return (
        (experts_per_token + _read_first(config, _SHARED_COUNT_FIELDS)) * expert_width
        + _read_first(config, _SHARED_SIZE_FIELDS)
        + dense_width
    )


def _read_first(config: Config, names: tuple[str, ...]) -> int:
    value = next((value for name in names if (value := config(name))), 0)
    # Some configs have a number for each layer.
    return max(value) if isinstance(value, list | tuple) else int(value)
