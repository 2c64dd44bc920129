"""Supervised fine-tuning: cross-entropy of the next token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from finetune_trainer.train.pack import IGNORED

if TYPE_CHECKING:
    import torch
    from torch import nn

    from finetune_trainer.train.pack import Batch


def next_token_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The sum of the cross-entropies of a batch's targets, in nats, as an fp32 scalar."""
    logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
