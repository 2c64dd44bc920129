"""Supervised fine-tuning: cross-entropy of the next token."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn import functional

from finetune_trainer.train.model import chunks

if TYPE_CHECKING:
    from finetune_trainer.train.data.pack import Batch
    from finetune_trainer.train.model.network import Network


class Sft:
    """The cross-entropy of a batch's targets, in nats; one loss a target."""

    figures: ClassVar[tuple[str, ...]] = ()

    def __call__(self, network: Network, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The summed cross-entropy, an fp32 scalar; no figures beside it."""
        hidden, targets = network.at_targets(batch)

        def score(states: torch.Tensor, chunk: slice) -> torch.Tensor:
            return functional.cross_entropy(network.logits(states), targets[chunk], reduction="sum")

        total = chunks.summed(score, hidden, network.head_parameters, network.vocabulary)
        return total, total.new_zeros(0)

    def count(self, batch: Batch) -> int:
        """The targets of a batch."""
        return batch.targets_count
