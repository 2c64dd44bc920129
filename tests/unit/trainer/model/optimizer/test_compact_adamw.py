"""AdamW with moments of 8 bits takes the steps of bitsandbytes' one; updates of bf16 weights are not lost in rounding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from finetune_trainer.train.model.optimizer import compact_adamw
from finetune_trainer.train.model.optimizer.compact_adamw import (
    CompactAdamW,
    find_embeddings,
    round_stochastically,
)

RATE, BETAS, EPSILON, DECAY, STEPS = 1e-2, (0.9, 0.98), 1e-6, 0.1, 6
# Half of the distance between two numbers of bf16, as a share of them: at most.
HALF = 2**-8


def groups(network: nn.Module) -> list[dict[str, Any]]:
    weights = list(network.parameters())
    return [
        {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": DECAY},
        {"params": [weight for weight in weights if weight.ndim <= 1], "weight_decay": 0.0},
    ]


def compact(network: nn.Module, *, eight_bit: bool = True, seed: int = 0) -> CompactAdamW:
    return CompactAdamW(
        groups(network),
        lr=RATE,
        betas=BETAS,
        eps=EPSILON,
        eight_bit=eight_bit,
        embeddings=find_embeddings(network),
        seed=seed,
    )


def plain(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(network), lr=RATE, betas=BETAS, eps=EPSILON, foreach=False)


def give_gradients(*modules: nn.Module) -> None:
    """The same random ones to each, of another size in each row."""
    for weights in zip(*(network.parameters() for network in modules), strict=True):
        gradient = torch.randn(weights[0].shape) * torch.logspace(-3, 0, weights[0].shape[-1])
        for weight in weights:
            weight.grad = gradient.to(weight.dtype)


def test_each_step_is_that_of_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 512 numbers have two blocks; the bias is small, and bitsandbytes keeps its moments in fp32 too."""
    from bitsandbytes.optim.adamw import AdamW8bit

    monkeypatch.setattr(compact_adamw, "_NUMBERS_PER_UPDATE", 512 * 10)
    torch.manual_seed(0)
    ours = nn.Linear(512, 24)
    theirs = copy.deepcopy(ours)
    our_optimizer = compact(ours)
    their_optimizer = AdamW8bit(groups(theirs), lr=RATE, betas=BETAS, eps=EPSILON)  # type: ignore[no-untyped-call]
    for _ in range(STEPS):
        give_gradients(ours, theirs)
        our_optimizer.step()
        their_optimizer.step()
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-4, atol=1e-6)
    state, expected = our_optimizer.state[ours.weight], their_optimizer.state[theirs.weight]
    kinds = {name: (value.dtype, tuple(value.shape)) for name, value in state.items()}
    assert kinds == {
        "step": (torch.float32, ()),
        "exp_avg": (torch.uint8, (24, 512)),
        "exp_avg_scale": (torch.float32, (24, 2)),
        "exp_avg_sq": (torch.uint8, (24, 512)),
        "exp_avg_sq_scale": (torch.float32, (24, 2)),
    }
    for name, number in (("exp_avg", 1), ("exp_avg_sq", 2)):
        torch.testing.assert_close(state[f"{name}_scale"].flatten(), expected[f"absmax{number}"])
        # A number between two codes may go to either.
        assert (state[name].int() - expected[f"state{number}"].int()).abs().max() <= 1
        assert (state[name] != expected[f"state{number}"]).float().mean() < 0.01


def test_embeddings_keep_fp32_moments_as_in_bitsandbytes() -> None:
    """With the setting that the Trainer of transformers makes for each embedding."""
    from bitsandbytes.optim.adamw import AdamW8bit
    from bitsandbytes.optim.optimizer import GlobalOptimManager

    torch.manual_seed(0)
    ours = nn.Sequential(nn.Embedding(24, 512), nn.Linear(512, 24, bias=False))
    theirs = copy.deepcopy(ours)
    manager = GlobalOptimManager.get_instance()  # type: ignore[no-untyped-call]
    manager.register_module_override(theirs[0], "weight", {"optim_bits": 32})
    our_optimizer = compact(ours)
    their_optimizer = AdamW8bit(groups(theirs), lr=RATE, betas=BETAS, eps=EPSILON)  # type: ignore[no-untyped-call]
    for _ in range(STEPS):
        give_gradients(ours, theirs)
        our_optimizer.step()
        their_optimizer.step()
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-4, atol=1e-6)
    types = [
        (
            our_optimizer.state[our_weight.weight]["exp_avg"].dtype,
            their_optimizer.state[their_weight.weight]["state1"].dtype,
        )
        for our_weight, their_weight in zip(ours, theirs, strict=True)
    ]
    assert types == [(torch.float32, torch.float32), (torch.uint8, torch.uint8)]


def test_a_tied_output_layer_has_fp32_moments_too() -> None:
    tied = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64, bias=False))
    tied[1].weight = tied[0].weight
    optimizer = compact(tied)
    give_gradients(tied)
    optimizer.step()
    assert [state["exp_avg"].dtype for state in optimizer.state.values()] == [torch.float32]


