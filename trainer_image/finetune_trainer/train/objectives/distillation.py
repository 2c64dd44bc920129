"""Distillation: cross-entropy, and divergence from a teacher (Hinton et al., arXiv:1503.02531)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn import functional

from finetune_crds import contract
from finetune_trainer.train.model.network.trained_network import Network, Objective

if TYPE_CHECKING:
    from finetune_crds.objective import Distillation as Spec
    from finetune_trainer.train.data.pack import Batch


class Distillation(Objective):
    """The distillation loss weight x T^2 x KL(teacher || student) + (1 - weight) x cross-entropy, in nats; one loss per target.

    The temperature T softens both distributions, which divides the divergence's gradient by about T^2: the factor T^2 restores it
    (section 2 of the paper).

    Args:
        spec: temperature and weight.
        teacher: the frozen teacher, with `TeacherStates` as its objective.
    """

    metrics: ClassVar[tuple[str, ...]] = (contract.METRIC_DIVERGENCE,)

    def __init__(self, spec: Spec, teacher: Network) -> None:
        self.temperature = spec.temperature
        self.weight = spec.weight
        self.teacher = teacher

    def __call__(
        self, network: Network, batch: Batch, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss, an fp32 scalar, and the sum of the divergences."""
        targets = batch.at_targets(batch.targets)
        with torch.no_grad():
            teacher_hidden, _ = self.teacher(batch)
        # The metric: `score` adds the divergence of each chunk.
        divergences = hidden.new_zeros(1, dtype=torch.float32)

        def score(logits: torch.Tensor, chunk: slice) -> torch.Tensor:
            with torch.no_grad():
                teacher = functional.log_softmax(
                    self.teacher.head.compute_logits(teacher_hidden[chunk]) / self.temperature, dim=-1
                )
            student = functional.log_softmax(logits / self.temperature, dim=-1)
            divergence = functional.kl_div(student, teacher, reduction="sum", log_target=True)
            divergences.add_(divergence.detach())
            cross_entropy = functional.cross_entropy(logits, targets[chunk], reduction="sum")
            return self.weight * self.temperature**2 * divergence + (1.0 - self.weight) * cross_entropy

        # NB: the teacher's output layer stays gathered after its forward pass, because no backward pass follows.
        total = network.head.sum_loss(score, hidden)
        self.teacher.free_gathered_weights()
        return total, divergences


class TeacherStates(Objective):
    """The computation of a teacher: its hidden states at a batch's targets [targets, width]."""

    def __call__(
        self, network: Network, batch: Batch, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states, and no metrics."""
        del network, batch
        return hidden, hidden.new_zeros(0)
