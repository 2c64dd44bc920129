"""When a loss has gone wrong, and when it is only noisy."""

from __future__ import annotations

import pytest

from finetune_trainer.pod.exit_status import TrainingError
from finetune_trainer.train.runtime.watch import Watch


@pytest.mark.parametrize(
    ("losses", "stopped_at"),
    [
        ([5.0, 4.0, 3.0, 2.0], None),
        ([2.0, 1.0, 3.5, 1.0, 3.5], None),
        ([0.01, 0.5, 1.9, 1.9], None),
        ([2.0, 1.0, 3.5, 3.4], 3),
        ([5.0, 15.1, 15.2], 2),
    ],
    ids=["falls", "spikes", "small losses are noisy", "stays above", "runs away at once"],
)
def test_a_loss_runs_away_when_two_reports_are_far_above_the_least(
    losses: list[float], stopped_at: int | None
) -> None:
    ends: list[int] = []
    watch = Watch(2, lambda: ends.append(1))
    if stopped_at is None:
        for step, loss in enumerate(losses):
            watch.check_runaway(step, loss)
    else:
        for step, loss in enumerate(losses[:stopped_at]):
            watch.check_runaway(step, loss)
        with pytest.raises(TrainingError, match=r"from a minimum of \d\.00") as stopped:
            watch.check_runaway(stopped_at, losses[stopped_at])
        assert stopped.value.reason == "DivergingLoss"
    assert len(ends) == (0 if stopped_at is None else 1)


@pytest.mark.parametrize("figure", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stops_at_once(figure: float) -> None:
    watch = Watch(2, lambda: None)
    watch.check_finite(1, 1.0)
    with pytest.raises(TrainingError) as stopped:
        watch.check_finite(2, figure)
    assert stopped.value.message == (
        "the loss is not finite at step 2: lower training.learningRate, or check the data for broken examples"
    )


def test_more_skipped_steps_than_allowed_stop() -> None:
    ends: list[int] = []
    watch = Watch(2, lambda: ends.append(1))
    watch.check_skipped(10, 2)
    assert not ends
    with pytest.raises(TrainingError) as stopped:
        watch.check_skipped(20, 3)
    assert (stopped.value.reason, ends) == ("NonFiniteLoss", [1])
    assert stopped.value.message == (
        "the gradients of 3 steps up to step 20 are not finite, more than training.maxSkippedSteps (2): lower "
        "training.learningRate, or check the data for broken examples"
    )
