"""The loss scale: a factor of the loss that keeps gradients in the range of fp16, adapted to the steps of the run."""

from __future__ import annotations

import torch

# As in torch.amp.GradScaler, except the minimum scale: if a step is not finite at this scale, the scale is not the cause.
_INITIAL_SCALE, _MIN_SCALE, _GROWTH_STEPS = 2.0**16, 1.0, 2000


class LossScale:
    """A loss scale that doubles after 2,000 consecutive finite steps, and halves, down to 1, after a step that is not finite.

    torch.amp.GradScaler does the same, but waits for the GPU in each step to find out whether to take it.

    Args:
        device: of the loss.
    """

    def __init__(self, device: torch.device) -> None:
        self._scale = torch.full((), _INITIAL_SCALE, device=device)
        self._good_steps = torch.zeros((), device=device)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the scale."""
        return loss * self._scale

    def unscale(self, gradients: list[torch.Tensor]) -> None:
        """Divide gradients by the scale, in place."""
        factor = 1.0 / self._scale
        for gradient in gradients:
            gradient.mul_(factor)

    def update(self, finite: torch.Tensor) -> torch.Tensor:
        """Adapt the scale to a step; never waits for the GPU.

        Args:
            finite: whether the gradients of the step were finite, a scalar on the device.

        Returns:
            Whether the step was skipped although the scale cannot be the cause, a scalar on the device.
        """
        is_broken = ~finite & (self._scale <= _MIN_SCALE)
        good_steps = torch.where(finite, self._good_steps + 1, 0.0)
        is_growing = good_steps >= _GROWTH_STEPS
        factor = torch.where(finite, torch.where(is_growing, 2.0, 1.0), 0.5)
        self._scale = (self._scale * factor).clamp(min=_MIN_SCALE)
        self._good_steps = torch.where(is_growing, 0.0, good_steps)
        return is_broken

    def state(self) -> tuple[float, int]:
        """Return the scale, and the good steps since it changed; waits for the GPU."""
        return self._scale.item(), int(self._good_steps.item())

    def load_state(self, scale: float, good_steps: int) -> None:
        """Set the values that `state` returned."""
        self._scale = torch.full_like(self._scale, scale)
        self._good_steps = torch.full_like(self._good_steps, good_steps)
