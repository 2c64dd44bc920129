"""What the loss is, one file an objective."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

    from finetune_trainer.train.network import Network
    from finetune_trainer.train.pack import Batch


class Objective(Protocol):
    """The sum of a batch's losses, which the loop divides by the global count."""

    figures: ClassVar[tuple[str, ...]]
    """What is reported beside the loss, as MLflow metrics."""

    def __call__(self, network: Network, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, an fp32 scalar, and the sums of the figures, fp32 [figures]."""

    def count(self, batch: Batch) -> int:
        """How many losses the sum has."""
