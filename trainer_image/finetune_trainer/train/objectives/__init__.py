"""What the loss is, one file an objective."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from finetune_trainer.train.objectives import sft

if TYPE_CHECKING:
    import torch
    from torch import nn

    from finetune_crds.training import Objective as ObjectiveSpec
    from finetune_trainer.train.pack import Batch


class Objective(Protocol):
    """The sum of a batch's losses over its targets, a scalar in fp32; the loop divides by the global count."""

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss of `batch` under `model`."""


def objective(spec: ObjectiveSpec) -> Objective:
    """The objective that a recipe names."""
    return {"SFT": sft.next_token_loss}[spec.type]