@pytest.mark.parametrize(
    ("shape", "scales"),
    [
        ((16, 256), (16, 1)),
        ((32, 896), (32, 7)),
        ((64, 192), (64, 3)),
        ((8, 16, 64), (8, 16, 1)),
        # Too small, no multiple of 64, and a vector.
        ((15, 256), None),
        ((512, 100), None),
        ((8192,), None),
    ],
)
def test_moments_have_8_bits_where_blocks_fill_rows(
    shape: tuple[int, ...], scales: tuple[int, ...] | None
) -> None:
    weight = nn.Parameter(torch.zeros(shape))
    weight.grad = torch.ones(shape)
    optimizer = CompactAdamW(
        [{"params": [weight]}], lr=RATE, betas=BETAS, eps=EPSILON, eight_bit=True, seed=0
    )
    optimizer.step()
    state = optimizer.state[weight]
    assert state["exp_avg"].dtype == (torch.float32 if scales is None else torch.uint8)
    stored_scales = state.get("exp_avg_scale")
    assert (None if stored_scales is None else tuple(stored_scales.shape)) == scales


def test_packed_experts_take_the_steps_of_matrices_in_parts_as_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact_adamw, "_NUMBERS_PER_UPDATE", 64 * 10)
    torch.manual_seed(0)
    packed, matrix = nn.Module(), nn.Module()
    packed.weight = nn.Parameter(torch.randn(4, 24, 64))
    matrix.weight = nn.Parameter(packed.weight.detach().view(-1, 64).clone())
    optimizers = compact(packed), compact(matrix)
    largest = 0
    updated = compact_adamw._compute_update

    def measured(weight: torch.Tensor, *arguments: Any) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, weight.numel())
        return updated(weight, *arguments)

    monkeypatch.setattr(compact_adamw, "_compute_update", measured)
    for _ in range(2):
        matrix.weight.grad = torch.randn(96, 64)
        packed.weight.grad = matrix.weight.grad.view(4, 24, 64).clone()
        for optimizer in optimizers:
            optimizer.step()
    assert largest == 64 * 10
    assert torch.equal(packed.weight.view(-1, 64), matrix.weight)
    state = optimizers[0].state[packed.weight]
    assert state["exp_avg"].shape == (4, 24, 64)
    assert torch.equal(
        state["exp_avg_scale"].view(-1, 1), optimizers[1].state[matrix.weight]["exp_avg_scale"]
    )


def test_rounding_goes_to_a_neighbor_as_often_as_it_is_near() -> None:
    torch.manual_seed(0)
    noise = torch.Generator().manual_seed(0)
    draws = 4096
    values = torch.cat([torch.randn(62) * torch.logspace(-30, 30, 62), torch.tensor([0.0, 1.5])])
    rounded = round_stochastically(values.repeat(draws, 1), noise).float()
    gap = (rounded.amax(0) - rounded.amin(0)).double()
    # What bf16 can hold stays as it is; all else is between the two numbers that it became.
    assert torch.equal(rounded[:, -2:], values[-2:].expand(draws, 2))
    assert ((rounded.amin(0) <= values) & (values <= rounded.amax(0))).all()
    assert (gap <= 2 * HALF * values.abs().double()).all()
    # The standard error of a mean of two values is at most half of their distance by the root of the draws.
    assert ((rounded.double().mean(0) - values.double()).abs() <= 5 * gap / 2 / draws**0.5).all()


def test_updates_below_the_precision_of_bf16_are_not_lost() -> None:
    """100 updates of 1e-4 at 1.0, where bf16 has steps of 2^-8 below: to the nearest, not one of them would be seen."""
    weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimizer = CompactAdamW(
        [{"params": [weight]}], lr=1e-4, betas=BETAS, eps=EPSILON, eight_bit=False, seed=0
    )
    for step in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.number = step
        optimizer.step()
    assert weight.float().mean().item() == pytest.approx(1 - 100 * 1e-4, abs=2e-4)


def test_bf16_weights_take_the_steps_of_fp32_ones_and_round_them() -> None:
    """Each step begins at the same weights; the moments are fp32, and those of fp32 weights."""
    torch.manual_seed(0)
    ours = nn.Linear(64, 64).bfloat16()
    theirs = copy.deepcopy(ours).float()
    our_optimizer, their_optimizer = compact(ours, eight_bit=False), plain(theirs)
    for step in range(STEPS):
        give_gradients(ours, theirs)
        for our, their in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert our.grad is not None
            their.grad = our.grad.float()
            their.data.copy_(our.data)
        our_optimizer.number = step
        our_optimizer.step()
        their_optimizer.step()
        for our, their in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert ((our.float() - their).abs() <= 2.01 * HALF * their.abs() + 1e-30).all()
            torch.testing.assert_close(
                our_optimizer.state[our]["exp_avg_sq"], their_optimizer.state[their]["exp_avg_sq"]
            )


def after(number: int, seed: int = 0) -> torch.Tensor:
    weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizer = CompactAdamW(
        [{"params": [weight]}], lr=RATE / 7, betas=BETAS, eps=EPSILON, eight_bit=True, seed=seed
    )
    optimizer.number = number
    optimizer.step()
    return weight.detach()


def test_rounding_is_a_function_of_seed_and_step() -> None:
    assert torch.equal(after(1), after(1))
    assert not torch.equal(after(1), after(2))
    assert not torch.equal(after(1), after(1, seed=1))
