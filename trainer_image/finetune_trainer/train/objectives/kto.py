"""Kahneman-Tversky optimization of unpaired preferences (Ethayarajh et al., arXiv:2402.01306)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist

from finetune_crds import contract
from finetune_trainer.train.objectives.answers import Answers, ReferenceObjective, compute_gains

if TYPE_CHECKING:
    from collections.abc import Sequence

    from finetune_crds.objective import Kto as Spec
    from finetune_trainer.train.data.pack import Batch
    from finetune_trainer.train.model.network.trained_network import Network


class Kto(ReferenceObjective):
    """The KTO loss weight x (1 - sigmoid(beta x (gain - z))) of a good answer, and with z - gain of a bad answer; one loss per example.

    The gain of an answer is its log-probability minus the reference's, and z an estimate of the divergence from
    the reference: the mean gain of the second documents, in which prompts have the answers of other examples, or 0 if
    the mean is negative. As in TRL, the mean is over the examples of one forward pass on all ranks, in training and in evaluation, and z
    has no gradient. So the loss of an example depends a little on the other examples of its pass.

    Args:
        spec: beta, and the weights of good and of bad answers.
    """

    metrics: ClassVar[tuple[str, ...]] = (
        contract.METRIC_REWARD_DESIRABLE,
        contract.METRIC_REWARD_UNDESIRABLE,
        contract.METRIC_REWARD_MARGIN,
        contract.METRIC_KL,
    )
    sums: ClassVar[int] = 5

    def __init__(self, spec: Spec) -> None:
        self.beta = spec.beta
        self.weights = (spec.desirable_weight, spec.undesirable_weight)

    def __call__(
        self, network: Network, batch: Batch, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss, an fp32 scalar, and the sums for the metrics.

        These are the rewards of good answers, the rewards of bad answers, the number of good answers, the number of bad
        answers, and z for each example.
        """
        assert batch.labels is not None  # noqa: S101 - unpaired examples have them
        answers = Answers.of(network, batch, hidden)
        gains, mismatched_gains = compute_gains(answers, batch).unbind(dim=1)
        divergence = _average_over_ranks(mismatched_gains).clamp(min=0)
        good = batch.labels.float()
        sign = 2 * good - 1
        good_weight, bad_weight = self.weights
        weight = good * good_weight + (1 - good) * bad_weight
        value = torch.sigmoid(sign * self.beta * (gains - divergence))
        # The derivative of an example's loss with respect to its gain.
        slope = -weight * sign * self.beta * value * (1 - value)
        # The second documents only enter z, which has no gradient.
        loss = answers.with_gradient(
            (weight * (1 - value)).sum(), torch.stack([slope, torch.zeros_like(slope)], dim=-1)
        )
        rewards = self.beta * gains
        summed = [(rewards * good).sum(), (rewards * (1 - good)).sum(), good.sum(), (1 - good).sum()]
        return loss, torch.stack([*summed, divergence * len(gains)])

    def means(self, sums: Sequence[float], count: float) -> dict[str, float]:
        """Return the mean rewards of good and of bad answers, their difference, and the mean of z."""
        desirable, undesirable, good, bad, divergence = sums
        means = {contract.METRIC_KL: divergence / max(count, 1.0)}
        if good:
            means[contract.METRIC_REWARD_DESIRABLE] = desirable / good
        if bad:
            means[contract.METRIC_REWARD_UNDESIRABLE] = undesirable / bad
        if good and bad:
            means[contract.METRIC_REWARD_MARGIN] = desirable / good - undesirable / bad
        return means


def _average_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return the mean of a vector over its numbers on all ranks, a scalar; all ranks call this together."""
    summed = torch.stack([values.sum(), values.new_full((), len(values))])
    # NB: a rank without a batch in this pass takes part too, with no numbers.
    if dist.is_initialized():
        dist.all_reduce(summed)
    return summed[0] / summed[1].clamp(min=1)
