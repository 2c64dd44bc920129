"""The learning rate by step."""

from __future__ import annotations

import pytest

from finetune_crds.training import Training
from finetune_trainer.train.model.schedule import Schedule


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"scheduler": "Constant", "warmup_steps": 0}, [1.0, 1.0, 1.0, 1.0, 1.0]),
        ({"scheduler": "Constant", "warmup_steps": 3}, [0.25, 0.5, 0.75, 1.0, 1.0]),
        ({"scheduler": "Linear", "warmup_steps": 0}, [1.0, 0.8, 0.6, 0.4, 0.2]),
        ({"scheduler": "Linear", "warmup_ratio": 0.2}, [0.5, 1.0, 0.75, 0.5, 0.25]),
        ({"scheduler": "Cosine", "warmup_steps": 1}, [0.5, 1.0, 0.853553, 0.5, 0.146447]),
        ({"scheduler": "Linear"}, [0.5, 1.0, 0.75, 0.5, 0.25]),
    ],
)
def test_it_warms_up_and_falls_as_the_recipe_says(settings: dict[str, object], expected: list[float]) -> None:
    training = Training.model_validate({"learning_rate": 1.0, **settings})
    schedule = Schedule.of(training, max_steps=5)
    assert [schedule.at(step) for step in range(5)] == pytest.approx(expected, rel=1e-5)
