"""How many experts a model has, and how many a token uses, by the names that configs of transformers give the numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_OF_A_LAYER = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_OF_A_TOKEN = ("num_experts_per_tok", "top_k_experts")
# The size of the experts that every token uses: as one, or of each of several.
_SHARED = ("shared_expert_intermediate_size", "shared_intermediate_size")
_EACH_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
# Models with a layer of intermediate_size beside the experts.
_BESIDE = ("gemma4_text", "hunyuan_v1_moe", "llama4_text")

Config = Callable[[str], Any]
"""Gives the value of a field, or None: `get` of a config.json, or `fields` of a config of transformers."""


def fields(config: PreTrainedConfig) -> Config:
    """The fields of a config, by the names that transformers gives them for all models."""
    return lambda name: getattr(config, name, None)


def of_a_layer(config: Config) -> int:
    """Return the number of experts of a layer; 0 where the model has none."""
    return _first(config, _OF_A_LAYER)


def of_a_token(config: Config) -> int:
    """Return how many of the experts of a layer a token is sent to; 0 where the model has none."""
    return _first(config, _OF_A_TOKEN) if of_a_layer(config) else 0


def width(config: Config) -> int:
    """Return the numbers that a token has between the products of a feed-forward layer, in all experts that it uses."""
    inner = _first(config, ("intermediate_size",)) or 4 * int(config("hidden_size"))
    used = of_a_token(config)
    if not used:
        return inner
    one = _first(config, ("moe_intermediate_size",)) or inner
    beside = inner if config("model_type") in _BESIDE else 0
    return (used + _first(config, _EACH_SHARED)) * one + _first(config, _SHARED) + beside


def _first(config: Config, names: tuple[str, ...]) -> int:
    found = next((value for name in names if (value := config(name))), 0)
    # Some configs have a number for each layer.
    return max(found) if isinstance(found, list | tuple) else int(found)
