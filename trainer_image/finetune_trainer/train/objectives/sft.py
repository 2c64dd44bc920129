"""Supervised fine-tuning: cross-entropy of the next token."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn import functional

from finetune_trainer.train.model import chunks
from finetune_trainer.train.model.network import Network, Objective

if TYPE_CHECKING:
    from finetune_trainer.train.data.pack import Batch


class Sft(Objective):
    """The cross-entropy of a batch's targets, in nats; one loss a target."""

    cross_entropy: ClassVar[bool] = True

    def __call__(self, network: Network, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed cross-entropy, an fp32 scalar, and no metrics."""
        hidden, targets = network.at_targets(batch)

        def score(states: torch.Tensor, chunk: slice) -> torch.Tensor:
            return functional.cross_entropy(network.logits(states), targets[chunk], reduction="sum")

        total = chunks.summed(score, hidden, network.head_parameters, network.vocabulary)
        return total, total.new_zeros(0)
