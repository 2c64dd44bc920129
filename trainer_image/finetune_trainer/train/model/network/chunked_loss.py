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
    """Takes the logits of a chunk, fp32 [chunk, vocabulary], and its slice of the tokens; returns the summed loss, an fp32 scalar."""
    Logits = Callable[[torch.Tensor], torch.Tensor]
    """Takes hidden states [tokens, width]; returns their logits, fp32 [tokens, vocabulary]."""

# Logits of a chunk: 128 MB in fp32 in a small chunk, 1 GB in a large chunk. Large chunks save time if the output layer is trained, since
# each chunk adds a gradient of the whole layer to the sum. `fit.decide` chooses.
SMALL_CHUNK_NUMBERS, LARGE_CHUNK_NUMBERS = 32 * 2**20, 256 * 2**20
# Largest gradient of a chunk's logits after scaling for fp16: as large as possible without an overflow of the output layer's
# gradient, a sum over the tokens of a small chunk.
_MAX_GRADIENT = 4.0


def iterate_chunks(tokens: int, size: int) -> Iterator[slice]:
    """Yield slices of at most `size` tokens."""
    for begin in range(0, tokens, size):
        yield slice(begin, min(begin + size, tokens))


def sum_loss(
    score: Score, logits: Logits, hidden: torch.Tensor, parameters: Sequence[torch.Tensor], size: int
) -> torch.Tensor:
    """Return the sum of `score` over all chunks, an fp32 scalar, differentiable in hidden states and parameters.

    Args:
        score: the loss of a chunk.
        logits: the output layer.
        hidden: last hidden states [tokens, width].
        parameters: of the output layer.
        size: tokens of a chunk.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if torch.is_grad_enabled() and (hidden.requires_grad or trained):
        total: torch.Tensor = _SummedLoss.apply(score, logits, size, hidden, *trained)
        return total
    losses = [score(logits(hidden[chunk]), chunk) for chunk in iterate_chunks(len(hidden), size)]
    return torch.stack(losses).sum() if losses else hidden.new_zeros((), dtype=torch.float32)


class _SummedLoss(torch.autograd.Function):
    """The function of `sum_loss`: its forward pass computes the gradients too, and its backward pass scales them."""

    @staticmethod
    def forward(
        context: Any,
        score: Score,
        logits: Logits,
        size: int,
        hidden: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        is_fp16 = hidden.dtype == torch.float16
        total = hidden.new_zeros((), dtype=torch.float32)
        # NB: fp32 for fp16, which would lose small gradients when their scale is divided out.
        hidden_gradient = torch.zeros_like(hidden, dtype=torch.float32 if is_fp16 else hidden.dtype)
        # NB: the sum over chunks is fp32; bf16 would lose small terms.
        sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
        for chunk in iterate_chunks(len(hidden), size):
            with torch.enable_grad():
                states = hidden[chunk].detach().requires_grad_()
                scale = None
                if is_fp16:
                    loss, gradients, scale = _compute_scaled_gradients(
                        score, logits(states), chunk, [states, *parameters]
                    )
                else:
                    # NB: in one pass, which frees the logits as soon as possible.
                    loss = score(logits(states), chunk)
                    gradients = torch.autograd.grad(loss, [states, *parameters])
            total += loss.detach()
            # The gradient of the hidden states is written to its chunk; the gradients of the parameters are summed over the chunks.
            for gradient_sum, gradient in zip((hidden_gradient[chunk], *sums), gradients, strict=True):
                gradient_sum.add_(gradient if scale is None else gradient.float().div_(scale))
        context.dtypes = [each.dtype for each in (hidden, *parameters)]
        context.save_for_backward(hidden_gradient, *sums)
        return total

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (scale,) = gradients
        hidden_gradient, *sums = context.saved_tensors
        hidden_dtype, *dtypes = context.dtypes
        # NB: scaled in fp32 and rounded once; a rounded scale would bias the gradient.
        parameter_gradients = (
            gradient_sum.mul_(scale).to(dtype) for gradient_sum, dtype in zip(sums, dtypes, strict=True)
        )
        # `score`, `logits` and `size` have no gradients.
        return None, None, None, (hidden_gradient * scale).to(hidden_dtype), *parameter_gradients


def _compute_scaled_gradients(
    score: Score, logits: torch.Tensor, chunk: slice, inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]:
    """Return the loss of a chunk of logits, its gradients times a scale, and that scale.

    NB: the scale of the whole loss multiplies these gradients only later, when fp16 would already have lost the small ones: so each chunk
    has a scale of its own.
    """
    leaf = logits.detach().requires_grad_()
    loss = score(leaf, chunk)
    (logit_gradients,) = torch.autograd.grad(loss, leaf)
    scale = _choose_scale(logit_gradients)
    return loss, torch.autograd.grad(logits, inputs, logit_gradients.mul_(scale)), scale


def _choose_scale(gradients: torch.Tensor) -> torch.Tensor:
    """Return the power of two that brings the largest of some gradients near `_MAX_GRADIENT`, a scalar on the device."""
    # The minimum avoids a division by zero.
    largest = gradients.abs().amax().clamp(min=2.0**-100)
    return torch.exp2(torch.log2(_MAX_GRADIENT / largest).floor())


def compute_log_probabilities(
    logits: Logits, hidden: torch.Tensor, targets: torch.Tensor, size: int
) -> torch.Tensor:
    """Return the log-probability of each target, in nats, fp32 [tokens], without a gradient, `size` tokens at a time."""
    with torch.no_grad():
        parts = [
            -functional.cross_entropy(logits(hidden[chunk]), targets[chunk], reduction="none")
            for chunk in iterate_chunks(len(hidden), size)
        ]
    return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.float32)
