"""Simple preference optimization (Meng et al., arXiv:2405.14734)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn import functional

from finetune_trainer.train.objectives.answers import PAIR_METRICS, AnswerObjective, Answers, sum_pair_metrics

if TYPE_CHECKING:
    from finetune_trainer.train.data.pack import Batch
    from finetune_trainer.train.model.network.trained_network import Network


class Simpo(AnswerObjective):
    """The SimPO loss -log sigmoid(m - gamma), m = beta x (chosen - rejected); one loss per pair.

    Chosen and rejected are the mean log-probabilities of the tokens of the answers. The loss is that of TRL's CPO with loss_type simpo and
    cpo_alpha 0.

    Args:
        beta: scale of the rewards.
        gamma: the margin between the rewards that the loss aims at.
    """

    metrics: ClassVar[tuple[str, ...]] = PAIR_METRICS

    def __init__(self, beta: float, gamma: float) -> None:
        self.beta = beta
        self.gamma = gamma

    def __call__(
        self, network: Network, batch: Batch, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss, an fp32 scalar, and the sums of reward margins and of correctly ranked pairs."""
        answers = Answers.of(network, batch, hidden)
        lengths = answers.lengths()
        means = answers.log_probabilities() / lengths
        chosen_means, rejected_means = means.unbind(dim=1)
        margins = self.beta * (chosen_means - rejected_means)
        losses = -functional.logsigmoid(margins - self.gamma)
        # The derivative of a pair's loss with respect to the mean of the chosen answer.
        slope = -self.beta * torch.sigmoid(self.gamma - margins)
        loss = answers.with_gradient(losses.sum(), torch.stack([slope, -slope], dim=-1) / lengths)
        return loss, sum_pair_metrics(margins)
