"""Losses over the vocabulary that compute logits in chunks.

Logits are the largest tensor of a training step: 2,048 tokens of a vocabulary of 128,000 take 1 GB in fp32, and
their gradient as much again. Here they exist for one chunk of tokens at a time. The gradient of a chunk is computed
with its loss, so nothing is computed twice (as in Hsu et al., arXiv:2410.10989).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Score = Callable[[torch.Tensor, slice], torch.Tensor]
    """The summed loss, an fp32 scalar, of a chunk: its hidden states [chunk, width], and its slice of the tokens."""

# Elements of a chunk of logits: 128 MB in fp32.
CHUNK_NUMBERS = 32 * 2**20


def slices(tokens: int, vocabulary: int) -> Iterator[slice]:
    """Yield the chunks of a number of tokens."""
    size = max(1, CHUNK_NUMBERS // vocabulary)
    for begin in range(0, tokens, size):
        yield slice(begin, min(begin + size, tokens))


def summed(
    score: Score, hidden: torch.Tensor, parameters: Sequence[torch.Tensor], vocabulary: int
) -> torch.Tensor:
    """Return the sum of `score` over all chunks, an fp32 scalar, differentiable in hidden states and parameters.

    Args:
        score: the loss of a chunk.
        hidden: last hidden states [tokens, width].
        parameters: of the output layer, which `score` uses.
        vocabulary: number of logits per token.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if torch.is_grad_enabled() and (hidden.requires_grad or trained):
        total: torch.Tensor = _Summed.apply(score, vocabulary, hidden, *trained)
        return total
    losses = [score(hidden[chunk], chunk) for chunk in slices(len(hidden), vocabulary)]
    return torch.stack(losses).sum() if losses else hidden.new_zeros((), dtype=torch.float32)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, score: Score, vocabulary: int, hidden: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        total = hidden.new_zeros((), dtype=torch.float32)
        hidden_gradient = torch.zeros_like(hidden)
        # NB: the sum over chunks is fp32; bf16 would lose small terms.
        sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
        for chunk in slices(len(hidden), vocabulary):
            with torch.enable_grad():
                states = hidden[chunk].detach().requires_grad_()
                loss = score(states, chunk)
                gradients = torch.autograd.grad(loss, [states, *parameters])
            total += loss.detach()
            hidden_gradient[chunk] = gradients[0]
            for at, gradient in enumerate(gradients[1:]):
                sums[at] += gradient
        context.kinds = [parameter.dtype for parameter in parameters]
        context.save_for_backward(hidden_gradient, *sums)
        return total

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (scale,) = gradients
        hidden, *sums = context.saved_tensors
        # NB: scaled in fp32 and rounded once; a rounded scale would bias the gradient.
        parameters = (sums[at].mul_(scale).to(kind) for at, kind in enumerate(context.kinds))
        return None, None, (hidden * scale).to(hidden.dtype), *parameters


def log_probabilities(
    logits: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    vocabulary: int,
) -> torch.Tensor:
    """Return the log-probability of each target, in nats, fp32 [tokens], without a gradient."""
    with torch.no_grad():
        parts = [
            -functional.cross_entropy(logits(hidden[chunk]), targets[chunk], reduction="none")
            for chunk in slices(len(hidden), vocabulary)
        ]
    return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.float32)
