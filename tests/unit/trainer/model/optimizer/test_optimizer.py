"""The optimizer: steps of AdamW are those of torch, and a step of any whose gradients are not finite changes nothing."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from finetune_crds.training import Training
from finetune_trainer.train.model.optimizer import optimizer as module
from finetune_trainer.train.model.optimizer.optimizer import Optimizer
from finetune_trainer.train.model.optimizer.schedule import Schedule

STEPS = 6
# What a recipe says, and what torch gets for it.
PARAMETERS: dict[str, tuple[dict[str, float], dict[str, Any]]] = {
    "by default": ({}, {"betas": (0.9, 0.999), "eps": 1e-8}),
    "for short runs": ({"beta2": 0.95}, {"betas": (0.9, 0.95), "eps": 1e-8}),
    "all": ({"beta1": 0.8, "beta2": 0.98, "epsilon": 1e-3}, {"betas": (0.8, 0.98), "eps": 1e-3}),
    "no momentum": ({"beta1": 0.0}, {"betas": (0.0, 0.999), "eps": 1e-8}),
}


@pytest.mark.parametrize(("spec", "expected"), PARAMETERS.values(), ids=PARAMETERS)
def test_each_step_is_that_of_plain_adamw(spec: dict[str, float], expected: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    theirs = copy.deepcopy(ours)
    training = Training.model_validate(
        {"learningRate": 1e-2, "weightDecay": 0.1, "maxGradNorm": 2.0, "optimizer": spec}
    )
    schedule, optimizer = Schedule.of(training, STEPS), Optimizer(ours, training, STEPS)
    decays = [weight for weight in theirs.parameters() if weight.ndim > 1]
    vectors = [weight for weight in theirs.parameters() if weight.ndim <= 1]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, foreach=False, fused=False, **expected)
    for step in range(STEPS):
        for our, their in zip(ours.parameters(), theirs.parameters(), strict=True):
            their.grad = torch.randn_like(their)
            our.grad = their.grad.clone()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 2.0)
        for group in plain.param_groups:
            group["lr"] = schedule.at(step)
        plain.step()
        assert optimizer.step(step)[0].item()
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-7)


def with_gradients(network: nn.Module) -> None:
    for weight in network.parameters():
        weight.grad = torch.randn_like(weight)


# Optimizers that skip a step in ways of their own, over weights of a type.
KINDS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "AdamW": ({}, torch.float32),
    "AdamW of bf16 weights": ({"weights": "BF16"}, torch.bfloat16),
    "AdamW8bit": ({"type": "AdamW8bit"}, torch.float32),
    "Muon": ({"type": "Muon"}, torch.float32),
}


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("spec", "dtype"), KINDS.values(), ids=KINDS)
def test_a_step_with_broken_gradients_changes_nothing(
    spec: dict[str, Any], dtype: torch.dtype, broken: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).to(dtype)
    monkeypatch.setattr(module, "find_muon_matrices", lambda _network: [network[0].weight])
    optimizer = Optimizer(network, Training.model_validate({"optimizer": spec}), 10)
    with_gradients(network)
    assert optimizer.step(0)[0].item()
    norm = optimizer.read_grad_norm()
    before = copy.deepcopy((network.state_dict(), [part.state_dict()["state"] for part in optimizer.parts]))

    with_gradients(network)
    first = next(network.parameters())
    assert first.grad is not None
    first.grad.view(-1)[0] = broken
    assert [flag.item() for flag in optimizer.step(1)] == [False, True]
    after = (network.state_dict(), [part.state_dict()["state"] for part in optimizer.parts])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert (optimizer.read_grad_norm(), first.grad) == (norm, None)

    with_gradients(network)
    assert optimizer.step(2)[0].item()
    steps = {
        int(state["step"]) for part in optimizer.parts for state in part.state.values() if "step" in state
    }
    assert steps == {2}
    assert not torch.equal(network.state_dict()["0.weight"], before[0]["0.weight"])


def test_gradients_of_a_scaled_loss_are_clipped_without_the_scale() -> None:
    torch.manual_seed(0)
    ours = nn.Linear(4, 4)
    theirs = copy.deepcopy(ours)
    norms_and_scales = []
    for network, precision in ((ours, "FP16"), (theirs, "FP32")):
        training = Training.model_validate({"precision": precision, "maxGradNorm": 0.1})
        optimizer = Optimizer(network, training, 10)
        optimizer.scale_loss(network(torch.ones(1, 4)).square().sum()).backward()
        optimizer.step(0)
        norms_and_scales.append((optimizer.read_grad_norm(), optimizer.read_loss_scale()))
    # The scale is a power of two.
    assert norms_and_scales[0][0] == norms_and_scales[1][0]
    assert [scale for _, scale in norms_and_scales] == [2.0**16, None]
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    optimizer = Optimizer(ours, Training.model_validate({"precision": "FP16"}), 10)
    (optimizer.scale_loss(ours(torch.ones(1, 4)).sum()) * math.inf).backward()
    assert [norms_and_scales.item() for norms_and_scales in optimizer.step(0)] == [False, False]
    assert optimizer.read_loss_scale() == 2.0**15
