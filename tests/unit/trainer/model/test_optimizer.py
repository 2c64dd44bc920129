"""The optimizer: its steps are those of plain AdamW, and one whose gradients are not finite changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from finetune_crds.training import Training
from finetune_trainer.train.model.optimizer import Optimizer
from finetune_trainer.train.model.schedule import Schedule

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
    others = [weight for weight in theirs.parameters() if weight.ndim <= 1]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, foreach=False, fused=False, **expected)
    for step in range(STEPS):
        for our, their in zip(ours.parameters(), theirs.parameters(), strict=True):
            their.grad = torch.randn_like(their)
            our.grad = their.grad.clone()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 2.0)
        for group in plain.param_groups:
            group["lr"] = schedule.at(step)
        plain.step()
        assert optimizer.step(step).item()
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-7)


def with_gradients(network: nn.Module, value: float) -> None:
    for weight in network.parameters():
        weight.grad = torch.full_like(weight, value)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_step_with_broken_gradients_changes_nothing(broken: float) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = Optimizer(network, Training(), 10)
    with_gradients(network, 0.5)
    assert optimizer.step(0).item()
    norm = optimizer.grad_norm()
    before = copy.deepcopy((network.state_dict(), optimizer.adamw.state_dict()["state"]))

    with_gradients(network, 0.5)
    first = next(network.parameters())
    assert first.grad is not None
    first.grad.view(-1)[0] = broken
    assert not optimizer.step(1).item()
    after = (network.state_dict(), optimizer.adamw.state_dict()["state"])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert (optimizer.grad_norm(), first.grad) == (norm, None)

    with_gradients(network, 0.5)
    assert optimizer.step(2).item()
    assert {int(state["step"]) for state in optimizer.adamw.state.values()} == {2}
