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

# A model of which the sizes in its config make fewer parameters is small, whatever else it has.
_MAX_ESTIMATED_PARAMETERS = 100_000_000


def count_parameters(model: Model, directory: Path) -> int:
    """Count a model's parameters by its config; those of an adapter's base.

    A small model's are estimated: what counts them takes seconds to import.

    Args:
        model: which model.
        to: folder for what is downloaded: files without weights.

    Raises:
        RecipeRefusedError: it cannot be fetched, or is no model that can be loaded.
        TrainingError: the Hub does not answer.
    """
    folder = download.fetch_config(model.base, directory, revision=model.revision, cache=Cache.of(model))
    estimated = _estimate(folder / "config.json")
    return (
        estimated
        if estimated is not None and estimated < _MAX_ESTIMATED_PARAMETERS
        else _count(model, folder)
    )


def _estimate(path: Path) -> int | None:
    """About how many parameters a decoder of this config has; None where it does not have the usual fields."""
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        width, layers, vocabulary = (
            int(config[name]) for name in ("hidden_size", "num_hidden_layers", "vocab_size")
        )
        heads, feed_forward = int(config["num_attention_heads"]), int(config["intermediate_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    attention = 4 * width * max(width, heads * int(config.get("head_dim") or 0))
    return 2 * vocabulary * width + layers * (
        attention + 3 * width * feed_forward * max(1, experts.count_per_layer(config.get))
    )


def _count(model: Model, folder: Path) -> int:
    import torch
    from transformers import AutoConfig

    from finetune_trainer.train.model.weights import load

    with load.load_errors(model):
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=model.trust_remote_code)
        return int(
            load.build_empty_model(config, torch.float32, trust=model.trust_remote_code).num_parameters()
        )
