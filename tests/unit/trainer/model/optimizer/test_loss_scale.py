"""The scale of the loss takes the values of torch.amp.GradScaler, and says which steps it cannot mend."""

from __future__ import annotations

import pytest
import torch

from finetune_trainer.train.model.optimizer import loss_scale
from finetune_trainer.train.model.optimizer.loss_scale import LossScale


def test_the_scale_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "_GROWTH_STEPS", 3)
    ours = LossScale(torch.device("cpu"))
    scale, good = torch.full((), 2.0**16), torch.zeros((), dtype=torch.int32)
    for finite in [True, True, False, True, True, True, True, True, True, False, False, True, True]:
        ours.update(torch.tensor(finite))
        torch._amp_update_scale_(scale, good, torch.tensor(float(not finite)), 2.0, 0.5, 3)
        assert ours.state() == (scale.item(), good.item())


def test_a_step_is_broken_once_the_scale_cannot_fall() -> None:
    ours = LossScale(torch.device("cpu"))
    broken = [ours.update(torch.tensor(False)).item() for _ in range(18)]
    assert broken == [False] * 16 + [True] * 2
    assert ours.state() == (1.0, 0)
    assert not ours.update(torch.tensor(True)).item()


def test_gradients_of_the_scaled_loss_are_unscaled() -> None:
    ours = LossScale(torch.device("cpu"))
    weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
    ours.scale_loss(weight.square().sum()).backward()
    assert weight.grad is not None
    ours.unscale([weight.grad])
    assert weight.grad.tolist() == [4.0, 6.0]


def test_another_attempt_goes_on_with_the_scale() -> None:
    ours, next_attempt = LossScale(torch.device("cpu")), LossScale(torch.device("cpu"))
    for finite in (False, True, True):
        ours.update(torch.tensor(finite))
    next_attempt.load_state(*ours.state())
    assert next_attempt.state() == (2.0**15, 2)
