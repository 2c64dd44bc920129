"""Supervised fine-tuning: cross-entropy of the next token."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn import functional

from finetune_trainer.train.model.network.trained_network import Network, Objective

if TYPE_CHECKING:
    from finetune_trainer.train.data.pack import Batch


class Sft(Objective):
    """The cross-entropy of a batch's targets, in nats; one loss per target.

    Label smoothing e (Szegedy et al., arXiv:1512.00567, section 7) replaces a target by (1 - e) x target + e x uniform over the
    vocabulary, as `label_smoothing` of torch's cross_entropy and the LabelSmoother of transformers do. Evaluation losses are the
    plain cross-entropy, whatever e is: gates compare them, and exp(loss) is a perplexity.

    Args:
        label_smoothing: e, from 0 to below 1.
    """

    cross_entropy: ClassVar[bool] = True

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def __call__(
        self, network: Network, batch: Batch, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed cross-entropy, an fp32 scalar, and no metrics; a network in evaluation mode has no smoothing."""
        targets = batch.at_targets(batch.targets)
        smoothing = self.label_smoothing if network.training else 0.0

        def score(logits: torch.Tensor, chunk: slice) -> torch.Tensor:
            return functional.cross_entropy(
                logits, targets[chunk], reduction="sum", label_smoothing=smoothing
            )

        total = network.head.sum_loss(score, hidden)
        return total, total.new_zeros(0)
