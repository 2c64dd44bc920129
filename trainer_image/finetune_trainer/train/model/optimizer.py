"""AdamW over what is trained, with gradient clipping and a learning rate schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from finetune_trainer.train.model.network import trained
from finetune_trainer.train.model.schedule import Schedule

if TYPE_CHECKING:
    from torch import nn

    from finetune_crds.training import Training


class Optimizer:
    """Clips the gradients of a network and applies them.

    Args:
        network: the sharded network.
        training: learning rate, scheduler, weight decay, optimizer and maxGradNorm.
        max_steps: steps of the whole run.
    """

    def __init__(self, network: nn.Module, training: Training, max_steps: int) -> None:
        self.adamw = adamw(network, training)
        self.learning_rate = 0.0
        """Of the last step."""
        self._schedule = Schedule.of(training, max_steps)
        self._parameters = trained(network)
        self._max_grad_norm = training.max_grad_norm
        self._grad_norm = torch.zeros(())

    def step(self, step: int) -> torch.Tensor:
        """Clip the gradients, apply them with the learning rate of `step`, and drop them; never waits for the GPU.

        Returns:
            Whether the gradients were finite, a scalar on the device, the same on all ranks. Others change nothing: neither the
            weights nor the optimizer's moments and its count of steps.
        """
        self.learning_rate = self._schedule.at(step)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        finite = torch.isfinite(norm)
        for group in self.adamw.param_groups:
            group["lr"] = self.learning_rate
        # NB: fused optimizers read this attribute on the device, as torch.amp.GradScaler sets it.
        self.adamw.found_inf = (~finite).float()
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        self._grad_norm = torch.where(finite, norm, self._grad_norm.to(norm.device))
        return finite

    def grad_norm(self) -> float:
        """Return the norm of the last finite gradients before clipping, the same on all ranks; waits for the GPU."""
        return float(self._grad_norm.item())


def adamw(network: nn.Module, training: Training) -> torch.optim.AdamW:
    """AdamW over what is trained, fused; biases and norms do not decay."""
    parameters, spec = trained(network), training.optimizer
    groups: list[dict[str, Any]] = [
        {
            "params": [weight for weight in parameters if weight.ndim > 1],
            "weight_decay": training.weight_decay,
        },
        {"params": [weight for weight in parameters if weight.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=training.learning_rate,
        betas=(spec.beta1, spec.beta2),
        eps=spec.epsilon,
        fused=True,
    )
