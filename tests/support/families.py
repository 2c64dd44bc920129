"""Tiny models of the families of transformers: how each is made small, and what the trainer does with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 320
"""Tokens of the tokenizer beside each model, and rows of its embedding."""

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_HEAD = {"head_dim": 8}
# Shorter than the documents.
_WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
# Enough heads for scores without ties.
_INDEXER = {"index_n_heads": 16, "index_head_dim": 8, "index_topk": 4}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
}
_CONVOLUTION = {"layer_types": ["conv", "full_attention"]}
_DEEPSEEK = {**_EXPERTS, **_LATENT, **_GROUPS}
_GEMMA_4 = {
    **_HEAD,
    **_WINDOW,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "global_head_dim": 16,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {**_HEAD, **_WINDOW, **_EXPERTS, "num_dense_layers": 1},
    "apertus": {},
    "arcee": {},
    "aria_text": {**_HEAD, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "axk1": _DEEPSEEK,
    "axk2": {**_DEEPSEEK, **_INDEXER},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "beam": {**_HEAD, **_WINDOW},
    "bert": {},
    "bert-generation": {},
    "biogpt": {},
    "bitnet": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "codegen": {"rotary_dim": 4},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {**_HEAD, **_WINDOW, "logit_scale": 0.25},
    "cohere2_moe": {**_HEAD, **_WINDOW, **_EXPERTS},
    "ctrl": {"dff": 48},
    "cwm": {**_HEAD, **_WINDOW},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": {**_DEEPSEEK, **_INDEXER},
    "diffllama": {},
    "doge": {},
    "dots1": {
        **_HEAD,
        **_EXPERTS,
        **_GROUPS,
        "n_shared_experts": 1,
        "layer_types": ["full_attention", "full_attention"],
    },
    "electra": {"embedding_size": 32},
    "ernie4_5": _HEAD,
    "ernie4_5_moe": {**_HEAD, **_EXPERTS},
    "exaone4": {**_HEAD, **_WINDOW},
    "exaone_moe": {**_HEAD, **_WINDOW, **_EXPERTS},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon_h1": {**_HEAD, **_MAMBA, "mamba_d_ssm": 64},
    "falcon_mamba": {},
    "flex_olmo": _EXPERTS,
    "flint": _HEAD,
    "gemma": _HEAD,
    "gemma2": {**_HEAD, **_WINDOW, "query_pre_attn_scalar": 8},
    "gemma3_text": {**_HEAD, **_WINDOW, "query_pre_attn_scalar": 8},
    "gemma3n_text": {
        **_HEAD,
        "sliding_window": 4,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "altup_num_inputs": 2,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": _GEMMA_4,
    "gemma4_unified_text": _GEMMA_4,
    "glm": _HEAD,
    "glm4": _HEAD,
    "glm4_moe": {**_HEAD, **_EXPERTS, **_GROUPS},
    "glm4_moe_lite": _DEEPSEEK,
    "glm_moe_dsa": {**_DEEPSEEK, **_INDEXER},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gpt_neox": {},
    "gpt_neox_japanese": {},
    "gpt_oss": {**_HEAD, **_WINDOW, **_EXPERTS},
    "gptj": {"rotary_dim": 4},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.5, "residual_multiplier": 0.5},
    "granite_swa": {**_HEAD, **_WINDOW},
    "granitemoe": _EXPERTS,
    "granitemoe_swa": {**_HEAD, **_WINDOW, **_EXPERTS},
    "granitemoehybrid": {
        **_EXPERTS,
        **_MAMBA,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 16,
    },
    "granitemoeshared": _EXPERTS,
    "helium": _HEAD,
    "hrm_text": _HEAD,
    "hunyuan_v1_dense": _HEAD,
    "hunyuan_v1_moe": {**_HEAD, **_EXPERTS},
    "hy_v3": {**_HEAD, **_EXPERTS, **_GROUPS},
    "hy_v4": {**_DEEPSEEK, **_INDEXER},
    "hyperclovax": {**_HEAD, "logits_scaling": 4.0},
    "inkling_text": {**_HEAD, **_EXPERTS},
    "jais2": _HEAD,
    "jamba": {
        "num_experts": 2,
        "mamba_d_state": 4,
        "use_mamba_kernels": False,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "jetmoe": {**_EXPERTS, "kv_channels": 8},
    "kolibri1": {**_HEAD, **_WINDOW, **_EXPERTS},
    "laguna": {**_HEAD, **_WINDOW, **_EXPERTS},
    "lfm2": _CONVOLUTION,
    "lfm2_moe": {**_CONVOLUTION, **_EXPERTS, "num_dense_layers": 1},
    "lfm3": _CONVOLUTION,
    "llama": _HEAD,
    "llama4_text": {
        **_HEAD,
        **_EXPERTS,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 8,
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "longcat_flash": {
        **_LATENT,
        "head_dim": 4,
        "num_layers": 1,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "n_routed_experts": 4,
        "zero_expert_num": 1,
        "moe_topk": 2,
    },
    "mamba": {},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "marian": {},
    "mellum": {**_HEAD, **_WINDOW, **_EXPERTS},
    "mimo_v2_flash": {**_HEAD, **_WINDOW, **_EXPERTS},
    "minicpm3": _LATENT,
    "minimax": {
        **_HEAD,
        **_EXPERTS,
        "layer_types": ["linear_attention", "full_attention"],
        "block_size": 8,
    },
    "minimax_m2": {**_HEAD, **_EXPERTS},
    "minimax_m3_vl_text": {**_HEAD, **_EXPERTS},
    "ministral": {**_HEAD, **_WINDOW},
    "ministral3": _HEAD,
    "mistral": {**_HEAD, "sliding_window": 4},
    "mixtral": {**_HEAD, **_EXPERTS},
    "modernbert-decoder": _WINDOW,
    "mpt": {},
    "nanochat": _HEAD,
    "nemotron": {},
    "nemotron_h": {
        **_HEAD,
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "ssm_state_size": 8,
        "chunk_size": 8,
    },
    "olmo": {},
    "olmo2": {},
    "olmo3": _WINDOW,
    "olmo_hybrid": _LINEAR,
    "olmoe": _EXPERTS,
    "openai-gpt": {},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "persimmon": {},
    "phi": {},
    "phi3": {"sliding_window": 4},
    "phimoe": {**_EXPERTS, "sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3": _HEAD,
    "qwen3_5_moe_text": {**_HEAD, **_EXPERTS, **_LINEAR},
    "qwen3_5_text": {**_HEAD, **_LINEAR},
    "qwen3_moe": {**_HEAD, **_EXPERTS},
    "qwen3_next": {**_HEAD, **_EXPERTS, **_LINEAR},
    "recurrent_gemma": {
        "attention_window_size": 4,
        "lru_width": 32,
        "block_types": ["recurrent", "attention"],
    },
    "roberta": {},
    "rwkv": {"attention_hidden_size": 32},
    "seed_oss": _HEAD,
    "smollm3": {},
    "solar_open": {**_HEAD, **_EXPERTS, **_GROUPS},
    "stablelm": {},
    "starcoder2": {"sliding_window": 4},
    "vaultgemma": {**_HEAD, **_WINDOW, "query_pre_attn_scalar": 8},
    "xglm": {"d_model": 32, "ffn_dim": 48},
    "xlm": {"causal": True},
    "youtu": _LATENT,
    "zaya": {**_HEAD, **_EXPERTS, "num_experts_per_tok": 1},
}
"""What each family needs to be small, by its model type: experts, windows that are shorter than the documents, recurrent layers."""

# Fields that a config has under other names, or not at all.
_ABSENT = {
    "dbrx": {
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    },
}

_REFUSED = {
    **dict.fromkeys(
        ("bert", "bert-generation", "electra", "roberta"),
        "an encoder (is_decoder is false in its config.json): choose a causal language model",
    ),
    **dict.fromkeys(
        ("bloom", "falcon_mamba", "mamba", "mamba2", "marian", "mpt", "rwkv"),
        "which does not accept position ids, so the documents of a row cannot be kept apart: choose another model",
    ),
    **dict.fromkeys(
        ("inkling_text", "modernbert-decoder"),
        "which has an unsupported LM head",
    ),
}
"""Families that no recipe can train, and how the sentence goes on after the model type."""
_REFUSED_PACKED = {
    # Recurrent layers and convolutions.
    "bamba", "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "lfm3", "minimax", "nemotron_h", "olmo_hybrid",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "zaya",
    # Chunks, or an indexer that chooses tokens.
    "axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4", "inkling_text", "llama4_text",
    # A mask without documents.
    "gpt_oss",
    # Attention of earlier designs of transformers.
    "biogpt", "codegen", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "openai-gpt", "stablelm", "xglm", "xlm",
}  # fmt: skip
"""Families that are trained with training.packing false only."""
_NOT_RECOMPUTED = {"ctrl", "gpt_neox_japanese", "jetmoe", "openai-gpt", "xlm"}
"""Families whose layers transformers cannot recompute."""
_NO_SCORE_HEAD = {
    "afmoe", "apertus", "aria_text", "beam", "bitnet", "cohere", "cohere2", "cohere2_moe", "cwm", "dbrx", "dots1",
    "ernie4_5", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "gemma3n_text", "gemma4_text",
    "gemma4_unified_text", "glm4_moe", "glm4_moe_lite", "granite", "granite_swa", "granitemoe", "granitemoe_swa",
    "granitemoeshared", "hrm_text", "hy_v3", "hyperclovax", "jais2", "kolibri1", "laguna", "longcat_flash", "mellum",
    "mimo_v2_flash", "minimax_m2", "minimax_m3_vl_text", "nanochat", "olmoe", "solar_open", "vaultgemma", "youtu",
}  # fmt: skip
"""Families, of those whose rows can be packed, that have no sequence classification model in transformers."""
_NO_REWARDS = {
    "ctrl": "whose sequence classification model has no linear layer score",
    "phimoe": "which routes tokens to random experts in training",
    **dict.fromkeys(
        _NO_SCORE_HEAD, "which has no sequence classification model in this version of transformers"
    ),
}
"""How the sentence goes on by which such a family is refused as a reward model."""
COMMON = (
    "deepseek_v3", "gemma2", "gemma3_text", "gemma3n_text", "gpt2", "gpt_oss", "granite", "jetmoe", "llama", "llama4_text",
    "mistral", "mixtral", "nemotron", "olmo2", "opt", "phi3", "phimoe", "qwen2", "qwen3_moe", "qwen3_next",
)  # fmt: skip
"""Twenty families for a faster tier: the commonest, and one of each kind of layer and of each mistake that was made."""

TRAINED = "trained"
"""The outcome of a run whose loss and gradients are right."""


def expected_outcome(model_type: str, *, packing: bool, recomputation: str) -> str:
    """Return what the trainer does with a family: `TRAINED`, or how its sentence begins."""
    if packing and model_type in _REFUSED_PACKED:
        return (
            f"model.base BASE is a {model_type}, whose layers mix the documents of a row: "
            "set training.packing to false"
        )
    if model_type in _REFUSED:
        return f"model.base BASE is a {model_type}, {_REFUSED[model_type]}"
    if recomputation != "None" and model_type in _NOT_RECOMPUTED:
        return f"training.activationCheckpointing {recomputation} is not supported by BASE"
    return TRAINED


def expected_reward_outcome(model_type: str) -> str:
    """Return what the trainer does with a family as a reward model, as `expected_outcome` does."""
    if model_type in _REFUSED_PACKED:
        return f"model.base BASE is a {model_type}, whose layers mix the documents of a row: choose another model"
    reason = _NO_REWARDS.get(model_type)
    if model_type in _REFUSED or reason is None:
        return expected_outcome(model_type, packing=True, recomputation="None")
    return f"model.base BASE is a {model_type}, {reason}"


def table() -> str:
    """Return the table of docs/finetunejob/families.md."""
    lines = [
        "| Family | `packing: true` | `packing: false` | `activationCheckpointing` | RewardModel |",
        "|---|---|---|---|---|",
    ]
    for model_type in FAMILIES:
        if model_type in _REFUSED:
            reason = _REFUSED[model_type].partition(":")[0]
            lines.append(f"| {model_type} | no | no | refused: {reason} | no |")
        else:
            packed = "no" if model_type in _REFUSED_PACKED else "yes"
            kinds = "None" if model_type in _NOT_RECOMPUTED else "any"
            rewards = "yes" if expected_reward_outcome(model_type) == TRAINED else "no"
            lines.append(f"| {model_type} | {packed} | yes | {kinds} | {rewards} |")
    return "\n".join(lines) + "\n"


def config_of(model_type: str) -> Any:
    """Return the config of a tiny model without dropout."""
    from transformers import AutoConfig

    fields = {name: value for name, value in _SMALL.items() if name not in _ABSENT.get(model_type, ())}
    config = AutoConfig.for_model(model_type, **fields | FAMILIES[model_type])
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and ("drop" in name):
            setattr(config, name, 0.0)
    return config


def save(model_type: str, folder: Path) -> Path:
    """Save a tiny model of random weights, large enough that each of them matters, with a tokenizer."""
    from transformers import AutoModelForCausalLM

    from support.small_tokenizer import save_tokenizer

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(model_type))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder
