"""Muon over sharded matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from finetune_trainer.train.model.network.trained_network import Network, decoder_layers
from finetune_trainer.train.model.optimizer.compact_adamw import is_step_finite
from finetune_trainer.train.model.optimizer.decay import find_matrices
from finetune_trainer.train.model.rows import local_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


def find_muon_matrices(network: Network) -> list[nn.Parameter]:
    """Return the matrices that Muon trains: the matrices of the decoder's layers, as its authors do.

    The embedding and the output layer, vectors, other parameters of a layer, and experts that are stored as one tensor are
    trained by AdamW.
    """
    return find_matrices(decoder_layers(network))


class Muon(torch.optim.Muon):
    """torch's Muon (Liu et al., arXiv:2502.16982) for sharded matrices.

    The direction of an update needs the whole matrix: each rank gathers one matrix at a time, in bf16, orthogonalizes it and
    applies its own rows. Like fused optimizers, it reads the attribute `found_inf`: if it is not 0, the step changes nothing.
    """

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update each matrix that has a gradient; never waits for the GPU."""
        assert closure is None  # noqa: S101 - the loop computes the gradients
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    with torch.no_grad():
                        self._update(weight, group)

    def _update(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        rate, momentum = group["lr"], group["momentum"]
        is_applied = is_step_finite(self, weight.device)
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        gradient, _ = local_rows(weight.grad)
        buffer, _ = local_rows(state["momentum_buffer"])
        mean = buffer.lerp(gradient, 1 - momentum)
        buffer.copy_(torch.where(is_applied, mean, buffer))
        # Nesterov's momentum, as by default in torch.
        direction = _orthogonalize(weight, gradient.lerp(mean, momentum), group)
        values, _ = local_rows(weight)
        updated = values * (1 - rate * group["weight_decay"])
        updated.add_(direction, alpha=-_adjust_lr(rate, group["adjust_lr_fn"], weight.shape))
        values.copy_(torch.where(is_applied, updated, values))


def _orthogonalize(weight: torch.Tensor, update: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """Return this rank's rows of the orthogonalized update of a matrix."""
    update = update.bfloat16()
    if not isinstance(weight, DTensor):
        return _newton_schulz(update, group)
    _, rows = local_rows(weight)
    sharded = DTensor.from_local(
        update,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
    return _newton_schulz(sharded.full_tensor(), group)[rows]


def _newton_schulz(update: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    orthogonalized: torch.Tensor = _zeropower_via_newtonschulz(
        update,
        group["ns_coefficients"],
        group["ns_steps"],
        group["eps"],
    )
    return orthogonalized
