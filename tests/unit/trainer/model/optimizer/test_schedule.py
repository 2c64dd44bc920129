"""The learning rate by step: as the recipe says, and after the warm-up as transformers has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import optimization

from finetune_crds.training import Training
from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.train.model.optimizer.schedule import Schedule

Json = dict[str, Any]
# What a recipe says beside a peak of 1, and the learning rate of each step.
BY_STEP: dict[str, tuple[Json, list[float]]] = {
    "constant": ({"scheduler": "Constant", "warmupSteps": 0}, [1.0, 1.0, 1.0, 1.0, 1.0]),
    "constant after a warm-up": ({"scheduler": "Constant", "warmupSteps": 3}, [0.25, 0.5, 0.75, 1.0, 1.0]),
    "linear": ({"scheduler": "Linear", "warmupSteps": 0}, [1.0, 0.8, 0.6, 0.4, 0.2]),
    "linear after a share": ({"scheduler": "Linear", "warmupRatio": 0.2}, [0.5, 1.0, 0.75, 0.5, 0.25]),
    "linear after the usual warm-up": ({"scheduler": "Linear"}, [0.5, 1.0, 0.75, 0.5, 0.25]),
    "linear to a floor": (
        {"scheduler": "Linear", "warmupSteps": 0, "minLearningRate": 0.1},
        [1.0, 0.82, 0.64, 0.46, 0.28],
    ),
    "cosine": ({"scheduler": "Cosine", "warmupSteps": 1}, [0.5, 1.0, 0.853553, 0.5, 0.146447]),
    "cosine to a floor, from below it": (
        {"scheduler": "Cosine", "warmupSteps": 1, "minLearningRate": 0.6},
        [0.5, 1.0, 0.941421, 0.8, 0.658579],
    ),
    "a decay of some steps": (
        {"scheduler": "WSD", "warmupSteps": 2, "decaySteps": 4},
        [1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0, 0.5, 0.292893, 0.133975],
    ),
    "a decay of a share, to a floor": (
        {"scheduler": "WSD", "warmupSteps": 0, "decayRatio": 0.4, "minLearningRate": 0.2},
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.6, 0.434315, 0.307180],
    ),
    "the usual decay": (
        {"scheduler": "WSD"},
        [0.5, *[1.0] * 27, 0.422650, 0.183503],
    ),
    "a decay of all that the warm-up leaves": (
        {"scheduler": "WSD", "warmupSteps": 2, "decayRatio": 1.0},
        [1 / 3, 2 / 3, 1.0, 0.5, 0.292893, 0.133975],
    ),
    "no room for the usual decay": ({"scheduler": "WSD"}, [0.5]),
    "a decay of all steps": (
        {"scheduler": "WSD", "warmupSteps": 0, "decaySteps": 4},
        [1.0, 0.5, 0.292893, 0.133975],
    ),
}


def schedule(settings: Json, max_steps: int, peak: float = 1.0) -> Schedule:
    return Schedule.of(Training.model_validate({"learningRate": peak, **settings}), max_steps)


@pytest.mark.parametrize(("settings", "expected"), BY_STEP.values(), ids=BY_STEP)
def test_it_warms_up_and_falls_as_the_recipe_says(settings: Json, expected: list[float]) -> None:
    built = schedule(settings, len(expected))
    assert [built.at(step) for step in range(len(expected))] == pytest.approx(expected, rel=1e-5)


STEPS, WARMUP, DECAY, PEAK, FLOOR = 40, 5, 12, 3e-4, 2e-5
BuildScheduler = Callable[[torch.optim.Optimizer, int], Any]
# What a recipe says, and the schedule of transformers after a warm-up of some steps.
THEIRS: dict[str, tuple[Json, BuildScheduler]] = {
    "constant": (
        {"scheduler": "Constant"},
        optimization.get_constant_schedule_with_warmup,
    ),
    "linear": (
        {"scheduler": "Linear"},
        lambda optimizer, warmup: optimization.get_linear_schedule_with_warmup(optimizer, warmup, STEPS),
    ),
    "linear to a floor": (
        {"scheduler": "Linear", "minLearningRate": FLOOR},
        lambda optimizer, warmup: optimization.get_polynomial_decay_schedule_with_warmup(
            optimizer, warmup, STEPS, lr_end=FLOOR, power=1.0
        ),
    ),
    "cosine": (
        {"scheduler": "Cosine"},
        lambda optimizer, warmup: optimization.get_cosine_schedule_with_warmup(optimizer, warmup, STEPS),
    ),
    "cosine to a floor": (
        {"scheduler": "Cosine", "minLearningRate": FLOOR},
        lambda optimizer, warmup: optimization.get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, warmup, STEPS, min_lr=FLOOR
        ),
    ),
    "warm-up, stable, decay": (
        {"scheduler": "WSD", "decaySteps": DECAY},
        lambda optimizer, warmup: optimization.get_wsd_schedule(
            optimizer, warmup, DECAY, num_training_steps=STEPS, decay_type="1-sqrt"
        ),
    ),
    "warm-up, stable, decay to a floor": (
        {"scheduler": "WSD", "decaySteps": DECAY, "minLearningRate": FLOOR},
        lambda optimizer, warmup: optimization.get_wsd_schedule(
            optimizer, warmup, DECAY, num_training_steps=STEPS, decay_type="1-sqrt", min_lr_ratio=FLOOR / PEAK
        ),
    ),
}


def of_transformers(build_scheduler: BuildScheduler, warmup: int) -> list[float]:
    """The learning rate of each step, and after the last."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    (factor,) = build_scheduler(optimizer, warmup).lr_lambdas
    return [PEAK * factor(step) for step in range(STEPS + 1)]


@pytest.mark.parametrize(("settings", "build_scheduler"), THEIRS.values(), ids=THEIRS)
def test_after_the_warm_up_it_is_that_of_transformers(
    settings: Json, build_scheduler: BuildScheduler
) -> None:
    ours = schedule({**settings, "warmupSteps": WARMUP}, STEPS, PEAK)
    rates = [ours.at(step) for step in range(WARMUP, STEPS + 1)]
    assert rates == pytest.approx(of_transformers(build_scheduler, WARMUP)[WARMUP:], rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("name", [name for name in THEIRS if name != "warm-up, stable, decay to a floor"])
def test_the_warm_up_is_that_of_transformers_without_its_step_of_zero(name: str) -> None:
    settings, build_scheduler = THEIRS[name]
    ours = schedule({**settings, "warmupSteps": WARMUP}, STEPS, PEAK)
    rates = [ours.at(step) for step in range(WARMUP)]
    zero, *theirs = of_transformers(build_scheduler, WARMUP + 1)[: WARMUP + 1]
    assert zero == 0.0
    assert rates == pytest.approx(theirs)


def test_a_decay_that_is_longer_than_the_rest_of_the_run_is_refused() -> None:
    settings = {"scheduler": "WSD", "warmupSteps": 3, "decaySteps": 8}
    assert schedule(settings, 11).decay_steps == 8
    with pytest.raises(RecipeRefusedError) as refused:
        schedule(settings, 10)
    assert refused.value.message == (
        "training.decaySteps is 8, but the run has 10 steps, of which 3 are warm-up: set decaySteps to 7 or less, or set "
        "decayRatio instead"
    )
