"""Another method than the quickstart's: the sample lora, with fewer steps."""

from __future__ import annotations

import pytest

from demo.kubectl import Json
from e2e.hand import Hand
from e2e.jobs import Run, on_prepared_splits, sample
from e2e.stories import Stage

STEPS = 20


def run_story(stage: Stage) -> Json:
    """Train adapters on the quickstart's splits; return the job's status."""
    stage.quickstart()
    job = sample("lora")
    training = {key: value for key, value in job["spec"]["training"].items() if key != "epochs"}
    few = {"maxSteps": STEPS, "evalEverySteps": STEPS // 2, "logEverySteps": 2, "precision": "FP32"}
    job["spec"]["training"] = training | few
    job["spec"]["data"] = on_prepared_splits("lora")["spec"]["data"]
    status: Json = stage.jobs.follow(stage.jobs.apply(job))["status"]
    return status


def test_adapters_come_merged_into_a_model_that_has_learned(story: Json, run: Run, hand: Hand) -> None:
    assert story["progress"]["step"] == STEPS
    model, data = story["model"], run.status["data"]
    assert model["name"] == "docstring-llama-lora"
    assert model["evalLoss"] < model["baseEvalLoss"]
    loss = hand.loss_of(f"models:/{model['name']}/{model['version']}", data["path"], data["version"])
    assert loss == pytest.approx(model["evalLoss"], rel=0.02)
