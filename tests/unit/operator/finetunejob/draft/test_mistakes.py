"""Mistakes in pod templates, and that the template of a job that was accepted is read again before each attempt."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.env import NO_SCOPE_IN_PODS
from finetune_crds.finetunejob import FineTuneJobSpec
from finetune_operator.finetunejob.decide.accept import mistakes_of_pods
from finetune_operator.finetunejob.draft import mistakes
from fixtures.operator_in_memory.decisions import (
    SOURCE,
    applied,
    child,
    conclude,
    condition,
    ftj,
    observed,
    running,
    said,
    spec,
)

Json = dict[str, Any]


def resolved(**parts: Any) -> FineTuneJobSpec:
    """The spec of a job as the operator resolves it."""
    found = ftj(**parts).spec
    assert found
    return found


def templated(template: Any, role: str = "train") -> Json:
    return {"pods": {role: {"template": template}}}


def containers(*items: Any, role: str = "train") -> Json:
    return templated({"spec": {"containers": [*items]}}, role)


def limited(gpus: Any, **distributed: Any) -> Json:
    limits = {"limits": {"nvidia.com/gpu": gpus}}
    return {"distributed": distributed, **containers({"name": "main", "resources": limits})}


def written(uri: str, *mounts: str, **volume: Json) -> Json:
    """A job that writes its model to a folder, where each mount is of a volume of one kind."""
    mounted = [{"name": "models", "mountPath": path} for path in mounts]
    template = {
        "containers": [{"name": "main", "volumeMounts": mounted}],
        "volumes": [{"name": "models", **volume}],
    }
    return {"output": {"uri": uri}, **templated({"spec": template})}


CLAIM: Json = {"claimName": "models"}
LOST = (
    "spec.output.uri /models/tiny is lost with the pod: mount a PersistentVolumeClaim there in the container main "
    "of spec.pods.train.template, or create a FineTuneJob with another name and a folder of an object store"
)

UNNAMED = "spec.pods.train.template has the container 'trainer': name it 'main', which stands for the pod's own container"
BESIDE = (
    "spec.pods.train.template has a second container 'side', which keeps the pod running after 'main' has ended: "
    "move this container to initContainers with restartPolicy: Always"
)
SIDECAR: Json = {"name": "side", "image": "side:1", "restartPolicy": "Always"}
SHARED_DEVICE = (
    "spec.pods.all.template requests {} for all pods: move the limit to the container main in "
    "spec.pods.train.template, and in spec.pods.evaluate.template if the evaluation uses GPUs"
)
FEW = "each pod has 8 processes, and spec.pods.train.template limits it to 1 nvidia.com/gpu: "

WITH_CODE: Json = {"command": ["t"], "code": {"configMapRef": {"name": "code"}}}
MISTAKES: dict[str, tuple[Json, list[str]]] = {
    "none": ({}, []),
    "a reserved variable": (
        containers({"name": "main", "env": [{"name": "WORLD_SIZE", "value": "1"}, {"name": "MINE"}]}),
        ["spec.pods.train.template sets WORLD_SIZE, which the operator sets: remove the variable"],
    ),
    "a secret of a Databricks workspace": (
        containers({"name": "main", "env": [{"name": "TOKEN", "value": "{{secrets/a/b}}"}]}),
        [f"spec.pods.train.template sets TOKEN to a secret of a Databricks workspace: {NO_SCOPE_IN_PODS}"],
    ),
    "the folder of the code": (
        {"trainer": WITH_CODE, **containers({"name": "main", "env": [{"name": "CODE_SOURCE_PATH"}]})},
        ["spec.pods.train.template sets CODE_SOURCE_PATH, which the operator sets: remove the variable"],
    ),
    "a folder of your own": (
        {
            "trainer": {"command": ["t"]},
            **containers({"name": "main", "env": [{"name": "CODE_SOURCE_PATH"}]}),
        },
        [],
    ),
    "a variable of a sink": (
        {
            "tracking": {"sinks": [{"type": "WandB", "project": "support"}]},
            **containers({"name": "main", "env": [{"name": "WANDB_RUN_ID"}, {"name": "WANDB_API_KEY"}]}),
        },
        ["spec.pods.train.template sets WANDB_RUN_ID, which the operator sets: remove the variable"],
    ),
    "a variable of a sink that the job does not have": (
        {
            "tracking": {"sinks": [{"type": "TensorBoard", "uri": "/logs"}]},
            **containers({"name": "main", "env": [{"name": "WANDB_RUN_ID"}]}),
        },
        [],
    ),
    "a reserved variable of a sidecar": (
        templated({"spec": {"initContainers": [SIDECAR | {"env": [{"name": "WORLD_SIZE"}]}]}}),
        [],
    ),
    "nonsense": (containers("main", {"name": "main", "env": ["WORLD_SIZE"]}, {"image": "a"}), []),
    "a sidecar": (templated({"spec": {"initContainers": [SIDECAR]}}), []),
    "a container that does not end with the trainer": (
        containers({"name": "side", "image": "side:1"}),
        [BESIDE],
    ),
    "a container under its name in pods": (containers({"name": "trainer"}), [UNNAMED]),
    "one beside the pod's own": (containers({"name": "main"}, {"name": "trainer"}), [UNNAMED]),
    "one with an image": (containers({"name": "trainer", "image": "mine:1"}), [UNNAMED]),
    "a device of all pods": (
        containers({"name": "main", "resources": {"limits": {"rdma/hca": 1, "memory": "1Gi"}}}, role="all"),
        [SHARED_DEVICE.format("rdma/hca")],
    ),
    "a claim of all pods": (
        containers({"name": "main", "resources": {"claims": [{"name": "gpu"}]}}, role="all"),
        [SHARED_DEVICE.format("resource claims")],
    ),
    "a reserved variable of all pods": (
        containers({"name": "main", "env": [{"name": "WORLD_SIZE", "value": "1"}]}, role="all"),
        ["spec.pods.all.template sets WORLD_SIZE, which the operator sets: remove the variable"],
    ),
    "a container beside those of all pods": (
        containers({"name": "side", "image": "side:1"}, role="all"),
        [BESIDE.replace("pods.train", "pods.all")],
    ),
    "a limit below the GPUs": (
        limited(1, gpusPerNode=8),
        [f"{FEW}remove the limit from the template"],
    ),
    "a limit below the processes": (limited("1", processesPerNode=8), [f"{FEW}raise the limit to 8"]),
    "a limit that is enough": (limited(8, processesPerNode=8), []),
    "a model on a volume": (written("/models/tiny", "/models/", persistentVolumeClaim=CLAIM), []),
    "a model in a store": ({"output": {"uri": "s3://models/tiny"}}, []),
    "a model in a volume of Unity Catalog": ({"output": {"uri": "/Volumes/main/llm/tiny"}}, []),
    "a model on no volume": ({"output": {"uri": "/models/tiny"}}, [LOST]),
    "a model beside a volume": (written("/models/tiny", "/model", persistentVolumeClaim=CLAIM), [LOST]),
    "a model on a volume of the pod": (written("/models/tiny", "/models", emptyDir={}), [LOST]),
    "processes on CPUs": (limited(1, processesPerNode=8, device="CPU"), []),
}


@pytest.mark.parametrize(("parts", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(parts: Json, expected: list[str]) -> None:
    assert [*mistakes.of_training(resolved(**parts))] == expected


@pytest.mark.parametrize("role", ["prepare", "train", "evaluate"])
def test_what_is_wrong_with_all_pods_is_found_in_each_role(role: str) -> None:
    parts = containers({"name": "main", "resources": {"limits": {"rdma/hca": 1}}}, role="all")
    found = resolved(data=SOURCE, evaluation={}, **parts)
    of_roles = {
        "prepare": mistakes.of_preparation,
        "train": mistakes.of_training,
        "evaluate": mistakes.of_evaluation,
    }
    assert [*of_roles[role](found)] == [SHARED_DEVICE.format("rdma/hca")]
    assert [*mistakes_of_pods(found)] == [SHARED_DEVICE.format("rdma/hca")]


def mounted(mounts: Any, volumes: Any) -> Json:
    return templated({"spec": {"containers": [{"name": "main", "volumeMounts": mounts}], "volumes": volumes}})


NO_TEMPLATES: dict[str, Json] = {
    "mounts that are no list": mounted(5, []),
    "mounts that are a text": mounted("/models", []),
    "a volume whose name is a list": mounted([{"name": "x", "mountPath": "/x"}], [{"name": ["x"]}]),
    "a mount whose name is a map": mounted([{"name": {"a": "b"}, "mountPath": "/models"}], [{"name": "x"}]),
    "a mount without a path": mounted([{"name": "x"}], [{"name": "x"}]),
    "a mount at a number": mounted([{"name": "x", "mountPath": 5}], [{"name": "x"}]),
    "a mount and a volume without names": mounted([{"mountPath": "/models"}], [{}]),
}
OUTPUTS: dict[str, tuple[Json, list[str]]] = {
    "no output": ({}, []),
    "a store": ({"output": {"uri": "s3://models/tiny"}}, []),
    "a folder": ({"output": {"uri": "/models/tiny"}}, [LOST]),
}


@pytest.mark.parametrize(("output", "expected"), OUTPUTS.values(), ids=OUTPUTS)
@pytest.mark.parametrize("template", NO_TEMPLATES.values(), ids=NO_TEMPLATES)
def test_what_is_no_pod_template_is_left_for_the_api_server_to_refuse(
    template: Json, output: Json, expected: list[str]
) -> None:
    assert [*mistakes.of_training(spec(**template, **output))] == expected


OF_EVALUATION: dict[str, tuple[Json | None, list[str]]] = {
    "no evaluation": (None, []),
    "none": ({}, []),
    "reserved variables": (
        containers(
            {"name": "main", "env": [{"name": "MLFLOW_RUN_ID"}, {"name": "METRICS_PATH"}]}, role="evaluate"
        ),
        [
            f"spec.pods.evaluate.template sets {name}, which the operator sets: remove the variable"
            for name in ("MLFLOW_RUN_ID", "METRICS_PATH")
        ],
    ),
    "the folder of the code, which is not there": (
        containers({"name": "main", "env": [{"name": "CODE_SOURCE_PATH"}]}, role="evaluate"),
        [],
    ),
    "a container under another name": (
        containers({"name": "evaluate"}, role="evaluate"),
        [
            "spec.pods.evaluate.template has the container 'evaluate': name it 'main', which stands for the pod's own container"
        ],
    ),
}


@pytest.mark.parametrize(("part", "expected"), OF_EVALUATION.values(), ids=OF_EVALUATION)
def test_mistakes_of_the_evaluation(part: Json | None, expected: list[str]) -> None:
    job_spec = resolved(evaluation={} if part is not None else None, trainer=WITH_CODE, **(part or {}))
    assert [*mistakes.of_evaluation(job_spec)] == expected
    assert [*mistakes.of_training(job_spec)] == []


def test_a_template_that_was_changed_is_read_again_before_the_next_attempt() -> None:
    observation = observed(child("tune-train-1", "Failed"))
    decision = conclude(ftj(running(attempt=2), **limited(1, gpusPerNode=8)), observation)
    assert said(decision, ConditionType.PODS_HEALTHY) == (
        "False",
        ConditionReason.POD_TEMPLATE_INVALID,
        f"{FEW}remove the limit from the template",
    )
    stalled = said(decision, ConditionType.STALLED)
    assert stalled
    assert (applied(decision), stalled[:2]) == ([], ("True", ConditionReason.POD_TEMPLATE_INVALID))
    corrected = conclude(ftj(decision.status, distributed={"gpusPerNode": 8}), observation)
    assert applied(corrected)[-1] == "Job/tune-train-2"
    assert said(corrected, ConditionType.PODS_HEALTHY) is None


def test_an_attempt_that_runs_is_left_alone() -> None:
    healthy = condition(ConditionType.PODS_HEALTHY, "True", ConditionReason.PODS_RUNNING)
    before = running()
    before = before.model_copy(update={"conditions": [*before.conditions, healthy]})
    decision = conclude(ftj(before, **limited(1, gpusPerNode=8)), observed(child("tune-train-1")))
    reported = said(decision, ConditionType.PODS_HEALTHY)
    assert reported
    assert (reported[0], decision.delete) == ("True", ())
