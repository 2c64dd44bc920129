"""The container that uploads the files of a command of your own, in the training pods."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import yaml

from finetune_crds.base import Json
from finetune_operator.finetunejob.pods import output_runner
from finetune_operator.settings import Settings
from fixtures.operator_in_memory.decisions import (
    ACCEPTED,
    ADMITTED,
    PREPARED,
    conclude,
    ftj,
    observed,
    status,
)
from support.documents import Page

SETTINGS = Settings(trainer_image="trainer:1", trainer_pull_policy="Always")
OUTPUT: Json = {"uri": "s3://models/alpaca", "from": "/outputs"}
LIMITS: Json = {"limits": {"nvidia.com/gpu": 8, "memory": "64Gi"}, "requests": {"cpu": "8"}}
RUNNER = ["python3", "/etc/finetune/output.py"]
COMMAND = ["torchrun", "train.py"]
MOUNTS = [
    {"name": "tmp", "mountPath": "/tmp"},
    {"name": "shm", "mountPath": "/dev/shm"},
    {"name": "recipe", "mountPath": "/etc/finetune", "readOnly": True},
]
SHARED = {"name": "finetune-upload", "mountPath": "/var/run/finetune/upload"}
FOLDER = {"name": "finetune-output", "mountPath": "/outputs"}
UPLOAD: Json = {
    "name": "upload",
    "image": "trainer:1",
    "imagePullPolicy": "Always",
    "command": ["finetune-upload"],
    "restartPolicy": "Always",
    "envFrom": [],
    "resources": {"limits": {"memory": "1Gi"}, "requests": {"cpu": "100m"}},
    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    "terminationMessagePolicy": "FallbackToLogsOnError",
    "volumeMounts": [*MOUNTS, SHARED, FOLDER],
}


def made(kind: str, spec: Json | None = None, **trainer: Any) -> Json:
    """What is applied of a kind for a job that is about to train; `spec`: the pod spec of the template."""
    body = ftj(
        status(ACCEPTED, ADMITTED, PREPARED),
        trainer={"command": COMMAND, **trainer},
        output=OUTPUT,
        pods={"train": {"image": "mine:2", "template": {"spec": spec or {}}}},
    )
    (child,) = (item for item in conclude(body, observed(), settings=SETTINGS).apply if item["kind"] == kind)
    return child


def pod_spec(spec: Json | None = None, **trainer: Any) -> Json:
    job_body: Json = made("Job", spec, **trainer)["spec"]["template"]["spec"]
    return job_body


def with_resources(resources: Json) -> Json:
    return {"containers": [{"name": "main", "resources": resources}]}


def test_the_upload_is_a_sidecar_of_the_installations_image() -> None:
    spec = pod_spec(with_resources(LIMITS))
    (upload,), (main,) = spec["initContainers"], spec["containers"]
    env = upload.pop("env")
    assert upload == UPLOAD
    assert {item["name"] for item in env} >= {"HOME", "NODE_RANK", "FINETUNE_RECIPE", "FINETUNE_ATTEMPT"}
    assert main["command"] == [*RUNNER, "/outputs", "share", "110", *COMMAND]
    assert main["volumeMounts"] == [*MOUNTS, SHARED, FOLDER]
    assert [item for item in spec["volumes"] if item["name"].startswith("finetune-")] == [
        {"name": "finetune-upload", "emptyDir": {"sizeLimit": "16Mi"}},
        {"name": "finetune-output", "emptyDir": {}},
    ]


def test_the_pods_have_the_script_that_runs_the_command() -> None:
    assert made("ConfigMap")["data"]["output.py"] == inspect.getsource(output_runner)


# A volume of the template, where the container `main` mounts it, how the modes of files are treated, and the mounts of the upload.
CLAIM = {"name": "shared", "persistentVolumeClaim": {"claimName": "training"}}
LIMITED = {"name": "finetune-output", "emptyDir": {"sizeLimit": "100Gi"}}
VOLUMES: dict[str, tuple[Json, str | None, str, list[Json]]] = {
    "at the folder": (CLAIM, "/outputs", "keep", [{"name": "shared", "mountPath": "/outputs"}]),
    "above the folder": (CLAIM, "/", "keep", [{"name": "shared", "mountPath": "/"}]),
    "elsewhere": (CLAIM, "/output", "share", [{"name": "shared", "mountPath": "/output"}, FOLDER]),
    "with a limit": (LIMITED, None, "share", [FOLDER]),
}


@pytest.mark.parametrize(("volume", "path", "mode", "mounts"), VOLUMES.values(), ids=VOLUMES)
def test_the_folder_is_a_volume_of_the_template_or_an_empty_one(
    volume: Json, path: str | None, mode: str, mounts: list[Json]
) -> None:
    own_mounts = [{"name": volume["name"], "mountPath": path}] if path else []
    spec = pod_spec({"volumes": [volume], "containers": [{"name": "main", "volumeMounts": own_mounts}]})
    (upload,), (main,) = spec["initContainers"], spec["containers"]
    assert main["command"][3] == mode
    others = [*MOUNTS, SHARED]
    assert [item for item in upload["volumeMounts"] if item not in others] == mounts
    assert volume in spec["volumes"]


def test_the_upload_comes_after_the_other_init_containers() -> None:
    spec = pod_spec({"initContainers": [{"name": "mine", "image": "mine:1"}]}, dependencies=["trl"])
    assert [item["name"] for item in spec["initContainers"]] == ["mine", "dependencies", "upload"]
    assert spec["containers"][0]["command"] == [
        *(*RUNNER, "/outputs", "share", "110"),
        *("python3", "/etc/finetune/dependencies.py", "run", *COMMAND),
    ]


def test_only_the_upload_has_the_file_of_its_login() -> None:
    (example,) = (
        yaml.safe_load(block.text)["template"]["spec"]
        for block in Page("docs/finetunejob/own-script.md").blocks("yaml")
        if "google-key" in block.text
    )
    spec = pod_spec(example)
    (upload,), (main,) = spec["initContainers"], spec["containers"]
    (own,) = example["initContainers"]
    assert upload["command"] == ["finetune-upload"]
    assert all(item in upload["env"] for item in own["env"])
    assert [item for item in upload["volumeMounts"] if item not in main["volumeMounts"]] == own[
        "volumeMounts"
    ]
    assert example["volumes"][0] in spec["volumes"]


# The resources of the container `main`, and those of the upload: a quota can require a limit for each container.
RESOURCES: dict[str, tuple[Json, Json]] = {
    "none": ({}, {"limits": {"memory": "1Gi"}, "requests": {"cpu": "100m"}}),
    "all limits": (
        {"limits": {"cpu": "8", "memory": "64Gi", "ephemeral-storage": "100Gi"}},
        {"limits": {"memory": "1Gi", "cpu": "1", "ephemeral-storage": "1Gi"}, "requests": {}},
    ),
    "a request of storage": (
        {"requests": {"ephemeral-storage": "100Gi"}},
        {"limits": {"memory": "1Gi"}, "requests": {"cpu": "100m", "ephemeral-storage": "1Gi"}},
    ),
}


@pytest.mark.parametrize(("main", "expected"), RESOURCES.values(), ids=RESOURCES)
def test_the_upload_has_resources_of_its_own(main: Json, expected: Json) -> None:
    (upload,) = pod_spec(with_resources(main))["initContainers"]
    assert upload["resources"] == expected


def test_the_template_sets_resources_and_variables_of_the_upload() -> None:
    own: Json = {
        "name": "upload",
        "resources": {"limits": {"memory": "4Gi"}},
        "env": [{"name": "AWS_MAX_ATTEMPTS", "value": "9"}],
    }
    (upload,) = pod_spec({"initContainers": [own]})["initContainers"]
    assert upload["resources"] == own["resources"]
    assert upload["env"][0] == own["env"][0]
    assert upload["image"] == "trainer:1"


def test_the_upload_alone_has_its_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OUTPUT, "secretRef", {"name": "model-store"})
    spec = pod_spec()
    (upload,), (main,) = spec["initContainers"], spec["containers"]
    assert upload["envFrom"] == [{"secretRef": {"name": "model-store", "optional": False}}]
    assert main["envFrom"] == []
