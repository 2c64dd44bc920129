"""Whether training still goes well: what is broken must not become the newest checkpoint."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from finetune_trainer.outcome import TrainingError

if TYPE_CHECKING:
    from collections.abc import Callable

# A loss is running away when two reports in a row are so much above the least one: times, and nats.
_RUNAWAY_TIMES, _RUNAWAY_NATS = 3.0, 2.0


class Watch:
    """Looks at losses and norms that are the same on all ranks, so that all of them stop alike.

    Args:
        before_the_end: called before an error is raised, so that the last good checkpoint is seen through.
    """

    def __init__(self, before_the_end: Callable[[], None]) -> None:
        self._before_the_end = before_the_end
        self._least_loss = math.inf
        self._runaway_reports = 0

    def check_finite(self, step: int, figure: float) -> None:
        """Stop at the first sign of a broken model.

        Raises:
            TrainingError: the figure is not finite.
        """
        if not math.isfinite(figure):
            self._before_the_end()
            raise TrainingError(
                "NonFiniteLoss",
                f"loss or gradients are not finite at step {step}: lower training.learningRate, or look for broken "
                "examples",
            )

    def check_runaway(self, step: int, loss: float) -> None:
        """Stop a model that gets worse and worse, before its checkpoints push out the good ones.

        Raises:
            TrainingError: the second reported loss in a row is far above the least.
        """
        self._least_loss = min(self._least_loss, loss)
        limit = max(_RUNAWAY_TIMES * self._least_loss, self._least_loss + _RUNAWAY_NATS)
        self._runaway_reports = self._runaway_reports + 1 if loss > limit else 0
        if self._runaway_reports > 1:
            self._before_the_end()
            raise TrainingError(
                "DivergingLoss",
                f"the loss is {loss:.2f} at step {step}, after {self._least_loss:.2f} at its best: lower "
                "training.learningRate, or warm up longer",
            )
