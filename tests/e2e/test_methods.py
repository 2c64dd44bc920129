"""Other methods and objectives than the quickstart's: their samples, with fewer steps."""

from __future__ import annotations

import math

import pytest

from demo.kubectl import Json
from e2e.hand import Hand
from e2e.jobs import Jobs, Run, condition, on_prepared_splits, sample

STEPS = 20
ROWS = 16


def short(name: str) -> Json:
    """A sample, with few steps, in the precision that its losses are compared in."""
    job = sample(name)
    training = {key: value for key, value in job["spec"]["training"].items() if key != "epochs"}
    few = {"maxSteps": STEPS, "evalEverySteps": STEPS // 2, "logEverySteps": 2, "precision": "FP32"}
    job["spec"]["training"] = training | few
    return job


@pytest.fixture(scope="module")
def applied(jobs: Jobs) -> Jobs:
    """Both jobs at once: the one trains while the other's data is prepared."""
    preferences, adapters = short("dpo"), short("lora")
    preferences["spec"]["data"]["prepare"]["limit"] = 400
    adapters["spec"]["data"] = on_prepared_splits("lora")["spec"]["data"]
    adapters["spec"]["evaluation"] = sample("evaluated")["spec"]["evaluation"] | {
        "limit": ROWS,
        "generations": 4,
    }
    for job in (preferences, adapters):
        jobs.apply(job)
    return jobs


def test_adapters_come_merged_into_a_model_that_has_learned(applied: Jobs, run: Run, hand: Hand) -> None:
    status = applied.follow("lora")["status"]
    assert status["progress"]["step"] == STEPS
    model, data = status["model"], run.status["data"]
    assert model["name"] == "docstring-llama-lora"
    assert model["evalLoss"] < model["baseEvalLoss"]
    loss = hand.loss_of(f"models:/{model['name']}/{model['version']}", data["path"], data["version"])
    assert loss == pytest.approx(model["evalLoss"], rel=0.02)


def test_the_version_was_evaluated_before_its_alias_moved(applied: Jobs, hand: Hand) -> None:
    status = applied.follow("lora")["status"]
    found, model = status["evaluation"], status["model"]
    assert found["rows"] == ROWS
    numbers = {item["name"]: (item["value"], item["base"]) for item in found["metrics"]}
    assert numbers.keys() == {
        "evaluation_loss",
        "evaluation_perplexity",
        "eval_exact_match",
        "eval_rouge1",
        "eval_rouge2",
        "eval_rougeL",
    }
    # So few steps teach little that 16 rows show: both are near the losses that training has on its rows.
    losses = pytest.approx((model["evalLoss"], model["baseEvalLoss"]), rel=0.15)
    assert numbers["evaluation_loss"] == losses
    assert numbers["evaluation_loss"][0] != numbers["evaluation_loss"][1]
    version = hand.mlflow.get_model_version_by_alias(model["name"], "candidate")
    assert str(version.version) == model["version"]
    assert version.tags["finetune_evaluation_data"] == found["digest"]
    metrics = hand.mlflow.get_run(status["mlflow"]["runId"]).data.metrics
    for name, both in numbers.items():
        for key, value in zip((name, f"base_{name}"), both, strict=True):
            assert (float(version.tags[key]), metrics[key]) == pytest.approx((value, value), rel=1e-4)
    moved, evaluated = (condition(status, kind)["lastTransitionTime"] for kind in ("Registered", "Evaluated"))
    assert moved >= evaluated
    files = hand.mlflow.list_artifacts(status["mlflow"]["runId"], "evaluation")
    assert [file.path for file in files] == ["evaluation/generations.json"]


def test_preferences_are_prepared_and_learned(applied: Jobs) -> None:
    status = applied.follow("dpo")["status"]
    assert status["progress"]["step"] == STEPS
    assert sum(status["data"]["rows"].values()) == 400
    assert status["model"]["name"] == "docstring-llama-dpo"
    # A model that is its own reference prefers neither answer.
    assert status["model"]["baseEvalLoss"] == pytest.approx(math.log(2), abs=1e-3)
    assert status["model"]["evalLoss"] < status["model"]["baseEvalLoss"]
