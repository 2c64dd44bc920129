"""The optimizer of the trained weights, with gradient clipping, a learning rate schedule and, for fp16, a scale of the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from finetune_crds.optimizer import DEFAULT_MOMENTUM
from finetune_trainer.train.model import precision, rows
from finetune_trainer.train.model.network.trained_network import Network, trained_parameters
from finetune_trainer.train.model.optimizer.compact_adamw import CompactAdamW, find_embeddings
from finetune_trainer.train.model.optimizer.decay import find_decaying
from finetune_trainer.train.model.optimizer.loss_scale import LossScale
from finetune_trainer.train.model.optimizer.muon import Muon, find_muon_matrices
from finetune_trainer.train.model.optimizer.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import nn

    from finetune_crds.training import Training


class StepResult(NamedTuple):
    """The result of a step: boolean scalars on the device, the same on all ranks."""

    is_finite: torch.Tensor
    """Whether the gradients were finite."""
    has_diverged: torch.Tensor
    """Whether the gradients were not finite and the loss scale is not the cause: there is none, or it has been halved to its minimum."""


class Optimizer:
    """Clips the gradients of a network and applies them.

    Args:
        network: the sharded network.
        training: learning rate, scheduler, weight decay, optimizer, precision, seed and maxGradNorm.
        max_steps: steps of the whole run.
    """

    def __init__(self, network: nn.Module, training: Training, max_steps: int) -> None:
        self.parts = build_optimizers(network, training)
        """One optimizer for each kind of update; each weight belongs to one of them."""
        self.learning_rate = 0.0
        """The learning rate of the last step."""
        self.loss_scale: LossScale | None = None
        """None unless the precision is FP16."""
        self._schedule = Schedule.of(training, max_steps)
        self._parameters = trained_parameters(network)
        self._max_grad_norm = training.max_grad_norm
        self._grad_norm = torch.zeros(())
        if training.precision == "FP16":
            self.loss_scale = LossScale(self._parameters[0].device)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss multiplied by the loss scale: `step` expects the gradients of this product."""
        return loss if self.loss_scale is None else self.loss_scale.scale_loss(loss)

    def step(self, step: int) -> StepResult:
        """Clip the gradients, apply them with the learning rate of `step`, and drop them; never waits for the GPU.

        If the gradients are not finite, the weights, the moments and the optimizer's count of steps do not change.
        """
        self.learning_rate = self._schedule.at(step)
        if self.loss_scale is not None:
            self.loss_scale.unscale([weight.grad for weight in self._parameters if weight.grad is not None])
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        norm = rows.gather_tensor(norm)
        finite = torch.isfinite(norm)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = self.learning_rate
            # NB: all parts read this attribute on the device, as torch.amp.GradScaler sets it: if it is not 0, they change nothing.
            part.found_inf = (~finite).float()
            if isinstance(part, CompactAdamW):
                # Its random rounding is a function of the step.
                part.number = step
            part.step()
            part.zero_grad(set_to_none=True)
        self._grad_norm = torch.where(finite, norm, self._grad_norm.to(norm))
        has_diverged = ~finite if self.loss_scale is None else self.loss_scale.update(finite)
        return StepResult(finite, has_diverged)

    def read_loss_scale(self) -> float | None:
        """Return the scale of the loss, or None if the loss is not scaled; waits for the GPU."""
        if self.loss_scale is None:
            return None
        scale, _good_steps = self.loss_scale.state()
        return scale

    def read_grad_norm(self) -> float:
        """Return the norm of the last finite gradients before clipping, the same on all ranks; waits for the GPU."""
        return float(self._grad_norm.item())


def build_optimizers(network: nn.Module, training: Training) -> tuple[torch.optim.Optimizer, ...]:
    """Build the optimizers of the trained weights; see `decay` for weight decay."""
    parameters, decaying_weights = trained_parameters(network), find_decaying(network)
    spec = training.optimizer
    if spec.type == "Muon":
        muon_weights = find_muon_matrices(cast("Network", network))
        muon_ids = {id(weight) for weight in muon_weights}
        muon = Muon(
            muon_weights,
            lr=training.learning_rate,
            weight_decay=training.weight_decay,
            momentum=DEFAULT_MOMENTUM if spec.momentum is None else spec.momentum,
            # Updates as large as those of AdamW, so that both use one learning rate.
            adjust_lr_fn="match_rms_adamw",
        )
        remaining_weights = [weight for weight in parameters if id(weight) not in muon_ids]
        return muon, _build_adamw(remaining_weights, decaying_weights, find_embeddings(network), training)
    return (_build_adamw(parameters, decaying_weights, find_embeddings(network), training),)


def _build_adamw(
    parameters: Sequence[nn.Parameter],
    decaying_weights: Collection[nn.Parameter],
    embeddings: Collection[nn.Parameter],
    training: Training,
) -> torch.optim.Optimizer:
    """Build AdamW for parameters: torch's fused AdamW, or the compact one to save memory."""
    spec = training.optimizer
    groups: list[dict[str, Any]] = [
        {
            "params": [weight for weight in parameters if weight in decaying_weights],
            "weight_decay": training.weight_decay,
        },
        {"params": [weight for weight in parameters if weight not in decaying_weights], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    options: dict[str, Any] = {
        "lr": training.learning_rate,
        "betas": (spec.beta1, spec.beta2),
        "eps": spec.epsilon,
    }
    is_eight_bit = spec.type == "AdamW8bit"
    if is_eight_bit or precision.trained_dtype(training) == torch.bfloat16:
        return CompactAdamW(
            groups, **options, eight_bit=is_eight_bit, embeddings=embeddings, seed=training.seed
        )
    return torch.optim.AdamW(groups, **options, fused=True)
