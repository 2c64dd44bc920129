"""The sizes of Llama 3.1, without weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from finetune_trainer.train.model.adapters import adapt
from finetune_trainer.train.model.adapters.new_tokens import NO_TOKENS, NewTokens
from finetune_trainer.train.model.memory.model_shape import Shape
from finetune_trainer.train.model.network.trained_network import Network
from finetune_trainer.train.model.weights import load
from finetune_trainer.train.objectives.sft import Sft
from support import networks

LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
LLAMA_70B = {
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
PARAMETERS = {"8B": 8_030_261_248, "70B": 70_553_706_496}
# Rank 16 on all seven products of a layer: 16 x 32 x (2 x 8192 + 2 x 5120 + 3 x 18432).
ADAPTER_8B = 41_943_040
ENDS_8B = 2 * 128256 * 4096


def shape_of(
    config: dict[str, int],
    method: str,
    lora: dict[str, Any] | None = None,
    new: NewTokens = NO_TOKENS,
    *,
    tied: bool = False,
) -> Shape:
    """The sizes of a model with what a method trains."""
    from transformers import LlamaConfig

    model = load.build_empty_model(
        LlamaConfig(**config, tie_word_embeddings=tied), torch.bfloat16, trust=False
    )
    new.enlarge(model)
    spec = {"type": method, **({"lora": lora} if lora else {})}
    # Adapters have no values either.
    with torch.device("meta"):
        adapted = adapt.adapt(model, networks.recipe(Path("/base"), method=spec).method, "base", new)
    return Shape.of(Network(adapted, Sft()), None, quantized=False)


def small_shape() -> Shape:
    """The sizes of the small Llama of the tests, all of which is trained."""
    return Shape.of(Network(networks.small_llama(), Sft()), None, quantized=False)


@cache
def llama_shapes() -> dict[str, Shape]:
    """The sizes of Llama 3.1 with what common methods train."""
    return {
        "8B Full": shape_of(LLAMA_8B, "Full"),
        "8B LoRA": shape_of(LLAMA_8B, "LoRA"),
        "8B whole": shape_of(LLAMA_8B, "LoRA", {"modulesToSave": ["embed_tokens", "lm_head"]}),
        "8B PiSSA": shape_of(LLAMA_8B, "LoRA", {"init": "PiSSA"}),
        "70B Full": shape_of(LLAMA_70B, "Full"),
    }
