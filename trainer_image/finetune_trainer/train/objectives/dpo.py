"""Direct preference optimization (Rafailov et al., arXiv:2305.18290), and identity preference optimization."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn import functional

from finetune_trainer.train.objectives.answers import (
    PAIR_METRICS,
    Answers,
    ReferenceObjective,
    compute_gains,
    sum_pair_metrics,
)

if TYPE_CHECKING:
    from finetune_trainer.train.data.pack import Batch
    from finetune_trainer.train.model.network.trained_network import Network


class Dpo(ReferenceObjective):
    """The DPO loss -log sigmoid(m), m = beta x ((chosen - rejected) - (reference's chosen - rejected)); one loss per pair.

    Chosen and rejected are the log-probabilities of the answers, and m is the reward margin.

    With label smoothing e the loss is -(1 - e) log sigmoid(m) - e log sigmoid(-m): conservative DPO, for pairs of which a share e is
    ranked the wrong way round (Mitchell, "A note on DPO with noisy preferences and relationship to IPO", 2023). Evaluation losses
    have no label smoothing, so that runs with different e are comparable.

    Args:
        beta: strength of the penalty for leaving the reference.
        label_smoothing: e, from 0 to below 0.5.
    """

    metrics: ClassVar[tuple[str, ...]] = PAIR_METRICS

    def __init__(self, beta: float, label_smoothing: float = 0.0) -> None:
        self.beta = beta
        self.label_smoothing = label_smoothing

    def __call__(
        self, network: Network, batch: Batch, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss, an fp32 scalar, and the sums of reward margins and of correctly ranked pairs."""
        answers = Answers.of(network, batch, hidden)
        chosen_gains, rejected_gains = compute_gains(answers, batch).unbind(dim=1)
        margins = self.beta * (chosen_gains - rejected_gains)
        smoothing = self.label_smoothing if network.training else 0.0
        losses = (smoothing - 1) * functional.logsigmoid(margins) - smoothing * functional.logsigmoid(
            -margins
        )
        # The sum of both derivatives, simplified with sigmoid(m) + sigmoid(-m) = 1.
        slope = self.beta * (smoothing - torch.sigmoid(-margins))
        loss = answers.with_gradient(losses.sum(), torch.stack([slope, -slope], dim=-1))
        return loss, sum_pair_metrics(margins)


class Ipo(ReferenceObjective):
    """The IPO loss (d - 1 / (2 beta))^2, d = chosen's mean gain - rejected's mean gain; one loss per pair.

    The loss is equation 17 of Azar et al., arXiv:2310.12036. The mean gain of an answer is its gain (`compute_gains`) divided by its
    number of tokens, as in TRL and as IPO's authors computed it: with sums, long answers would miss the same target by more. The reward
    margins are those of DPO, from the gains themselves.

    Args:
        beta: strength of the penalty for leaving the reference, the paper's tau.
    """

    metrics: ClassVar[tuple[str, ...]] = PAIR_METRICS

    def __init__(self, beta: float) -> None:
        self.beta = beta

    def __call__(
        self, network: Network, batch: Batch, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss, an fp32 scalar, and the sums of reward margins and of correctly ranked pairs."""
        answers = Answers.of(network, batch, hidden)
        gains, lengths = compute_gains(answers, batch), answers.lengths()
        chosen_gains, rejected_gains = gains.unbind(dim=1)
        chosen_means, rejected_means = (gains / lengths).unbind(dim=1)
        errors = chosen_means - rejected_means - 1 / (2 * self.beta)
        # The derivatives of a pair's loss with respect to both gains.
        slopes = torch.stack([2 * errors, -2 * errors], dim=-1) / lengths
        loss = answers.with_gradient((errors**2).sum(), slopes)
        return loss, sum_pair_metrics(self.beta * (chosen_gains - rejected_gains))
