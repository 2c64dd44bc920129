"""Direct preference optimisation (Rafailov et al., arXiv:2305.18290)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch.nn import functional

from finetune_crds import contract
from finetune_trainer.train.model import chunks
from finetune_trainer.train.model.network import Network, Objective

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

    from finetune_trainer.train.data.dataset import Split
    from finetune_trainer.train.data.feed import Collator, Examples
    from finetune_trainer.train.data.pack import Batch
    from finetune_trainer.train.runtime.distributed import World


class Dpo(Objective):
    """-log sigmoid(beta x ((chosen - rejected) - (reference's chosen - rejected))); one loss a pair.

    The reference is the model before its first step. `prepare` computes its log-probabilities once, and the batches
    carry them: no second model stays in memory.

    Args:
        beta: strength of the penalty for leaving the reference.
    """

    has_reference: ClassVar[bool] = True
    metrics: ClassVar[tuple[str, ...]] = (contract.METRIC_REWARD_MARGIN, contract.METRIC_REWARD_ACCURACY)

    def __init__(self, beta: float) -> None:
        self.beta = beta

    def __call__(self, network: Network, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss, an fp32 scalar, and the sums of reward margins and of correctly ranked pairs."""
        hidden, targets, owners = _answers(network, batch)
        answers = _log_probabilities(network, hidden, targets, owners, pairs=len(batch.examples))
        assert batch.reference is not None  # noqa: S101 - `prepare` computes it
        gains = answers - batch.reference
        margins = self.beta * (gains[:, 0] - gains[:, 1])
        loss = -functional.logsigmoid(margins).sum()
        metrics = torch.stack([margins.sum(), (margins > 0).float().sum()])
        if not torch.is_grad_enabled():
            return loss, metrics

        # The gradient of the loss by the log-probability of a token: a loss in chunks needs no more.
        slope = -self.beta * torch.sigmoid(-margins)
        slopes = torch.stack([slope, -slope], dim=-1).flatten()[owners]

        def score(states: torch.Tensor, chunk: slice) -> torch.Tensor:
            each = functional.cross_entropy(network.logits(states), targets[chunk], reduction="none")
            return -(slopes[chunk] * each).sum()

        linear = chunks.summed(score, hidden, network.head_parameters, network.vocabulary)
        return linear + (loss - linear).detach(), metrics

    def count(self, batch: Batch) -> int:
        """Return the number of pairs in a batch."""
        return len(batch.examples)

    def prepare(self, network: Network, examples: Examples, collator: Collator, batch_size: int) -> Split:
        """Return the split with the reference's log-probabilities of the examples."""
        batches = collator.batches(examples, batch_size)
        reference = reference_of(network, batches, collator.world, len(examples.split))
        return replace(examples.split, reference=reference)


def _reference(network: Network, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of a batch's answers, fp32 [pairs, 2], and no metrics."""
    hidden, targets, owners = _answers(network, batch)
    answers = _log_probabilities(network, hidden, targets, owners, pairs=len(batch.examples))
    return answers, answers.new_zeros(0)


def _answers(network: Network, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the hidden states at the targets [targets, width], the targets, and their documents [targets]."""
    hidden, targets = network.at_targets(batch)
    return hidden, targets, batch.owners.flatten().index_select(0, batch.target_at)


def _log_probabilities(
    network: Network, hidden: torch.Tensor, targets: torch.Tensor, owners: torch.Tensor, *, pairs: int
) -> torch.Tensor:
    """Return the log-probabilities of each pair's chosen and rejected answer, fp32 [pairs, 2], without a gradient."""
    each = chunks.log_probabilities(network.logits, hidden.detach(), targets, network.vocabulary)
    return each.new_zeros(2 * pairs).index_add_(0, owners, each).view(pairs, 2)


def reference_of(network: Network, batches: Iterable[Batch], world: World, pairs: int) -> np.ndarray:
    """Return the log-probabilities of each pair's answers under the network as it is, fp32 [pairs, 2], on all ranks.

    Args:
        network: the model before its first step.
        batches: this rank's; each pair is in the batches of at most one rank.
        world: the ranks.
        pairs: number of pairs in the split; those in no batch get 0.
    """
    found = torch.zeros(pairs, 2)
    with network.no_grad_forward(_reference):
        for batch in batches:
            answers, _ = network(batch.to(world.device))
            found[batch.examples] = answers.cpu()
    dist.all_reduce(found)
    values: np.ndarray = found.numpy()
    return values
