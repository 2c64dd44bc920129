"""Reward models: one number for a document, trained on pairs of answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn import functional

from finetune_crds import contract
from finetune_trainer.train.objectives.answers import PAIR_METRICS, AnswerObjective, sum_pair_metrics

if TYPE_CHECKING:
    from finetune_trainer.train.data.pack import Batch
    from finetune_trainer.train.model.network.trained_network import Network


class RewardModel(AnswerObjective):
    """The Bradley-Terry loss -log sigmoid(c - r - m) + coefficient x (c + r)^2; one loss per pair.

    c and r are the rewards of the chosen and of the rejected answer, and m is the margin of the pair in the data, or 0 (Touvron et al.,
    arXiv:2307.09288, equation 2). The second term keeps the mean of the rewards near 0, which the first one does not determine (Eisenstein
    et al., arXiv:2312.09244, equation 2). It is not part of evaluation losses, so that runs with different coefficients are comparable.

    Args:
        center_coefficient: weight of the second term.
    """

    metrics: ClassVar[tuple[str, ...]] = (*PAIR_METRICS, contract.METRIC_REWARD_MEAN)

    def __init__(self, center_coefficient: float = 0.0) -> None:
        self.center_coefficient = center_coefficient

    def __call__(
        self, network: Network, batch: Batch, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss, an fp32 scalar, and the sums of differences, of correctly ranked pairs, and of the means of both rewards."""
        rewards = _compute_rewards(network, hidden).view(-1, 2)
        chosen, rejected = rewards.unbind(dim=1)
        differences = chosen - rejected
        margins = 0.0 if batch.margins is None else batch.margins
        losses = -functional.logsigmoid(differences - margins)
        if network.training:
            losses = losses + self.center_coefficient * (chosen + rejected) ** 2
        mean_rewards = rewards.detach().mean(dim=1)
        metrics = [*sum_pair_metrics(differences.detach()), mean_rewards.sum()]
        return losses.sum(), torch.stack(metrics)


def score(network: Network, batch: Batch) -> torch.Tensor:
    """Return the reward of each document of a batch, fp32 [documents], without a gradient.

    The documents are in the order of `batch.examples`. All ranks of a sharded network call this together.

    Args:
        network: a network whose model is a reward model; its objective does not matter.
        batch: documents of token ids, packed or padded, on the device of the network.
    """

    def compute(network: Network, _batch: Batch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rewards = _compute_rewards(network, hidden)
        return rewards, rewards.new_zeros(0)

    with network.no_grad_forward(compute):
        rewards: torch.Tensor
        rewards, _ = network(batch)
    return rewards


def _compute_rewards(network: Network, hidden: torch.Tensor) -> torch.Tensor:
    """Return the rewards of documents, fp32 [documents], from the hidden states at their last tokens [documents, width]."""
    return network.head.compute_logits(hidden).squeeze(-1)
