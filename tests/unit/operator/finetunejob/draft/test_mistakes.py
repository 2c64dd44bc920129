"""Mistakes in pod templates, and that the template of a job that was accepted is read again before each attempt."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.env import NO_SCOPE_IN_PODS
from finetune_operator.finetunejob.draft import mistakes
from worlds.memory.decisions import applied, child, conclude, condition, ftj, observed, running, said, spec

Json = dict[str, Any]


def containers(*items: Any) -> Json:
    return {"podTemplate": {"spec": {"containers": [*items]}}}


def limited(gpus: Any, **distributed: Any) -> Json:
    limits = {"limits": {"nvidia.com/gpu": gpus}}
    return {"distributed": distributed, **containers({"name": "trainer", "resources": limits})}


def written(uri: str, *mounts: str, **volume: Json) -> Json:
    """A job that writes its model to a folder, where each mount is of a volume of one kind."""
    mounted = [{"name": "models", "mountPath": path} for path in mounts]
    template = {
        "containers": [{"name": "trainer", "volumeMounts": mounted}],
        "volumes": [{"name": "models", **volume}],
    }
    return {"output": {"uri": uri}, "podTemplate": {"spec": template}}


CLAIM: Json = {"claimName": "models"}
LOST = (
    "spec.output.uri /models/tiny is on no volume that outlives the pods: mount a PersistentVolumeClaim there in the container "
    "trainer of spec.podTemplate, or apply a job with another name and a folder of an object store"
)

UNNAMED = (
    "spec.podTemplate has the container 'main' without an image: rename it to 'trainer', the container that the operator "
    "fills in"
)
BESIDE = (
    "spec.podTemplate has the container 'side' beside 'trainer', and the pod would not end before it does: move it to "
    "initContainers with restartPolicy: Always, where it runs until 'trainer' has ended"
)
SIDECAR: Json = {"name": "side", "image": "side:1", "restartPolicy": "Always"}
FEW = "each pod has 8 processes and spec.podTemplate limits it to 1 nvidia.com/gpu: "

WITH_CODE: Json = {"command": ["t"], "code": {"configMapRef": {"name": "code"}}}
MISTAKES: dict[str, tuple[Json, list[str]]] = {
    "none": ({}, []),
    "a reserved variable": (
        containers({"name": "trainer", "env": [{"name": "WORLD_SIZE", "value": "1"}, {"name": "MINE"}]}),
        ["spec.podTemplate sets WORLD_SIZE, which the operator sets: remove it"],
    ),
    "a secret of a Databricks workspace": (
        containers({"name": "trainer", "env": [{"name": "TOKEN", "value": "{{secrets/a/b}}"}]}),
        [f"spec.podTemplate sets TOKEN to a secret of a Databricks workspace: {NO_SCOPE_IN_PODS}"],
    ),
    "the folder of the code": (
        {"trainer": WITH_CODE, **containers({"name": "trainer", "env": [{"name": "CODE_SOURCE_PATH"}]})},
        ["spec.podTemplate sets CODE_SOURCE_PATH, which the operator sets: remove it"],
    ),
    "a folder of your own": (
        {
            "trainer": {"command": ["t"]},
            **containers({"name": "trainer", "env": [{"name": "CODE_SOURCE_PATH"}]}),
        },
        [],
    ),
    "a reserved variable of a sidecar": (
        {"podTemplate": {"spec": {"initContainers": [SIDECAR | {"env": [{"name": "WORLD_SIZE"}]}]}}},
        [],
    ),
    "nonsense": (containers("trainer", {"name": "trainer", "env": ["WORLD_SIZE"]}, {"image": "a"}), []),
    "a sidecar": ({"podTemplate": {"spec": {"initContainers": [SIDECAR]}}}, []),
    "a container that does not end with the trainer": (
        containers({"name": "side", "image": "side:1"}),
        [BESIDE],
    ),
    "a container under another name": (containers({"name": "main"}), [UNNAMED]),
    "one beside the trainer's": (containers({"name": "trainer"}, {"name": "main"}), [UNNAMED]),
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
    assert [*mistakes.of_training(spec(**parts))] == expected


def mounted(mounts: Any, volumes: Any) -> Json:
    return {
        "podTemplate": {
            "spec": {"containers": [{"name": "trainer", "volumeMounts": mounts}], "volumes": volumes}
        }
    }


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
        containers({"name": "evaluate", "env": [{"name": "MLFLOW_RUN_ID"}, {"name": "METRICS_PATH"}]}),
        ["spec.evaluation.podTemplate sets MLFLOW_RUN_ID, METRICS_PATH, which the operator sets: remove it"],
    ),
    "the folder of the code, which is not there": (
        containers({"name": "evaluate", "env": [{"name": "CODE_SOURCE_PATH"}]}),
        [],
    ),
    "a container under another name": (
        containers({"name": "trainer"}),
        [
            "spec.evaluation.podTemplate has the container 'trainer' without an image: rename it to 'evaluate', the container "
            "that the operator fills in"
        ],
    ),
}


@pytest.mark.parametrize(("part", "expected"), OF_EVALUATION.values(), ids=OF_EVALUATION)
def test_mistakes_of_the_evaluation(part: Json | None, expected: list[str]) -> None:
    job_spec = spec(evaluation=part, trainer=WITH_CODE)
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
