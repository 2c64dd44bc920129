"""The sample sweep, with two trials and fewer steps: adapters with two learning rates, and the better of the two models registered."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from demo.install import NAMESPACE
from demo.kubectl import Json
from e2e.hand import Hand
from e2e.jobs import Run, on_prepared_splits, sample
from e2e.stories import Stage

STEPS = 20
# With the first one, the model learns next to nothing in so few steps.
RATES = (1e-6, 1e-3)
TRIALS = ("sweep-1", "sweep-2")
MODEL = "docstring-llama-sweep"


@dataclass(frozen=True)
class Sweep:
    """The status of the sweep, and those of its FineTuneJobs by name."""

    status: Json
    children: dict[str, Json]


def run_story(stage: Stage) -> Sweep:
    """Train both trials on the quickstart's splits, and deliver the model of the better one."""
    splits = stage.quickstart().status["data"]
    job = sample("sweep")
    spec = job["spec"]
    training = {key: value for key, value in spec["training"].items() if key != "epochs"}
    few = {"maxSteps": STEPS, "evalEverySteps": STEPS // 2, "logEverySteps": 2, "precision": "FP32"}
    spec["training"] = training | few
    spec["data"] = on_prepared_splits("sweep")["spec"]["data"]
    spec["data"]["splits"]["version"] = splits["version"]
    spec["sweep"]["parameters"] = [{"field": "training.learningRate", "values": [*RATES]}]
    spec["evaluation"]["limit"] = 10
    status = stage.jobs.follow(stage.jobs.apply(job))["status"]
    children = stage.jobs.api.list("FineTuneJob", NAMESPACE, "finetune.dev/sweep=sweep")
    return Sweep(status, {child["metadata"]["name"]: child["status"] for child in children})


def test_the_trial_with_the_lower_loss_is_the_best(story: Sweep) -> None:
    losses = [story.children[name]["model"]["evalLoss"] for name in TRIALS]
    assert losses[1] < losses[0]
    assert story.status["sweep"] == {
        "best": 2,
        "planned": 2,
        "trials": [
            {
                "n": number,
                "parameters": {"training.learningRate": f"{rate:g}"},
                "metric": loss,
                "step": STEPS,
                "phase": "Succeeded",
            }
            for number, (rate, loss) in enumerate(zip(RATES, losses, strict=True), start=1)
        ],
    }
    assert story.status["progress"]["summary"] == f"2/2, best {losses[1]:.4g}"


def test_the_trials_are_runs_below_the_run_of_the_sweep(story: Sweep, hand: Hand) -> None:
    parent = story.status["mlflow"]["runId"]
    tags = {
        name: hand.mlflow.get_run(status["mlflow"]["runId"]).data.tags
        for name, status in story.children.items()
    }
    assert {name: run_tags["mlflow.parentRunId"] for name, run_tags in tags.items()} == dict.fromkeys(
        (*TRIALS, "sweep-best"), parent
    )


def test_only_the_best_model_is_registered_merged_and_evaluated(story: Sweep, run: Run, hand: Hand) -> None:
    model, data = story.status["model"], run.status["data"]
    versions = hand.mlflow.search_model_versions(f"name = '{MODEL}'")
    assert [version.run_id for version in versions] == [story.children["sweep-best"]["mlflow"]["runId"]]
    assert (model["name"], model["version"]) == (MODEL, str(versions[0].version))
    assert model["evalLoss"] == pytest.approx(story.children["sweep-2"]["model"]["evalLoss"], rel=1e-4)
    # Adapters come merged into the model.
    loss = hand.loss_of(f"models:/{MODEL}/{model['version']}", data["path"], data["version"])
    assert loss == pytest.approx(model["evalLoss"], rel=0.02)
    assert story.status["evaluation"]["rows"] == 10
