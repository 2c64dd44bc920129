"""The rewards of a reward model on the pairs of an evaluation, and the numbers that follow from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from finetune_crds.evaluation import NUMBER_NAMES
from finetune_trainer.train.data import pack
from finetune_trainer.train.objectives import reward

if TYPE_CHECKING:
    from collections.abc import Collection

    from finetune_crds.evaluation import Metric
    from finetune_trainer.train.data.dataset import Split
    from finetune_trainer.train.model.network.trained_network import Network


def compute_rewards(
    network: Network, split: Split, *, batch_size: int, pad_id: int, device: torch.device
) -> torch.Tensor:
    """Return the rewards of the documents of each example, fp32 [examples, documents], on the host.

    Args:
        network: a reward model.
        split: the rows.
        batch_size: rows per batch.
        pad_id: the padding token.
        device: where the model is.
    """
    rewards = torch.zeros(len(split), split.documents)
    # The longest rows first, so that a lack of memory shows in the first batch.
    order = np.argsort(-split.lengths, kind="stable").tolist()
    for begin in range(0, len(order), batch_size):
        # Each row of the batch has the documents of one example.
        examples = order[begin : begin + batch_size]
        batch = pack.collate(split, [[example] for example in examples], pad_id=pad_id)
        scores = reward.score(network, batch.to(device))
        rewards[batch.examples] = scores.view(-1, split.documents).cpu()
    return rewards


def compute_metrics(
    requested: Collection[Metric], rewards: torch.Tensor, margins: np.ndarray | None
) -> dict[str, float]:
    """Return the numbers of the requested metrics: the mean Bradley-Terry loss, and the share of pairs whose chosen answer has the higher reward.

    Args:
        requested: evaluation.metrics.
        rewards: of the chosen and of the rejected answer of each pair, fp32 [pairs, 2].
        margins: of the pairs, fp32 [pairs]; None: the data has none.
    """
    differences = rewards[:, 0] - rewards[:, 1]
    targets = torch.zeros_like(differences) if margins is None else torch.from_numpy(np.array(margins))
    values: dict[Metric, torch.Tensor] = {
        "Loss": -functional.logsigmoid(differences - targets).mean(),
        "Accuracy": (differences > 0).float().mean(),
    }
    return {
        name: float(value)
        for metric, value in values.items()
        if metric in requested
        for name in NUMBER_NAMES[metric]
    }
