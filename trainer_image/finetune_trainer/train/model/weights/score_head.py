"""The score head of a reward model that starts from a language model: its initial values, and its padding token in the config."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from finetune_trainer.train.model import rows
from finetune_trainer.train.model.network import task
from finetune_trainer.train.model.weights import load

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from finetune_crds.training import Model

WEIGHT = f"{task.SCORE}.weight"
"""The name of its weight in the files of a model."""
# The standard deviation of transformers' configs that have no initializer_range.
_STANDARD_DEVIATION = 0.02
_CONFIG = "config.json"


def is_new(model: PreTrainedModel, spec: Model, source: Path) -> bool:
    """Whether a model has a score head that its files lack.

    Args:
        model: the model, without peft's wrapper.
        spec: names the model.
        source: the folder of its files.

    Raises:
        OSError, ValueError: the folder has no config that can be read.
    """
    return task.of_model(model) == "RewardModel" and load.read_task(spec, source) == "LanguageModel"


def initialize_if_new(model: PreTrainedModel, spec: Model, source: Path, seed: int) -> None:
    """Set the weight of a score head that the files lack; it depends on the seed alone, not on the method or the ranks.

    As in transformers, the weight is normal, with the standard deviation `initializer_range` of the config.

    Args:
        model: the model, without peft's wrapper; may be sharded.
        spec: names the model.
        source: the folder of its files.
        seed: training.seed.

    Raises:
        OSError, ValueError: the folder has no config that can be read.
    """
    if not is_new(model, spec, source):
        return
    deviation = getattr(model.config.get_text_config(), "initializer_range", None) or _STANDARD_DEVIATION
    # An adapter has a frozen original, and a copy that is trained.
    for weight in task.get_output_layer(model).parameters():
        generator = torch.Generator().manual_seed(seed)
        rows.set_rows(weight, torch.empty(weight.shape).normal_(0.0, deviation, generator=generator))


def write_padding(folder: Path, pad_id: int) -> None:
    """Write the padding token of a saved reward model into its config.

    Without it, transformers cannot find the last token of the rows of a batch.
    """
    path = folder / _CONFIG
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    # The configs of multimodal models have one for the text.
    text_config = config.get("text_config")
    (text_config if isinstance(text_config, dict) else config)["pad_token_id"] = pad_id
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
