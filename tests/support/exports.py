"""What the trainer exports, of models that are trained a little by hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from finetune_crds.contract import TrainResult
from finetune_crds.recipe import Recipe
from finetune_trainer.examples.tokenizer import load_tokenizer
from finetune_trainer.models.base_reference import Origin
from finetune_trainer.train import build
from finetune_trainer.train.data import dataset, pack
from finetune_trainer.train.delivery import export, signature
from finetune_trainer.train.delivery.lineage import Lineage
from finetune_trainer.train.model.network.trained_network import Network, Objective, trained_parameters

if TYPE_CHECKING:
    from finetune_trainer.train.runtime.distributed import World

PROMPTS = signature.Examples(requests=["What is the red house? "], answers=["The house is red."])
CONVERSATIONS = signature.Examples(
    chat=True,
    requests=[{"messages": [{"role": "user", "content": "What is the red house? "}]}],
    answers=["The house is red."],
)
INPUT = torch.arange(2, 20).unsqueeze(0)


class Logits(Objective):
    """In place of the objective: what the network says."""

    def __call__(
        self, network: Network, batch: pack.Batch, _hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = network.head.compute_logits(network.compute_hidden_states(batch))
        return logits.sum(), logits


def written(
    recipe: Recipe,
    folder: Path,
    source: Path,
    world: World,
    examples: signature.Examples = PROMPTS,
    *,
    base: Origin | None = None,
) -> torch.Tensor:
    """Train a little by hand, export, and return what the trained model says."""
    tokenizer = load_tokenizer(recipe.model, source)
    network = build.build_network(recipe, source, tokenizer, world, folder / "teacher")
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in trained_parameters(network):
            local: torch.Tensor = parameter.to_local()
            local.add_(torch.randn(local.shape, generator=generator), alpha=0.05)
    splits = recipe.data.splits
    assert splits is not None
    folder.mkdir()
    export.write(
        folder,
        model=network.model,
        state=export.gather_weights(network.model, source, recipe, world),
        tokenizer=tokenizer,
        source=source,
        base=base,
        lineage=Lineage(recipe, splits, TrainResult(step=3, eval_loss=1.25)),
        examples=examples,
    )
    tokens = INPUT[0].numpy().astype(np.int32)
    split = dataset.Split(tokens, np.ones(len(tokens), np.bool_), np.array([0, len(tokens)]))
    network.objective = Logits()
    with torch.no_grad():
        logits: torch.Tensor = network.eval()(pack.collate(split, [[0]], pad_id=0))[1]
    return logits
