"""Odds ratio preference optimization (Hong et al., arXiv:2403.07691)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn import functional

from finetune_trainer.train.objectives.answers import PAIR_METRICS, AnswerObjective, Answers, sum_pair_metrics

if TYPE_CHECKING:
    from finetune_trainer.train.data.pack import Batch
    from finetune_trainer.train.model.network.trained_network import Network

# The greatest mean log-probability with finite odds in fp32.
_MAX_LOG_PROBABILITY = -1e-6


class Orpo(AnswerObjective):
    """The ORPO loss -c - weight x log sigmoid(log odds(c) - log odds(r)), odds(x) = e^x / (1 - e^x); one loss per pair.

    c and r are the mean log-probabilities of the tokens of the chosen and of the rejected answer. -c is the cross-entropy of the
    chosen answer, as in the paper's equation 6 and in LLaMA-Factory; TRL's cross-entropy includes the tokens of the prompt. Rewards are
    weight x c and weight x r, as in TRL.

    Args:
        weight: of the odds ratio, the paper's lambda.
    """

    metrics: ClassVar[tuple[str, ...]] = PAIR_METRICS

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __call__(
        self, network: Network, batch: Batch, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss, an fp32 scalar, and the sums of reward margins and of correctly ranked pairs."""
        answers = Answers.of(network, batch, hidden)
        lengths = answers.lengths()
        means = answers.log_probabilities() / lengths
        bounded = means.clamp(max=_MAX_LOG_PROBABILITY)
        # 1 - p, where p = e^x; computed as 1 - exp(), it would lose its digits.
        complements = -torch.expm1(bounded)
        log_odds = bounded - complements.log()
        chosen_log_odds, rejected_log_odds = log_odds.unbind(dim=1)
        chosen_means, rejected_means = means.unbind(dim=1)
        ratios = chosen_log_odds - rejected_log_odds
        losses = -chosen_means - self.weight * functional.logsigmoid(ratios)
        # The derivative of log odds(x) is 1 / (1 - p).
        odds_slopes = self.weight * torch.sigmoid(-ratios)[:, None] / complements
        chosen_slopes, rejected_slopes = odds_slopes.unbind(dim=1)
        slopes = torch.stack([-1 - chosen_slopes, rejected_slopes], dim=-1) / lengths
        loss = answers.with_gradient(losses.sum(), slopes)
        return loss, sum_pair_metrics(self.weight * (chosen_means - rejected_means))
