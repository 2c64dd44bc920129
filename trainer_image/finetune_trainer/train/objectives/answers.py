"""Losses that depend on the log-probabilities of an example's two answers, or on their change since the first step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch.nn import functional

from finetune_crds import contract
from finetune_trainer.train.model.network.trained_network import Network, Objective

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

    from finetune_trainer.train.data.dataset import Split
    from finetune_trainer.train.data.feed import Collator, Examples
    from finetune_trainer.train.data.pack import Batch
    from finetune_trainer.train.runtime.distributed import World


@dataclass(frozen=True)
class Answers:
    """The answers in a batch: two documents per example.

    hidden: hidden states at the targets [targets, width].
    targets: the targets [targets].
    owners: the document of each target [targets].
    examples: number of examples.
    """

    network: Network
    hidden: torch.Tensor
    targets: torch.Tensor
    owners: torch.Tensor
    examples: int

    @classmethod
    def of(cls, network: Network, batch: Batch, hidden: torch.Tensor) -> Answers:
        """Return the answers in a batch, with the hidden states at its targets."""
        targets, owners = batch.at_targets(batch.targets), batch.at_targets(batch.owners)
        return cls(network, hidden, targets, owners, len(batch.examples))

    def log_probabilities(self) -> torch.Tensor:
        """Return the log-probability of each answer, fp32 [examples, 2], without a gradient."""
        return self._sum_by_answer(
            self.network.head.compute_log_probabilities(self.hidden.detach(), self.targets)
        )

    def lengths(self) -> torch.Tensor:
        """Return the number of targets of each answer, at least 1, fp32 [examples, 2]."""
        return self._sum_by_answer(torch.ones_like(self.targets, dtype=torch.float32)).clamp(min=1)

    def with_gradient(self, loss: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        """Return a loss with its gradient for the model; unchanged if gradients are disabled.

        Args:
            loss: a scalar, without a gradient.
            slopes: its derivatives with respect to `log_probabilities` [examples, 2]. With the slopes, the gradient is
                computed one chunk of targets at a time.
        """
        if not torch.is_grad_enabled():
            return loss
        targets, slope_of_target = self.targets, slopes.flatten()[self.owners]

        def score(logits: torch.Tensor, chunk: slice) -> torch.Tensor:
            # The cross-entropy of a target is its negative log-probability.
            losses = functional.cross_entropy(logits, targets[chunk], reduction="none")
            return -(slope_of_target[chunk] * losses).sum()

        # The sum of slope x log-probability has the same gradient as the loss.
        linear = self.network.head.sum_loss(score, self.hidden)
        # The value is `loss`, and the gradient that of `linear`.
        return linear + (loss - linear).detach()

    def _sum_by_answer(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sums of values [targets] over the targets of each answer, [examples, 2]."""
        return values.new_zeros(2 * self.examples).index_add_(0, self.owners, values).view(self.examples, 2)


class AnswerObjective(Objective):
    """An objective with one loss per example, which has two answers."""

    def count(self, batch: Batch) -> int:
        """Return the number of examples in a batch."""
        return len(batch.examples)


class ReferenceObjective(AnswerObjective):
    """An objective that compares the answers' probabilities with the reference's.

    The reference is the model before its first step. `prepare` computes its log-probabilities once, and each batch
    contains those of its answers: no second model stays in memory.
    """

    has_reference: ClassVar[bool] = True

    def prepare(self, network: Network, examples: Examples, collator: Collator, batch_size: int) -> Split:
        """Return the split with the reference's log-probabilities of the examples."""
        batches = collator.batches(examples, batch_size)
        reference = compute_reference(network, batches, collator.world, len(examples.split))
        return replace(examples.split, reference=reference)


PAIR_METRICS = (contract.METRIC_REWARD_MARGIN, contract.METRIC_REWARD_ACCURACY)
"""Metrics of objectives whose second answer is the worse one."""


def sum_pair_metrics(margins: torch.Tensor) -> torch.Tensor:
    """Return the sums of some reward margins, and of correctly ranked pairs, for `PAIR_METRICS`."""
    return torch.stack([margins.sum(), (margins > 0).float().sum()])


def compute_gains(answers: Answers, batch: Batch) -> torch.Tensor:
    """Return each answer's log-probability minus the reference's, in nats, fp32 [examples, 2], without a gradient."""
    assert batch.reference is not None  # noqa: S101 - `prepare` computes it
    return answers.log_probabilities() - batch.reference


def _score_answers(network: Network, batch: Batch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of a batch's answers, fp32 [examples, 2], and no metrics."""
    log_probabilities = Answers.of(network, batch, hidden).log_probabilities()
    return log_probabilities, log_probabilities.new_zeros(0)


def compute_reference(network: Network, batches: Iterable[Batch], world: World, examples: int) -> np.ndarray:
    """Return the log-probabilities of each example's answers under the network as it is, fp32 [examples, 2], on all ranks.

    Args:
        network: the model before its first step.
        batches: this rank's; each example is in the batches of at most one rank.
        world: the ranks.
        examples: number of examples in the split; an example in no batch gets 0.
    """
    log_probabilities = torch.zeros(examples, 2)
    with network.no_grad_forward(_score_answers):
        for batch in batches:
            answers, _ = network(batch.to(world.device))
            log_probabilities[batch.examples] = answers.cpu()
    dist.all_reduce(log_probabilities)
    values: np.ndarray = log_probabilities.numpy()
    return values
