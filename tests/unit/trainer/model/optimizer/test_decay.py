"""What decays, and what Muon takes, in models whose weights are not what their number of dimensions says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Trainer

from finetune_trainer.train.model.optimizer.decay import find_decaying, find_matrices

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
# Of each model type: more of its configuration; and parts of the names of weights that have two dimensions or more and do not
# decay, and of those that Muon leaves to AdamW although they have two.
MODELS: dict[str, tuple[dict[str, Any], set[str], set[str]]] = {
    "llama": ({}, set(), set()),
    "gpt2": ({"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}, set(), set()),
    "gpt_oss": (
        EXPERTS | {"head_dim": 16},
        {"experts.gate_up_proj_bias", "experts.down_proj_bias"},
        {"experts.gate_up_proj_bias", "experts.down_proj_bias", "router.weight"},
    ),
    "recurrent_gemma": (
        {"lru_width": 32, "block_types": ["recurrent", "recurrent", "attention"], "attention_window_size": 8},
        {"rg_lru.input_gate_bias", "rg_lru.recurrent_gate_bias"},
        {"rg_lru.input_gate_bias", "rg_lru.recurrent_gate_bias"},
    ),
    "jamba": (
        {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
        {"mamba.A_log"},
        {"mamba.A_log", "router.weight"},
    ),
}


def build(kind: str, **config: Any) -> nn.Module:
    """A tiny model without values."""
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | config))
    return model


def last_parts(names: set[str]) -> set[str]:
    """The last two parts of each name."""
    return {".".join(name.split(".")[-2:]) for name in names}


@pytest.mark.parametrize(
    ("kind", "config", "rates"), [(kind, row[0], row[1]) for kind, row in MODELS.items()], ids=MODELS
)
def test_what_decays(kind: str, config: dict[str, Any], rates: set[str]) -> None:
    model = build(kind, **config)
    decaying = find_decaying(model)
    names = {name for name, weight in model.named_parameters() if weight in decaying}
    matrices = {name for name, weight in model.named_parameters() if weight.ndim > 1}
    assert last_parts(matrices - names) == rates
    by_transformers = set(Trainer.get_decay_parameter_names(None, model))
    assert names == {name for name in by_transformers & matrices if not name.endswith("A_log")}


@pytest.mark.parametrize(
    ("kind", "config", "adamw_names"), [(kind, row[0], row[2]) for kind, row in MODELS.items()], ids=MODELS
)
def test_what_muon_takes(kind: str, config: dict[str, Any], adamw_names: set[str]) -> None:
    model = build(kind, **config)
    layers: Any = max((module for module in model.modules() if isinstance(module, nn.ModuleList)), key=len)
    muon_matrices = set(find_matrices(layers))
    remaining = {
        name for name, weight in layers.named_parameters() if weight.ndim == 2 and weight not in muon_matrices
    }
    assert muon_matrices
    assert {weight.ndim for weight in muon_matrices} == {2}
    assert last_parts(remaining) == adamw_names
