"""The optimizer: a step whose gradients are not finite changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from finetune_crds.training import Training
from finetune_trainer.train.model.optimizer import Optimizer


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
