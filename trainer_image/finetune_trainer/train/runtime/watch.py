"""Detects divergence before it reaches a checkpoint."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from finetune_trainer.pod.exit_status import TrainingError

if TYPE_CHECKING:
    from collections.abc import Callable

# Training diverges when two consecutive reports exceed the minimum loss by this factor and by this many nats.
_RUNAWAY_FACTOR, _RUNAWAY_NATS = 3.0, 2.0
_REMEDY = "lower training.learningRate, or check the data for broken examples"


class Watch:
    """Checks losses and counts that are the same on all ranks, so that all ranks stop together.

    Args:
        max_skipped_steps: training.maxSkippedSteps.
        before_the_end: called before an error is raised, to finish the save of the last good checkpoint.
    """

    def __init__(self, max_skipped_steps: int, before_the_end: Callable[[], None]) -> None:
        self._max_skipped_steps = max_skipped_steps
        self._before_the_end = before_the_end
        self._least_loss = math.inf
        self._runaway_reports = 0

    def check_finite(self, step: int, value: float) -> None:
        """Stop when a loss is not finite.

        Raises:
            TrainingError: `value` is not finite.
        """
        if not math.isfinite(value):
            self._before_the_end()
            raise TrainingError("NonFiniteLoss", f"the loss is not finite at step {step}: {_REMEDY}")

    def check_skipped(self, step: int, skipped: int) -> None:
        """Stop when the gradients of too many steps were not finite.

        Raises:
            TrainingError: more than `max_skipped_steps` steps of the run were skipped.
        """
        if skipped > self._max_skipped_steps:
            self._before_the_end()
            raise TrainingError(
                "NonFiniteLoss",
                f"the gradients of {skipped} steps up to step {step} are not finite, more than training.maxSkippedSteps "
                f"({self._max_skipped_steps}): {_REMEDY}",
            )

    def check_runaway(self, step: int, loss: float) -> None:
        """Stop a diverging model before its checkpoints replace the good ones.

        Raises:
            TrainingError: the loss of two consecutive reports is far above the minimum.
        """
        self._least_loss = min(self._least_loss, loss)
        limit = max(_RUNAWAY_FACTOR * self._least_loss, self._least_loss + _RUNAWAY_NATS)
        self._runaway_reports = self._runaway_reports + 1 if loss > limit else 0
        if self._runaway_reports > 1:
            self._before_the_end()
            raise TrainingError(
                "DivergingLoss",
                f"the loss diverged to {loss:.2f} at step {step}, from a minimum of {self._least_loss:.2f}: lower "
                "training.learningRate, or use a longer warm-up",
            )
