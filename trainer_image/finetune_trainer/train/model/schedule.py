"""The learning rate schedule, a function of the step: resuming needs no state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from finetune_crds.training import Training

_DEFAULT_WARMUP_RATIO = 0.03


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to the peak, then constant, linear or cosine down to zero after the last step."""

    kind: str
    peak: float
    warmup_steps: int
    max_steps: int

    @classmethod
    def of(cls, training: Training, max_steps: int) -> Schedule:
        """Make the schedule of a recipe for `max_steps` steps."""
        ratio = _DEFAULT_WARMUP_RATIO if training.warmup_ratio is None else training.warmup_ratio
        steps = training.warmup_steps if training.warmup_steps is not None else math.ceil(ratio * max_steps)
        return cls(training.scheduler, training.learning_rate, steps, max_steps)

    def at(self, step: int) -> float:
        """Return the learning rate of a step, from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        done = (step - self.warmup_steps) / max(1, self.max_steps - self.warmup_steps)
        if self.kind == "Linear":
            return self.peak * (1.0 - done)
        if self.kind == "Cosine":
            return self.peak * 0.5 * (1.0 + math.cos(math.pi * done))
        return self.peak
