"""The sample chain, applied at once: SFT with an evaluation, a promotion gated on accuracy, and DPO from the champion."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import yaml

from demo.install import SAMPLES
from demo.kubectl import Json
from demo.promotions import at
from e2e.hand import Hand
from e2e.jobs import condition
from e2e.stories import Stage

MODEL = "docstring-kinds"
PROMOTION = "chain-champion"
NUMBERS = {"eval_accuracy", "eval_f1"}


@dataclass(frozen=True)
class Chain:
    """What became of the chain: the statuses of its jobs, and those of the promotion after each."""

    waiting: Json
    sft: Json
    first: Json
    dpo: Json
    second: Json


def run_story(stage: Stage) -> Chain:
    """Apply the whole file; the second job first, to see what it waits for."""
    jobs = stage.jobs
    parts = {
        part["metadata"]["name"]: part
        for part in yaml.safe_load_all((SAMPLES / "chain.yaml").read_text("utf-8"))
    }
    for name in ("chain-sft", "chain-dpo"):
        parts[name]["spec"]["training"]["precision"] = "FP32"
    jobs.apply(parts["chain-dpo"])
    waiting = jobs.until(
        "chain-dpo", "waits for its base", lambda status: condition(status, "ModelsFound"), seconds=60
    )
    jobs.apply(parts["chain-sft"], parts[PROMOTION])
    return Chain(
        waiting["status"],
        jobs.follow("chain-sft")["status"],
        jobs.promotion(PROMOTION, at("Promoted", "1")),
        jobs.follow("chain-dpo")["status"],
        jobs.promotion(PROMOTION, at("Promoted", "2")),
    )


def test_the_second_job_waits_for_its_base(story: Chain) -> None:
    assert condition(story.waiting, "Ready")["reason"] == "WaitingForModel"


def test_the_version_was_evaluated_before_its_alias_moved(story: Chain, hand: Hand) -> None:
    status = story.sft
    evaluation, model = status["evaluation"], status["model"]
    assert (evaluation["rows"], model["name"], model["version"]) == (100, MODEL, "1")
    numbers = {item["name"]: (item["value"], item["base"]) for item in evaluation["metrics"]}
    assert numbers.keys() == NUMBERS
    # A model that has not learned the task names none of the kinds.
    assert numbers["eval_accuracy"][1] == 0
    assert numbers["eval_accuracy"][0] >= 0.8
    version = hand.mlflow.get_model_version(MODEL, "1")
    assert version.tags["finetune_evaluation_data"] == evaluation["digest"]
    metrics = hand.mlflow.get_run(status["mlflow"]["runId"]).data.metrics
    for name, both in numbers.items():
        for key, value in zip((name, f"base_{name}"), both, strict=True):
            assert (float(version.tags[key]), metrics[key]) == pytest.approx((value, value), rel=1e-4)
    moved, evaluated = (condition(status, kind)["lastTransitionTime"] for kind in ("Registered", "Evaluated"))
    assert moved >= evaluated
    files = hand.mlflow.list_artifacts(status["mlflow"]["runId"], "evaluation")
    assert [file.path for file in files] == ["evaluation/generations.json"]


def test_the_gate_stands_on_the_accuracy(story: Chain) -> None:
    [verdict] = story.first["gates"]["verdicts"]
    assert (verdict["name"], verdict["verdict"]) == ("accurate", "Passed")


def test_preferences_are_learned_from_the_champion_on(story: Chain, hand: Hand) -> None:
    status = story.dpo
    assert status["pinned"] == {"base": f"models:/{MODEL}/1"}
    model = status["model"]
    assert (model["name"], model["version"]) == (MODEL, "2")
    # A model that is its own reference prefers neither answer.
    assert model["baseEvalLoss"] == pytest.approx(math.log(2), abs=1e-3)
    assert model["evalLoss"] < model["baseEvalLoss"]
    numbers = {item["name"]: (item["value"], item["base"]) for item in status["evaluation"]["metrics"]}
    # The base is the adapter of the first job merged into its own base: it knows the task.
    assert numbers["eval_accuracy"][1] >= 0.8
    assert story.second["gates"]["summary"] == "1/1"
    assert hand.aliases(MODEL) == {"candidate": "2", "champion": "2"}
