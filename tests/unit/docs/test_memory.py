"""Figures of memory in the documentation are those of the fit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from finetune_crds.checkpoint import Checkpoint
from finetune_crds.quantity import format_bytes
from finetune_crds.training import Training
from finetune_trainer.train.model.memory import fit
from finetune_trainer.train.model.memory.model_shape import Shape
from finetune_trainer.train.runtime.device import Card
from finetune_trainer.train.runtime.distributed import World
from finetune_trainer.train.runtime.recipe import row_tokens
from support import networks
from support.shapes import LLAMA_8B, shape_of

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[3]
SAMPLE = ROOT / "crds" / "samples" / "full-one-card.yaml"
H100 = World(0, 1, 0, 1, torch.device("cpu"), card=Card("NVIDIA-H100-80GB-HBM3", 80 * 2**30, (9, 0)))


def decided(**changes: Any) -> fit.Choice:
    """What the trainer decides for the sample, with other hyperparameters."""
    spec = yaml.safe_load(SAMPLE.read_text(encoding="utf-8"))["spec"]
    training = Training.model_validate(spec["training"] | changes)
    checkpoint = Checkpoint.model_validate(spec["checkpoint"])
    recipe = networks.recipe(Path("/base")).model_copy(
        update={"training": training, "checkpoint": checkpoint}
    )
    network: Any = None
    return fit.decide(network, recipe, H100, row_tokens(recipe), None)


def test_the_memory_of_a_model_on_one_card_is_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of(LLAMA_8B, "Full")
    monkeypatch.setattr(Shape, "of", lambda *_network, **_options: shape)
    auto, full, adamw = (
        decided(**changes)
        for changes in (
            {},
            {"activationCheckpointing": "Full"},
            {"activationCheckpointing": "Full", "optimizer": {}},
        )
    )
    sizes = [f"{choice.estimate.total / 2**30:.0f} GiB" for choice in (auto, full, adamw)]
    words = {
        path: " ".join(path.read_text(encoding="utf-8").replace("#", " ").split())
        for path in (
            SAMPLE,
            *(ROOT / "docs" / "finetunejob" / f"{page}.md" for page in ("methods", "distributed")),
        )
    }
    sample, methods, distributed = words.values()
    assert (
        f"estimates {sizes[0]} with the activations that Auto keeps, and {sizes[1]} with Full, where AdamW with FP32 weights "
        f"would need {sizes[2]}."
    ) in sample
    assert f"about {sizes[2]} with AdamW, and about {sizes[1]} with AdamW8bit and `weights: BF16`" in methods
    found = {
        "Activation Checkpointing": auto.kind,
        "Host Memory": format_bytes(auto.staged),
        "Limit": format_bytes(auto.limit),
        "Memory": format_bytes(auto.estimate.total),
        "Parameters": shape.parameters,
        "Trained Parameters": shape.trained,
    }
    assert "Plan: " + " ".join(f"{name}: {value}" for name, value in found.items()) in distributed
