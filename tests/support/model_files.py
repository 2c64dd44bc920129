"""The folders of weights that a base model may come in."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from finetune_trainer.examples.tokenizer import load_tokenizer
from support import networks


def saved(
    base: Path, folder: Path, *, tied: bool = True, pieces: str = "5GB", dtype: Any = torch.float32
) -> Path:
    """The base, saved another way."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.save_pretrained(folder, max_shard_size=pieces)
    load_tokenizer(networks.recipe(base).model, base).save_pretrained(folder)
    return folder


def too_large_for_fp16(base: Path, folder: Path, factor: float) -> Path:
    """A base of which some weights are numbers of FP16, whose products are none."""
    from transformers import AutoModelForCausalLM

    saved(base, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    mlp = model.model.layers[0].mlp
    for layer in (mlp.up_proj, mlp.down_proj):
        layer.weight.data.mul_(factor)
        assert layer.weight.isfinite().all() == math.isfinite(factor)
    model.save_pretrained(folder)
    return folder


def with_biases(base: Path, folder: Path) -> Path:
    """A model like the base with biases, and an output layer of its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(base)
    config.attention_bias = config.mlp_bias = True
    config.tie_word_embeddings = False
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(std=0.1)
    model.save_pretrained(folder)
    load_tokenizer(networks.recipe(base).model, base).save_pretrained(folder)
    return folder


def as_pickle(base: Path, folder: Path) -> Path:
    """The base as it was saved before there were safetensors."""
    from safetensors.torch import load_file

    saved(base, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def without_prefix(base: Path, folder: Path) -> Path:
    """The base with the weights' names of the decoder alone, which transformers knows to rename."""
    from safetensors.torch import load_file, save_file

    saved(base, folder)
    weights = load_file(folder / "model.safetensors")
    renamed = {name.removeprefix("model."): value for name, value in weights.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    return folder


def apart(base: Path, folder: Path, *, embedding: str = "model.embed_tokens.weight") -> Path:
    """The base with an output layer of its own in its files, which its config ties to the embedding."""
    from safetensors.torch import load_file, save_file

    saved(base, folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0)
    weights[embedding] = weights.pop("model.embed_tokens.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def twice(base: Path, folder: Path) -> Path:
    """The base with the weight that is tied twice in its files."""
    from safetensors.torch import load_file, save_file

    saved(base, folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def experts(base: Path, folder: Path, *, of: str, pieces: str = "5GB", **options: Any) -> Path:
    """A mixture of experts with the tokenizer of the base, whose files hold each expert by itself."""
    from transformers import AutoConfig, AutoModelForCausalLM

    like = AutoConfig.from_pretrained(base)
    config = AutoConfig.for_model(
        of,
        vocab_size=like.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=like.bos_token_id,
        eos_token_id=like.eos_token_id,
        pad_token_id=like.pad_token_id,
        **{"num_key_value_heads": 2, **options},
    )
    torch.manual_seed(4)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size=pieces)
    load_tokenizer(networks.recipe(base).model, base).save_pretrained(folder)
    return folder


# A small DeepSeek-V3, whose routers have a buffer in the files.
CORRECTED: dict[str, Any] = {
    "of": "deepseek_v3",
    # Its latent attention has keys for each head.
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


def corrected(base: Path, folder: Path, correction: float | None) -> Path:
    """A model in bf16 whose router has corrections, in fp32 as transformers keeps them, or none in its files."""
    from safetensors.torch import load_file, save_file

    experts(base, folder, **CORRECTED, dtype="bfloat16")
    weights = load_file(folder / "model.safetensors")
    for name in list(weights):
        weights[name] = weights[name].bfloat16()
        if "e_score_correction_bias" in name:
            bias = weights.pop(name).float()
            if correction is not None:
                weights[name] = bias + correction
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"of": "mixtral", "num_local_experts": 4},
    "Qwen3 MoE": {"of": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 16, "head_dim": 8},
}
KINDS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "one file": (saved, {}),
    "several files": (saved, {"pieces": "20KB"}),
    "untied": (saved, {"tied": False}),
    "untied in several files": (saved, {"tied": False, "pieces": "20KB"}),
    "stored in half": (saved, {"dtype": torch.bfloat16}),
    "a pickle": (as_pickle, {}),
    "other names": (without_prefix, {}),
    **{kind: (experts, options) for kind, options in EXPERTS.items()},
    "Mixtral in several files": (experts, {**EXPERTS["Mixtral"], "pieces": "20KB"}),
}
READ_BY_RANK_0 = {"a pickle"}


def whole_weights(network: Any) -> dict[str, torch.Tensor]:
    """The base's weights, unsharded, by name."""
    return {
        name: (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach()
        for name, weight in network.base.named_parameters()
    }
