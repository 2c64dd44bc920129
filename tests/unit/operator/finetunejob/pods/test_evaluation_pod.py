"""The children of an evaluation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml

from finetune_crds.status import DataStatus, MlflowStatus, ModelStatus, SplitCounts
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.pods import evaluation_pod
from finetune_operator.registry.base import RegisteredVersion
from fixtures.operator_in_memory.decisions import (
    ACCEPTED,
    NOW,
    SETTINGS,
    SOURCE,
    SPLITS,
    TRAINED,
    ftj,
    observed,
    status,
)

Json = dict[str, Any]
URI = "models:/tuned/4"
VERSION = RegisteredVersion("tuned", "4")
COMMAND: Json = {"command": ["judge"], "args": ["--fast"], "parameters": {"task": "math"}}
COUNTS = SplitCounts(train=9, validation=1, test=1)
KNOWN = status(
    ACCEPTED,
    TRAINED,
    attempt=1,
    mlflow=MlflowStatus(experiment_id="e1", run_id="r1"),
    model=ModelStatus(name="tuned", version="4"),
)
RULES: list[Json] = [
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    {
        "action": "FailJob",
        "onExitCodes": {"containerName": "evaluate", "operator": "In", "values": [64, 65]},
    },
]


def draft(evaluation: Json, settings: Any = SETTINGS, before: Any = KNOWN, **parts: Any) -> Draft:
    finetunejob = ftj(before, register={"model": "tuned"}, evaluation=evaluation, **parts)
    return Draft(finetunejob, observed(), NOW, settings)


def job(evaluation: Json, version: RegisteredVersion = VERSION, **parts: Any) -> Json:
    return evaluation_pod.build_job(draft(evaluation, **parts), version)


def pod(evaluation: Json, **parts: Any) -> Json:
    spec: Json = job(evaluation, **parts)["spec"]["template"]["spec"]
    return spec


def container(evaluation: Json, **parts: Any) -> Json:
    containers: Json = pod(evaluation, **parts)["containers"][0]
    return containers


def test_the_recipe_names_no_other_job() -> None:
    """A pod cannot look up the job whose checkpoints training continued from, and an evaluation reads none."""
    checkpoint = {"uri": "s3://bucket/runs", "resumeFrom": {"type": "Job", "name": "first"}}
    recipe = evaluation_pod.build_recipe(draft({}, checkpoint=checkpoint), VERSION)["data"]["recipe.yaml"]
    assert "resumeFrom" not in yaml.safe_load(recipe)["checkpoint"]


def test_the_built_in_evaluation() -> None:
    all_pods, evaluate = (
        {"env": [{"name": name, "value": value}]} for name, value in (("ALL", "c"), ("A", "b"))
    )
    finetunejob = job({}, pods={"all": all_pods, "evaluate": evaluate})
    assert finetunejob["metadata"]["name"] == "tune-evaluate"
    assert finetunejob["metadata"]["annotations"] == {"finetune.dev/version": "4"}
    assert finetunejob["metadata"]["labels"]["finetune.dev/component"] == "evaluate"
    assert (finetunejob["spec"]["backoffLimit"], finetunejob["spec"]["podFailurePolicy"]) == (
        2,
        {"rules": RULES},
    )
    pod = finetunejob["spec"]["template"]["spec"]
    [main] = pod["containers"]
    assert (main["name"], main["image"]) == ("evaluate", "trainer:1")
    assert (main["command"], main["args"]) == (["finetune-evaluate"], ["--model", URI])
    assert {item["name"]: item.get("value") for item in main["env"]} == {
        "HOME": "/tmp",
        "ALL": "c",
        "A": "b",
        "FINETUNE_RECIPE": "/etc/finetune/recipe.yaml",
        "MLFLOW_TRACKING_URI": "http://mlflow:5000",
        "MLFLOW_REGISTRY_URI": "http://mlflow:5000",
        "MLFLOW_RUN_ID": "r1",
    }
    assert "initContainers" not in pod
    assert {"name": "recipe", "configMap": {"name": "tune-evaluate"}} in pod["volumes"]


def test_a_command_of_your_own_gets_the_model_from_an_init_container_that_reads_the_same_storage() -> None:
    mount = {"name": "base", "mountPath": "/models"}
    resources = {"limits": {"nvidia.com/gpu": "1", "memory": "16Gi"}, "requests": {"nvidia.com/gpu": "1"}}
    main = {"name": "main", "volumeMounts": [mount], "resources": resources}
    template = {"spec": {"containers": [main], "volumes": [{"name": "base", "emptyDir": {}}]}}
    env = [{"name": "PYTHONPATH", "value": "/harness"}]
    finetunejob = job(COMMAND, pods={"evaluate": {"image": "harness:1", "template": template, "env": env}})
    pod = finetunejob["spec"]["template"]["spec"]
    [fetch], [main] = pod["initContainers"], pod["containers"]
    assert (main["image"], main["command"], main["args"]) == ("harness:1", ["judge"], ["--fast"])
    assert (fetch["name"], fetch["image"]) == ("fetch", "trainer:1")
    assert (fetch["command"], fetch["args"]) == (["finetune-evaluate"], ["--model", URI, "--fetch"])
    shared = ("envFrom", "volumeMounts", "securityContext", "imagePullPolicy", "terminationMessagePolicy")
    assert {name: fetch[name] for name in shared} == {name: main[name] for name in shared}
    of_image = {"name": "PYTHONPATH", "value": "/harness"}
    assert of_image in main["env"]
    assert fetch["env"] == [item for item in main["env"] if item != of_image]
    requests = resources["requests"] | {"cpu": "100m"}
    assert main["resources"] == {**resources, "requests": requests}
    assert fetch["resources"] == {"limits": {"memory": "16Gi"}, "requests": {"cpu": "100m"}}
    assert [item for item in main["env"] if item["name"] in ("MODEL_PATH", "METRICS_PATH")] == [
        {"name": "MODEL_PATH", "value": "/var/run/finetune/model"},
        {"name": "METRICS_PATH", "value": "/dev/termination-log"},
    ]
    assert {"name": "evaluated-model", "mountPath": "/var/run/finetune/model"} in main["volumeMounts"]
    assert mount in main["volumeMounts"]
    assert {"name": "evaluated-model", "emptyDir": {}} in pod["volumes"]
    of_fetch = {**RULES[1]["onExitCodes"], "containerName": "fetch"}
    assert finetunejob["spec"]["podFailurePolicy"]["rules"] == [
        RULES[0],
        {"action": "FailJob", "onExitCodes": of_fetch},
        RULES[1],
    ]


def test_a_command_of_your_own_finds_its_parameters_alone() -> None:
    evaluation = {**COMMAND, "parameters": {"tasks": ["arc"], "shots": 5}}
    data = evaluation_pod.build_recipe(draft(evaluation), VERSION)["data"]
    assert yaml.safe_load(data["parameters.yaml"]) == evaluation["parameters"]
    assert yaml.safe_load(data["recipe.yaml"])["parameters"] == evaluation["parameters"]
    values = {item["name"]: item["value"] for item in container(evaluation)["env"]}
    assert values["HYPERPARAMETERS_PATH"] == "/etc/finetune/parameters.yaml"
    assert set(evaluation_pod.build_recipe(draft({}), VERSION)["data"]) == {"recipe.yaml"}


def test_a_volume_of_the_template_can_hold_the_model() -> None:
    volume = {"name": "evaluated-model", "persistentVolumeClaim": {"claimName": "large"}}
    pod_body = pod(COMMAND, pods={"evaluate": {"template": {"spec": {"volumes": [volume]}}}})
    assert [item for item in pod_body["volumes"] if item["name"] == "evaluated-model"] == [volume]


TRAINER: Json = {"pods": {"train": {"image": "mine:1"}}}
SCRIPT: Json = {"trainer": {"command": ["train"]}, **TRAINER}
OWN: Json = {"pods": {**TRAINER["pods"], "evaluate": {"image": "own:1"}}}
IMAGES: dict[str, tuple[Json, Json, str, str | None]] = {
    "of the installation": ({}, {}, "trainer:1", None),
    "of the training": ({}, TRAINER, "mine:1", None),
    "of the training, which has a command": ({}, SCRIPT, "trainer:1", None),
    "its own": ({}, OWN, "own:1", None),
    "of the training, with a command": (COMMAND, TRAINER, "mine:1", "mine:1"),
    "of the training with a command, with a command": (COMMAND, SCRIPT, "mine:1", "trainer:1"),
    "its own, with a command": (COMMAND, OWN, "own:1", "mine:1"),
}


@pytest.mark.parametrize(("evaluation", "parts", "image", "fetches"), IMAGES.values(), ids=IMAGES)
def test_images(evaluation: Json, parts: Json, image: str, fetches: str | None) -> None:
    pod_body = pod(evaluation, **parts)
    assert pod_body["containers"][0]["image"] == image
    assert [item["image"] for item in pod_body.get("initContainers", [])] == ([fetches] if fetches else [])


def test_the_container_of_a_workspace_logs_in_as_the_training_does() -> None:
    tracking = {"uri": "databricks", "secretRef": {"name": "s"}, "trainerSecretRef": {"name": "t"}}
    pod_body = pod(COMMAND, tracking=tracking)
    for its_container in (pod_body["containers"][0], pod_body["initContainers"][0]):
        keys = [
            item["valueFrom"]["secretKeyRef"]["name"] for item in its_container["env"] if "valueFrom" in item
        ]
        assert (keys, its_container["envFrom"]) == (["t"] * 4, [])


def test_both_containers_have_the_variables_of_the_sinks() -> None:
    tracking = {"sinks": [{"type": "WandB", "project": "support", "secretRef": {"name": "wandb"}}]}
    pod_body = pod(COMMAND, tracking=tracking)
    for its_container in (pod_body["containers"][0], pod_body["initContainers"][0]):
        names = {item["name"] for item in its_container["env"]}
        assert names >= {"WANDB_RUN_ID", "WANDB_RESUME", "WANDB_PROJECT", "WANDB_API_KEY"}


def test_the_recipe_names_the_splits_that_were_prepared_and_the_parameters_of_the_command() -> None:
    prepared = KNOWN.model_copy(
        update={"data": DataStatus(rows=COUNTS, tokens=COUNTS, path="/data/splits", version=7)}
    )
    parts: Json = {"data": SOURCE, "trainer": {"parameters": {"lr": "1"}}, "before": prepared}
    body = evaluation_pod.build_recipe(draft(COMMAND, **parts), VERSION)
    recipe = yaml.safe_load(body["data"]["recipe.yaml"])
    assert body["metadata"]["name"] == "tune-evaluate"
    assert recipe["data"]["splits"] == {"type": "Delta", "path": "/data/splits", "version": 7}
    assert (recipe["parameters"], recipe["evaluation"]["command"]) == ({"task": "math"}, ["judge"])
    assert recipe["metricsStep"] == 1
    built_in = evaluation_pod.build_recipe(draft({"metrics": ["Accuracy"]}, **parts), VERSION)
    assert yaml.safe_load(built_in["data"]["recipe.yaml"])["parameters"] == {"lr": "1"}


TABLE: Json = {"type": "Delta", "path": "/data/splits"}
FILES: Json = {"type": "Parquet", "train": "/a", "validation": "/b", "test": "/c"}
TABLES: Json = {"type": "Tables", "train": "a.b.train", "test": "a.b.test"}
READ: dict[str, tuple[Json, dict[str, str], Json]] = {
    "the newest version when it began": (TABLE, {"finetune_data_version": "7"}, {**TABLE, "version": 7}),
    "the version of the spec": (
        {**TABLE, "version": 3},
        {"finetune_data_version": "7"},
        {**TABLE, "version": 3},
    ),
    "a version that no tag names": (TABLE, {}, TABLE),
    "the newest versions of tables": (
        TABLES,
        {"finetune_data_version": "train=7,test=0"},
        {**TABLES, "train": "a.b.train@v7", "test": "a.b.test@v0"},
    ),
    "the version of a table in the spec": (
        {**TABLES, "test": "a.b.test@v3"},
        {"finetune_data_version": "train=7,test=3"},
        {**TABLES, "train": "a.b.train@v7", "test": "a.b.test@v3"},
    ),
    "tables without versions": (TABLES, {"finetune_data_version": "7"}, TABLES),
    "files": (FILES, {"finetune_data_version": "7"}, FILES),
}


@pytest.mark.parametrize(("splits", "tags", "expected"), READ.values(), ids=READ)
def test_the_pod_reads_what_the_training_read(splits: Json, tags: dict[str, str], expected: Json) -> None:
    version = dataclasses.replace(VERSION, tags=tags)
    body = evaluation_pod.build_recipe(draft({}, data={**SPLITS, "splits": splits}), version)
    assert yaml.safe_load(body["data"]["recipe.yaml"])["data"]["splits"] == expected


SAME: dict[str, Json] = {
    "none": {},
    "more memory": {"template": {"spec": {"nodeSelector": {"a": "b"}}}},
    "a variable": {"env": [{"name": "A", "value": "b"}]},
}
OTHER: dict[str, Json] = {
    "another command": {**COMMAND, "command": ["judge2"]},
    "other arguments": {**COMMAND, "args": []},
    "other parameters": {**COMMAND, "parameters": {"task": "code"}},
    "another split": {**COMMAND, "split": "Validation"},
}


def digest(evaluation: Json, version: RegisteredVersion = VERSION, **parts: Any) -> str:
    message: str = job(evaluation, version, **parts)["metadata"]["annotations"]["finetune.dev/digest"]
    return message


@pytest.mark.parametrize("settings", SAME.values(), ids=SAME)
def test_numbers_of_the_same_command_are_comparable(settings: Json) -> None:
    assert digest(COMMAND, pods={"evaluate": settings}) == digest(COMMAND)
    assert len(digest(COMMAND)) == 12


@pytest.mark.parametrize("evaluation", OTHER.values(), ids=OTHER)
def test_numbers_of_another_command_are_not(evaluation: Json) -> None:
    assert digest(evaluation) != digest(COMMAND)


def test_numbers_of_the_same_command_in_another_image_are_not_comparable() -> None:
    assert digest(COMMAND, pods={"evaluate": {"image": "other:1"}}) != digest(COMMAND)


def test_numbers_on_another_version_of_the_table_are_not_comparable() -> None:
    def on(version: int) -> str:
        return digest(COMMAND, data={**SPLITS, "splits": {**SPLITS["splits"], "version": version}})

    assert (on(3), on(4) == on(3)) == (digest(COMMAND), False)
    newest: Json = {"data": {**SPLITS, "splits": {"type": "Delta", "path": "/data/splits"}}}
    read = [
        dataclasses.replace(VERSION, version=number, tags={"finetune_data_version": table_version})
        for number, table_version in (("4", "3"), ("5", "3"), ("6", "8"))
    ]
    first, second, third = (digest(COMMAND, version, **newest) for version in read)
    assert (first == second, first == third) == (True, False)


def test_numbers_are_comparable_wherever_the_same_preparation_wrote_its_table() -> None:
    def after(path: str, version: int, message: str) -> str:
        data = DataStatus(rows=COUNTS, tokens=COUNTS, path=path, version=version, digest=message)
        return digest(COMMAND, data=SOURCE, before=KNOWN.model_copy(update={"data": data}))

    first = after("/a", 1, "c0ffee")
    assert (after("/b", 2, "c0ffee") == first, after("/a", 1, "decaf") == first) == (True, False)
