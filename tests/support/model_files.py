"""The folders of weights that a base model may come in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from finetune_trainer.tokenizer import load_tokenizer
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


KINDS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "one file": (saved, {}),
    "several files": (saved, {"pieces": "20KB"}),
    "untied": (saved, {"tied": False}),
    "untied in several files": (saved, {"tied": False, "pieces": "20KB"}),
    "stored in half": (saved, {"dtype": torch.bfloat16}),
    "a pickle": (as_pickle, {}),
    "other names": (without_prefix, {}),
}
READ_BY_RANK_0 = {"a pickle", "other names"}


def whole_weights(network: Any) -> dict[str, torch.Tensor]:
    """The base's weights, unsharded, by name."""
    return {
        name: (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach()
        for name, weight in network.base.named_parameters()
    }
