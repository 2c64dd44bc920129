"""Counts the graphs that `training.compile` makes of a model: traces a small model of the same architecture on a CPU, without compiling."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.attention import varlen

from finetune_trainer.train import build
from finetune_trainer.train.data import pack
from finetune_trainer.train.data.dataset import Split
from finetune_trainer.train.model import shard
from finetune_trainer.train.model.adapters import adapt
from finetune_trainer.train.model.checks import recomputation
from finetune_trainer.train.model.network.trained_network import Network, decoder_layers
from finetune_trainer.train.model.weights import fill, load
from finetune_trainer.train.runtime.distributed import World
from finetune_trainer.train.runtime.recipe import row_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_crds.recipe import Recipe
    from finetune_crds.status_parts import Recomputation
    from finetune_trainer.train.runtime.device import Card

# The number of batches, each of one packed sequence.
_PACKS = 20
# The context and the vocabulary of the small model.
_MAX_LENGTH, _VOCABULARY = 64, 128
# Fields of a config that make a model small; fields that a config lacks are not added.
_SMALL_SIZES = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}


def count_graphs(recipe: Recipe, source: Path, card: Card) -> tuple[int, int]:
    """Return the number of graphs over some batches of different lengths, and the number of kinds of layers.

    Args:
        recipe: the recipe.
        source: folder of the model's config.
        card: the GPU, which decides on the attention kernel.

    Raises:
        RecipeRefusedError: the model cannot be loaded or adapted.
    """
    graphs: list[object] = []

    def record_graph(graph: Any, _inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    small = _shrink_recipe(recipe)
    world = World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cpu"), card=card)
    with tempfile.TemporaryDirectory(prefix="finetune-") as folder:
        _write_small_config(source, Path(folder))
        model = load.build_skeleton(small, Path(folder), world)
    adapted = adapt.adapt(model, small.method, small.model.base)
    network = Network(adapted, build.build_objective(small, None), small.training.neftune_alpha)
    recomputation.enable(network.model, _choose_recomputation(recipe), compiled=True)
    fill.materialize(network, world.device)
    for weight in network.parameters():
        nn.init.normal_(weight, std=0.02)
    kinds = {(type(layer), getattr(layer, "attention_type", None)) for layer in decoder_layers(network)}
    torch.compiler.reset()
    shard.compile_layers(network, record_graph)
    _let_attention_run_on_cpus()
    network.train()
    for batch in _make_batches(small):
        loss, _ = network(batch)
        loss.backward()
    return len(graphs), len(kinds)


def _shrink_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe for the small model, not quantized: 4-bit weights change no graph, but can only be made from values."""
    training = recipe.training
    changes: dict[str, Any] = {
        "max_length": _MAX_LENGTH,
        "activation_checkpointing": _choose_recomputation(recipe),
    }
    method = recipe.method
    if method.type == "QLoRA":
        method = method.model_copy(update={"type": "LoRA", "quantization": None})
    return recipe.model_copy(update={"training": training.model_copy(update=changes), "method": method})


def _choose_recomputation(recipe: Recipe) -> Recomputation:
    kind = recipe.training.activation_checkpointing
    # Auto chooses None if the memory allows it, which is assumed here.
    return "None" if kind == "Auto" else kind


def _write_small_config(source: Path, to: Path) -> None:
    """Write the config of a small model of the same architecture."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    sizes = {name: size for name, size in _SMALL_SIZES.items() if name in config}
    heads, key_value_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    # Grouped-query attention stays grouped.
    if key_value_heads is not None:
        sizes["num_key_value_heads"] = 4 if key_value_heads == heads else 2
    # Enough layers to contain each type, and at least two.
    layer_types = config.get("layer_types") or []
    layers = max(2, *(layer_types.index(each) + 1 for each in layer_types)) if layer_types else 2
    sizes["num_hidden_layers"] = layers
    small_config = {**config, **sizes}
    if layer_types:
        small_config["layer_types"] = layer_types[:layers]
    (to / "config.json").write_text(json.dumps(small_config), encoding="utf-8")


def _make_batches(recipe: Recipe) -> Iterator[pack.Batch]:
    """Yield batches of one sequence of 2 to 5 examples, padded to the width that the trainer uses."""
    draw = np.random.default_rng(0)
    # Documents of an example: two if the objective compares answers, else one.
    documents = row_tokens(recipe) // recipe.training.max_length
    for _ in range(_PACKS):
        examples = int(draw.integers(2, 6))
        # Even five examples fit into the row.
        sizes = draw.integers(3, _MAX_LENGTH // 6, examples * documents)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        split = Split(
            draw.integers(1, _VOCABULARY, offsets[-1]).astype(np.int32),
            np.ones(offsets[-1], bool),
            offsets,
            documents=documents,
            reference=np.zeros((examples, 2), np.float32) if documents == 2 else None,
            labels=np.arange(examples) % 2 == 0 if documents == 2 else None,
        )
        yield pack.collate(split, [list(range(examples))], pad_id=0, width=row_tokens(recipe), compiled=True)


def _let_attention_run_on_cpus() -> None:
    """Make the GPU's attention kernel return tensors of the right shapes on a CPU instead of failing."""
    pairs = (
        (varlen._varlen_attn, varlen._varlen_attn_fake),  # noqa: SLF001 - how torch names them
        (varlen._varlen_attn_backward, varlen._varlen_attn_backward_fake),  # noqa: SLF001
    )
    for operation, fake in pairs:
        operation.register_kernel("cpu")(fake)
