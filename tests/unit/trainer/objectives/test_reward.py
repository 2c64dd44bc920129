"""The loss of reward models is TRL's on the same batch, packed and padded, in FP32 and in BF16."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from finetune_trainer.train.data import pack
from finetune_trainer.train.model.network.trained_network import Network
from finetune_trainer.train.objectives import reward
from finetune_trainer.train.objectives.reward import RewardModel
from support import networks
from support.losses import (
    PRECISIONS,
    TOLERANCES,
    VOCABULARY,
    batch_of,
    check,
    isolated,
    learned_from,
    model,
    trl_trainer,
)

if TYPE_CHECKING:
    from finetune_trainer.train.data.dataset import Split

PAIRS, PAD = 5, 0


def reward_model(seed: int = 0) -> Any:
    """The decoder of the tiny language model, with a score head."""
    from transformers import LlamaForSequenceClassification

    language_model = model()
    config = language_model.config
    config.num_labels, config.pad_token_id = 1, PAD
    torch.manual_seed(seed)
    scoring = LlamaForSequenceClassification(config)
    scoring.model.load_state_dict(language_model.model.state_dict())
    torch.nn.init.normal_(scoring.score.weight)
    return scoring


def pairs(*, margins: bool = False) -> Split:
    split = networks.random_split(documents=2, examples=PAIRS, vocabulary=VOCABULARY)
    # The end of text is the padding token of many tokenizers: one document ends with it, and one begins with it.
    split.tokens[split.offsets[2] - 1] = PAD
    split.tokens[split.offsets[3]] = PAD
    values = np.linspace(-1, 2, PAIRS).astype(np.float32) if margins else None
    return dataclasses.replace(split, margins=values)


def trl_batch(split: Split) -> dict[str, torch.Tensor]:
    """The pairs as TRL's collator pads them."""
    from trl.trainer.reward_trainer import DataCollatorForPreference

    documents = [
        split.tokens[begin:end].tolist() for begin, end in zip(split.offsets, split.offsets[1:], strict=False)
    ]
    rows = [
        {"chosen_ids": chosen, "rejected_ids": rejected}
        for chosen, rejected in zip(documents[::2], documents[1::2], strict=True)
    ]
    if split.margins is not None:
        rows = [{**row, "margin": float(margin)} for row, margin in zip(rows, split.margins, strict=True)]
    return dict(DataCollatorForPreference(pad_token_id=PAD)(rows))


def trl_loss(
    scoring: Any, split: Split, coefficient: float | None
) -> tuple[torch.Tensor, dict[str, list[float]]]:
    from trl import RewardTrainer

    metrics: dict[str, dict[str, list[float]]] = {"train": defaultdict(list)}
    trainer = trl_trainer(scoring, None, metrics)
    trainer.args = SimpleNamespace(center_rewards_coefficient=coefficient)
    return RewardTrainer.compute_loss(trainer, scoring, trl_batch(split)), metrics["train"]


def in_fp32(scoring: Any) -> Any:
    """A model whose rewards are fp32, as ours are: TRL computes the loss in the type of the rewards."""
    scoring.score.register_forward_hook(lambda _module, _given, rewards: rewards.float())
    return scoring.train()


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize(
    ("coefficient", "margins"),
    [(0.0, False), (0.0, True), (0.01, False), (0.5, True)],
    ids=["plain", "margins", "centered", "centered with margins"],
)
def test_the_loss_is_that_of_trl(
    *, coefficient: float, margins: bool, packing: bool, precision: torch.dtype
) -> None:
    split = pairs(margins=margins)
    batch = batch_of(split, packing=packing)
    ours = learned_from(RewardModel(coefficient), isolated(reward_model()).to(precision), batch)
    theirs = in_fp32(reward_model().to(precision))
    loss, metrics = trl_loss(theirs, split, coefficient or None)
    check(ours, loss, theirs)
    expected = [metrics[name][0] for name in ("margin", "accuracy", "mean_reward")]
    assert (ours[2] / PAIRS).tolist() == pytest.approx(expected, rel=TOLERANCES[precision])


def test_evaluation_losses_have_margins_but_are_not_centered() -> None:
    split = pairs(margins=True)
    network = Network(isolated(reward_model()), RewardModel(5.0))
    with network.no_grad_forward():
        loss, _ = network(batch_of(split))
    plain, _ = trl_loss(reward_model().eval().requires_grad_(False).train(), split, None)
    assert loss.item() / PAIRS == pytest.approx(plain.item(), rel=1e-5)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_scores_are_the_logits_of_transformers(*, packing: bool) -> None:
    split = pairs()
    network = Network(isolated(reward_model()), RewardModel())
    batch = batch_of(split, packing=packing)
    scores = reward.score(network, batch).view(-1, 2)
    inputs = trl_batch(split)
    with torch.no_grad():
        logits = reward_model().eval()(**inputs).logits.view(2, PAIRS).T
    torch.testing.assert_close(scores, logits[batch.examples], rtol=1e-4, atol=1e-5)


def test_the_last_token_is_the_last_one_that_is_not_padding() -> None:
    split = networks.of_documents([5, 6, 7], [5, 6, PAD], [PAD, 6, PAD, PAD], [PAD, PAD])
    batch = pack.collate(split, [[0, 1], [2, 3]], pad_id=PAD)
    width = batch.input_ids.shape[1]
    assert batch.last_at.tolist() == [2, 3 + 1, width + 1, width + 4]


def test_a_batch_without_sequences_has_no_rewards() -> None:
    """A rank without a batch of its own takes part in the collectives, and its loss has gradients."""
    network = Network(isolated(reward_model()), RewardModel())
    loss, metrics = network(pack.collate(pairs(), [], pad_id=PAD))
    loss.backward()
    assert (loss.item(), metrics.tolist()) == (0, [0, 0, 0])
    assert network.base.score.weight.grad.abs().sum() == 0
