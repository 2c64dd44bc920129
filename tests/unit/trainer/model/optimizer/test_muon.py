"""Muon trains the matrices of the layers as torch's does, and AdamW the rest."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch

from finetune_crds.training import Training
from finetune_trainer.train.model.network.trained_network import Network
from finetune_trainer.train.model.optimizer.muon import Muon
from finetune_trainer.train.model.optimizer.optimizer import Optimizer, build_optimizers
from finetune_trainer.train.model.optimizer.schedule import Schedule
from finetune_trainer.train.objectives.sft import Sft

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 3


@pytest.fixture
def network(base_model: Path) -> Network:
    from transformers import AutoModelForCausalLM

    return Network(AutoModelForCausalLM.from_pretrained(base_model), Sft())


def test_each_step_is_that_of_torch(network: Network) -> None:
    """Bit for bit, where the gradients are below the norm to which they would be clipped."""
    theirs = copy.deepcopy(network)
    training = Training.model_validate(
        {
            "learningRate": 1e-2,
            "weightDecay": 0.1,
            "maxGradNorm": 1e9,
            "optimizer": {"type": "Muon", "momentum": 0.9},
        }
    )
    optimizer, schedule = Optimizer(network, training, STEPS), Schedule.of(training, STEPS)
    inside = {name for name, weight in theirs.named_parameters() if ".layers." in name and weight.ndim == 2}
    parameters = dict(theirs.named_parameters())
    muon = torch.optim.Muon(
        [parameters[name] for name in inside], weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    adamw_weights = {name: weight for name, weight in parameters.items() if name not in inside}
    groups: list[dict[str, Any]] = [
        {"params": [weight for weight in adamw_weights.values() if weight.ndim > 1], "weight_decay": 0.1},
        {"params": [weight for weight in adamw_weights.values() if weight.ndim <= 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, fused=True)
    assert {len(inside), len(adamw_weights)} == {14, 6}
    for step in range(STEPS):
        for our, their in zip(network.parameters(), theirs.parameters(), strict=True):
            our.grad = torch.randn_like(our)
            their.grad = our.grad.clone()
        for plain in (muon, adamw):
            for group in plain.param_groups:
                group["lr"] = schedule.at(step)
            plain.step()
        assert optimizer.step(step)[0].item()
        torch.testing.assert_close(network.state_dict(), theirs.state_dict(), rtol=0, atol=0)


def test_its_momentum_is_torch_s_by_default(network: Network) -> None:
    muon, _ = build_optimizers(network, Training.model_validate({"optimizer": {"type": "Muon"}}))
    assert isinstance(muon, Muon)
    expected = torch.optim.Muon([torch.nn.Parameter(torch.zeros(2, 2))]).param_groups[0]
    different = {
        name for name, value in expected.items() if name != "params" and muon.param_groups[0][name] != value
    }
    # Ours are those of training: matching AdamW's updates, its learning rate and weight decay serve both.
    assert different == {"lr", "weight_decay", "adjust_lr_fn"}
