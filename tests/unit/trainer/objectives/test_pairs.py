"""The losses of preferences are those of TRL on the same batch, in FP32 and in BF16."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from finetune_trainer.train.model.network.trained_network import Network
from finetune_trainer.train.objectives.answers import compute_reference
from finetune_trainer.train.objectives.dpo import Dpo, Ipo
from finetune_trainer.train.objectives.orpo import Orpo
from finetune_trainer.train.objectives.simpo import Simpo
from support import networks
from support.losses import (
    BETA,
    PRECISIONS,
    TOLERANCES,
    VOCABULARY,
    batch_of,
    check,
    isolated,
    learned_from,
    model,
    padded,
    trl_trainer,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from finetune_trainer.train.data.dataset import Split

PAIRS, GAMMA = 3, 0.4
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}")
    for kind in ("DeprecationWarning", "FutureWarning", "UserWarning")
]


def trl_dpo(
    policy: Any, reference: Any, split: Split, loss_type: str, smoothing: float
) -> tuple[torch.Tensor, dict[str, list[float]]]:
    """What TRL's DPOTrainer computes of a batch: its own method, with what that takes of the trainer."""
    from trl import DPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    for each in (policy, reference):
        add_fused_lm_head(each, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    pairs = range(len(split))
    ids, learned, mask = padded(split, [*(2 * at for at in pairs), *(2 * at + 1 for at in pairs)])
    learned[:, 0] = False
    metrics: dict[str, dict[str, list[float]]] = {"train": defaultdict(list)}
    trainer = trl_trainer(
        policy,
        reference,
        metrics,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        label_smoothing=smoothing,
        use_weighting=False,
    )
    inputs = {"input_ids": ids, "attention_mask": mask, "completion_mask": learned.long()}
    return DPOTrainer._compute_loss(trainer, policy, inputs, False), metrics["train"]


# TRL's sigmoid loss has no label smoothing. Its aot loss has it, and sorts the pairs of a batch: of one pair, it is conservative DPO.
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize(
    ("objective", "pairs", "loss_type", "smoothing"),
    [
        (Dpo(BETA), PAIRS, "sigmoid", 0.0),
        (Dpo(BETA), 1, "aot", 0.0),
        (Dpo(BETA, 0.2), 1, "aot", 0.2),
        (Ipo(BETA), PAIRS, "ipo", 0.0),
    ],
    ids=["DPO", "DPO of one pair", "smoothed DPO", "IPO"],
)
def test_dpo_and_ipo_are_the_losses_of_trl(
    objective: Any, pairs: int, loss_type: str, smoothing: float, precision: torch.dtype
) -> None:
    """Trap 7: the reference is the model before its first step, and needs no second model in memory."""
    split = networks.random_split(documents=2, examples=pairs, vocabulary=VOCABULARY)
    policy = isolated(model()).to(precision)
    with networks.alone() as world:
        network = Network(policy, objective)
        values = compute_reference(network, [batch_of(split)], world, pairs)
        assert network.objective is objective
    split = dataclasses.replace(split, reference=values)
    # The policy has learned something since.
    policy.load_state_dict(model(seed=1).state_dict())
    ours = learned_from(objective, policy, batch_of(split))
    theirs = model(seed=1).to(precision).train()
    loss, metrics = trl_dpo(theirs, model().to(precision).eval(), split, loss_type, smoothing)
    check(ours, loss, theirs)
    assert (ours[2] / pairs).tolist() == pytest.approx(rewards_of_trl(metrics), rel=TOLERANCES[precision])


def in_fp32(policy: Any) -> Any:
    """A policy whose logits are fp32, as they are in the trainers of TRL under autocast."""
    policy.get_output_embeddings().register_forward_hook(lambda _module, _given, logits: logits.float())
    return policy.train()


def trl_inputs(split: Split, pair: int) -> dict[str, torch.Tensor]:
    """A pair as ORPOTrainer and CPOTrainer take it."""
    inputs: dict[str, torch.Tensor] = {}
    for document, prefix in enumerate(("chosen", "rejected")):
        ids, learned, mask = padded(split, [2 * pair + document])
        inputs |= {
            f"{prefix}_input_ids": ids,
            f"{prefix}_attention_mask": mask,
            f"{prefix}_labels": ids.masked_fill(~learned.bool(), -100),
        }
    return inputs


def trl_of_pairs(
    kind: Any, policy: Any, split: Split, **trl_options: Any
) -> tuple[torch.Tensor, dict[str, list[float]]]:
    """What a trainer of TRL without a reference computes of each pair, and the means."""
    trainer = trl_trainer(
        policy, None, None, is_encoder_decoder=False, padding_value=0, pad_token_id=0, **trl_options
    )
    for name in ("concatenated_inputs", "get_batch_logps"):
        setattr(trainer, name, getattr(kind, name))
    for name in ("concatenated_forward", "odds_ratio_loss", "cpo_loss"):
        if hasattr(kind, name):
            setattr(trainer, name, MethodType(getattr(kind, name), trainer))
    each = [
        kind.get_batch_loss_metrics(trainer, policy, trl_inputs(split, pair)) for pair in range(len(split))
    ]
    names = each[0][1]
    metrics = {
        name: [sum(float(batch_metrics[name]) for _, batch_metrics in each) / len(each)] for name in names
    }
    return torch.stack([loss for loss, _ in each]).mean(), metrics


def trl_simpo(policy: Any, split: Split) -> tuple[torch.Tensor, dict[str, list[float]]]:
    from trl.experimental.cpo import CPOTrainer

    trl_options = {
        "loss_type": "simpo",
        "simpo_gamma": GAMMA,
        "cpo_alpha": 0,
        "alpha": 0.0,
        "label_smoothing": 0,
    }
    return trl_of_pairs(CPOTrainer, policy, split, **trl_options)


def trl_orpo(policy: Any, split: Split) -> tuple[torch.Tensor, dict[str, list[float]]]:
    """ORPO of TRL; of a prompt, its cross-entropy is taken away again."""
    from trl.experimental.orpo import ORPOTrainer

    loss, metrics = trl_of_pairs(ORPOTrainer, policy, split)
    totals = [-metrics["nll_loss"][0], metrics["logps/chosen"][0]]
    if split.loss_mask.all():
        assert totals[0] == pytest.approx(totals[1], rel=1e-2)
        return loss, metrics
    # The mean log-probability of the answer, and of prompt and answer, of each chosen document.
    for pair in range(len(split)):
        ids, learned, mask = padded(split, [2 * pair])
        each = policy(input_ids=ids, attention_mask=mask).logits[0, :-1].log_softmax(-1)
        each = each.gather(-1, ids[0, 1:, None])[:, 0]
        loss = loss + (each.mean() - each[learned[0, 1:]].mean()) / len(split)
    return loss, metrics


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize(
    ("objective", "of_trl", "prompts"),
    [
        (Orpo(BETA), trl_orpo, False),
        (Orpo(BETA), trl_orpo, True),
        (Simpo(BETA, GAMMA), trl_simpo, True),
    ],
    ids=["ORPO", "ORPO with prompts", "SimPO"],
)
def test_orpo_and_simpo_are_the_losses_of_trl(
    *, objective: Any, of_trl: Callable[[Any, Split], Any], prompts: bool, precision: torch.dtype
) -> None:
    split = networks.random_split(documents=2, examples=PAIRS, vocabulary=VOCABULARY)
    if not prompts:
        split = dataclasses.replace(split, loss_mask=np.ones_like(split.loss_mask))
    ours = learned_from(objective, isolated(model()).to(precision), batch_of(split))
    theirs = in_fp32(model().to(precision))
    loss, metrics = of_trl(theirs, split)
    check(ours, loss, theirs)
    assert (ours[2] / PAIRS).tolist() == pytest.approx(rewards_of_trl(metrics), rel=TOLERANCES[precision])


@pytest.mark.parametrize("certain", [0, 1])
def test_orpo_of_an_answer_that_is_certain_is_a_number(certain: int) -> None:
    """Its odds are infinite, and so is their derivative."""
    split = networks.random_split(documents=2, examples=1, vocabulary=VOCABULARY)
    # An answer of no tokens has the probability 1.
    split.loss_mask[slice(*split.offsets[certain : certain + 2])] = False
    loss, slopes, _ = learned_from(Orpo(BETA), isolated(model()), batch_of(split))
    assert math.isfinite(loss)
    assert all(slope.isfinite().all() for slope in slopes.values())


def rewards_of_trl(metrics: dict[str, list[float]]) -> list[float]:
    """The mean margin, and the share of correctly ranked pairs."""
    return [metrics["rewards/margins"][0], metrics["rewards/accuracies"][0]]
