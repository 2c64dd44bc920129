"""The evaluation of a registered version: its numbers are on the version before an alias is."""

from __future__ import annotations

from typing import Any

import yaml

from fixtures.operator_processes.jobs import EVALUATED, TRAINED, splits_given
from fixtures.operator_processes.world import OwnWorld, World
from support.refusals import refused

Json = dict[str, Any]
TAGS = {"eval_accuracy": "0.75", "base_eval_accuracy": "0.5", "finetune_evaluation_data": "d1"}


def train(world: World, name: str = "tune") -> str:
    """Play the training of a job; the version that it registers."""
    world.run_pods(f"{name}-train-1", 2)
    run_id = world.wait_phase(name, "Training")["mlflow"]["runId"]
    version = world.mlflow.register(world.model, run_id)
    world.end_pods(f"{name}-train-1", [0, 0], [TRAINED, None])
    return version


def registered(world: World, version: str) -> Json:
    """A version, with its tags and aliases."""
    answer = world.mlflow.get("model-versions/get", name=world.model, version=version)
    version_body: Json = answer["model_version"]
    return {
        "tags": {item["key"]: item["value"] for item in version_body.get("tags", [])},
        "aliases": version_body.get("aliases", []),
    }


def logged(world: World, run_id: str, metric: str) -> list[float]:
    """Every value of a metric of a run."""
    answer = world.mlflow.get("metrics/get-history", run_id=run_id, metric_key=metric)
    return [item["value"] for item in answer.get("metrics", [])]


def test_a_version_has_its_numbers_once_before_it_has_its_alias(own_world: OwnWorld) -> None:
    own_world.submit(splits_given(evaluation={"metrics": ["Accuracy"]}))
    version = train(own_world)
    [pod] = own_world.run_pods("tune-evaluate", 1)
    status = own_world.wait_phase("tune", "Evaluating")
    [container] = pod["spec"]["containers"]
    assert container["args"] == ["--model", f"models:/{own_world.model}/{version}"]
    recipe = own_world.api.get("ConfigMap", own_world.namespace, "tune-evaluate")
    assert recipe is not None
    assert yaml.safe_load(recipe["data"]["recipe.yaml"])["evaluation"]["metrics"] == ["Accuracy"]
    assert registered(own_world, version) == {"tags": {}, "aliases": []}

    own_world.operator.kill()
    own_world.end_pods("tune-evaluate", [0], [EVALUATED])
    own_world.operator.start()
    status = own_world.wait_phase("tune", "Succeeded")
    assert status["evaluation"] == {
        "rows": 50,
        "digest": "d1",
        "metrics": [{"name": "eval_accuracy", "value": 0.75, "base": 0.5}],
    }
    assert own_world.condition("tune", "Evaluated")["message"] == (
        f"{own_world.model} version {version} on 50 rows: eval_accuracy 0.75 (base model 0.5)"
    )
    assert registered(own_world, version) == {"tags": TAGS, "aliases": ["candidate"]}
    own_world.restart()
    own_world.wait_condition("tune", "Tracked", "RunFinished")
    run_id = status["mlflow"]["runId"]
    assert logged(own_world, run_id, "eval_accuracy") == [0.75]
    assert logged(own_world, run_id, "base_eval_accuracy") == [0.5]


def test_a_command_of_your_own_finds_the_model_and_its_numbers_are_checked(world: World) -> None:
    command = {"command": ["judge"], "parameters": {"task": "math"}}
    image = {"image": "harness:1"}
    with refused("the operator sets MODEL_PATH and METRICS_PATH: remove them from evaluate.env"):
        world.submit(
            splits_given(
                evaluation=command, pods={"evaluate": {"env": [{"name": "MODEL_PATH", "value": "/mine"}]}}
            )
        )
    world.submit(splits_given(evaluation=command, pods={"evaluate": image}))
    sentence = "spec.evaluation cannot change once the job exists"
    with refused(sentence):
        world.api.patch(
            "FineTuneJob", world.namespace, "tune", {"spec": {"evaluation": {"command": ["other"]}}}
        )
    with refused(sentence):
        world.api.patch("FineTuneJob", world.namespace, "tune", {"spec": {"evaluation": None}})
    template = {"spec": {"nodeSelector": {"gpu": "yes"}}}
    world.api.patch(
        "FineTuneJob", world.namespace, "tune", {"spec": {"pods": {"evaluate": {"template": template}}}}
    )
    version = train(world)
    [pod] = world.run_pods("tune-evaluate", 1)
    [fetch], [container] = pod["spec"]["initContainers"], pod["spec"]["containers"]
    assert fetch["args"] == ["--model", f"models:/{world.model}/{version}", "--fetch"]
    assert (container["image"], pod["spec"]["nodeSelector"]) == ("harness:1", {"gpu": "yes"})
    world.end_pods("tune-evaluate", [0], ['{"acc,none": 0.5}'])
    status = world.wait_phase("tune", "Failed")
    assert world.condition("tune", "Failed")["reason"] == "EvaluationFailed"
    assert "the name 'acc,none' is not allowed" in world.condition("tune", "Failed")["message"]
    assert (status["model"]["version"], registered(world, version)) == (version, {"tags": {}, "aliases": []})
