"""The gradient of a loss in chunks is that of the whole, also in fp16 with slopes that fp16 cannot hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional

from finetune_trainer.train.model.network import chunked_loss

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS, WIDTH, VOCABULARY, CHUNK = 12, 16, 40, 5


def gradients(
    hidden: torch.Tensor, head: torch.Tensor, slope: float, summed: Callable[..., torch.Tensor], scale: float
) -> list[torch.Tensor]:
    """Those of hidden states and output layer by a loss with a slope, scaled, fp64 without the scale."""
    targets = torch.arange(TOKENS)
    leaves = [hidden.detach().clone().requires_grad_(), head.detach().clone().requires_grad_()]

    def score(logits: torch.Tensor, chunk: slice) -> torch.Tensor:
        return slope * functional.cross_entropy(logits, targets[chunk], reduction="sum")

    (summed(score, *leaves) * scale).backward()
    return [each.grad.double() / scale for each in leaves if each.grad is not None]


def in_chunks(score: chunked_loss.Score, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    def logits(states: torch.Tensor) -> torch.Tensor:
        return functional.linear(states, head).float()

    return chunked_loss.sum_loss(score, logits, hidden, [head], CHUNK)


def at_once(score: chunked_loss.Score, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    return score(functional.linear(hidden, head), slice(None))


@pytest.mark.parametrize(
    ("dtype", "slope", "scale", "error"),
    [
        (torch.float32, 1.0, 1.0, 1e-5),
        (torch.float16, 1.0, 2.0**4, 5e-3),
        (torch.float16, 1e-5, 2.0**16, 5e-3),
        (torch.float16, 1e5, 2.0**-14, 5e-3),
    ],
)
def test_gradients_are_those_of_the_whole(
    dtype: torch.dtype, slope: float, scale: float, error: float
) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(TOKENS, WIDTH).to(dtype), torch.randn(VOCABULARY, WIDTH).to(dtype)
    chunked = gradients(hidden, head, slope, in_chunks, scale)
    expected = gradients(hidden.double(), head.double(), slope, at_once, 1.0)
    for ours, theirs in zip(chunked, expected, strict=True):
        assert (ours - theirs).norm() < error * theirs.norm()
