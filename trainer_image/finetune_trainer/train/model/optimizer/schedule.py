"""The learning rate schedule, a function of the step: a resumed run restores no state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from finetune_trainer.pod.exit_status import RecipeRefusedError

if TYPE_CHECKING:
    from finetune_crds.training import Scheduler, Training

# A decay in 10% of the steps is enough, and 2.5% are too few (Hu et al., arXiv:2404.06395, section 4).
_DEFAULT_DECAY_RATIO = 0.1


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up to the peak; then constant, or down to the floor, which is reached after the last step.

    Linear and Cosine decrease from the warm-up on. WSD (warm-up, stable, decay) stays at the peak until the last `decay_steps`
    steps, in which it falls as 1 - sqrt(share of the decay). This gives a lower loss than a linear decay of the same length
    (Hägele et al., arXiv:2405.18392, section 3).

    After the warm-up, the schedules are those of transformers: `get_linear_schedule_with_warmup`, or with a floor
    `get_polynomial_decay_schedule_with_warmup` of power 1; `get_cosine_with_min_lr_schedule_with_warmup`; `get_wsd_schedule`
    with decay_type 1-sqrt. The warm-up differs: theirs starts with a learning rate of 0, or of the floor for WSD, so that the first
    step changes little or nothing. Here the warm-up always starts from 0, and that step is omitted: a warm-up of 3 steps has 1/4,
    2/4 and 3/4 of the peak.
    """

    kind: Scheduler
    peak: float
    floor: float
    warmup_steps: int
    decay_steps: int
    max_steps: int

    @classmethod
    def of(cls, training: Training, max_steps: int) -> Schedule:
        """Make the schedule of a recipe for `max_steps` steps.

        Raises:
            RecipeRefusedError: the run is shorter than warm-up and decaySteps together.
        """
        warmup_steps = training.warmup_of(max_steps)
        steps_after_warmup = max(0, max_steps - warmup_steps)
        decay_steps = 0 if training.scheduler == "Constant" else steps_after_warmup
        if training.scheduler == "WSD":
            ratio = _DEFAULT_DECAY_RATIO if training.decay_ratio is None else training.decay_ratio
            decay_steps = training.decay_steps or min(math.ceil(ratio * max_steps), steps_after_warmup)
        if decay_steps > steps_after_warmup:
            raise RecipeRefusedError(
                f"training.decaySteps is {decay_steps}, but the run has {max_steps} steps, of which {warmup_steps} are warm-up: "
                f"set decaySteps to {steps_after_warmup} or less, or set decayRatio instead"
            )
        return cls(
            kind=training.scheduler,
            peak=training.learning_rate,
            floor=training.min_learning_rate or 0.0,
            warmup_steps=warmup_steps,
            decay_steps=decay_steps,
            max_steps=max_steps,
        )

    def at(self, step: int) -> float:
        """Return the learning rate of a step; steps count from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        height = self._height(step)
        return self.peak * height + self.floor * (1.0 - height)

    def _height(self, step: int) -> float:
        """Return the position of a step's learning rate between floor (0) and peak (1), after the warm-up."""
        if self.decay_steps == 0:
            return 1.0
        share = max(0, step - (self.max_steps - self.decay_steps)) / self.decay_steps
        match self.kind:
            case "Constant":
                return 1.0
            case "Linear":
                return 1.0 - share
            case "Cosine":
                return 0.5 * (1.0 + math.cos(math.pi * share))
            case "WSD":
                return 1.0 - math.sqrt(share)
        assert_never(self.kind)
