"""The loss of a model on the rows of an evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from finetune_trainer.train.data import pack

if TYPE_CHECKING:
    import torch

    from finetune_trainer.train.data.dataset import Split
    from finetune_trainer.train.model.network.trained_network import Network


def compute_mean_loss(
    network: Network, split: Split, *, batch_size: int, pad_id: int, device: torch.device
) -> float:
    """Return the negative log-likelihood in nats, averaged over all targets: the evaluation loss that the trainer logs for SFT.

    Targets are the tokens on which the loss is computed.

    Args:
        network: a model with the objective SFT.
        split: the rows.
        batch_size: rows per batch.
        pad_id: the padding token.
        device: where the model is.
    """
    total_loss, targets_count = 0.0, 0
    # The longest rows first, so that a lack of memory shows in the first batch.
    order = np.argsort(-split.lengths, kind="stable").tolist()
    with network.no_grad_forward():
        for begin in range(0, len(order), batch_size):
            # Each row of the batch has one example.
            rows = [[example] for example in order[begin : begin + batch_size]]
            batch = pack.collate(split, rows, pad_id=pad_id)
            loss_sum, _ = network(batch.to(device))
            total_loss += loss_sum.item()
            targets_count += batch.targets_count
    return total_loss / max(targets_count, 1)
