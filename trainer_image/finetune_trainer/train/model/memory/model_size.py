"""The size of a model, before its weights are fetched."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from finetune_trainer.models import download
from finetune_trainer.models.cache import Cache
from finetune_trainer.train.model.network import experts

if TYPE_CHECKING:
    from pathlib import Path

    from finetune_crds.training import Model

# Below this estimate, a model is small enough for CPUs whatever its exact count is.
_MAX_ESTIMATED_PARAMETERS = 100_000_000


def count_parameters(model: Model, directory: Path) -> int:
    """Count the parameters of a model, or of an adapter's base, by its config.

    The count of a small model is an estimate: the libraries that count exactly take seconds to import.

    Args:
        model: which model.
        directory: folder for downloaded files, without weights.

    Raises:
        RecipeRefusedError: the model cannot be fetched or loaded.
        TrainingError: the Hub does not answer.
    """
    folder = download.fetch_config(model.base, directory, revision=model.revision, cache=Cache.of(model))
    estimated = _estimate(folder / "config.json")
    if estimated is not None and estimated < _MAX_ESTIMATED_PARAMETERS:
        return estimated
    return _count(model, folder)


def _estimate(path: Path) -> int | None:
    """Estimate how many parameters a decoder with this config has; None: the config lacks the usual fields."""
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        width, vocabulary = int(config["hidden_size"]), int(config["vocab_size"])
        layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        feed_forward = int(config["intermediate_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # The projections of queries, keys, values and outputs.
    attention_parameters = 4 * width * max(width, heads * int(config.get("head_dim") or 0))
    # The gate, up and down projections of each expert.
    feed_forward_parameters = 3 * width * feed_forward * max(1, experts.count_per_layer(config.get))
    embedding_and_head_parameters = 2 * vocabulary * width
    return embedding_and_head_parameters + layers * (attention_parameters + feed_forward_parameters)


def _count(model: Model, folder: Path) -> int:
    import torch
    from transformers import AutoConfig

    from finetune_trainer.train.model.weights import load

    with load.load_errors(model):
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=model.trust_remote_code)
        return int(
            load.build_empty_model(config, torch.float32, trust=model.trust_remote_code).num_parameters()
        )
