"""The init containers that fetch the code and install the packages of a command of your own."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from finetune_crds.code import CodeStatus
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.finetunejob.pods import installer, own_code
from finetune_operator.settings import Settings
from fixtures.operator_in_memory.decisions import (
    ACCEPTED,
    ADMITTED,
    CORRECTED,
    PREPARED,
    child,
    conclude,
    ftj,
    observed,
    pod,
    running,
    said,
    spec,
    status,
)

Json = dict[str, Any]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
URL = "https://git.example.com/team/code.git"
SETTINGS = Settings(trainer_image="trainer:1", trainer_pull_policy="Always")
GIT: Json = {"git": {"url": URL, "secretRef": {"name": "login"}}, "mountPath": "/code"}
TEMPLATE: Json = {
    "spec": {
        "initContainers": [{"name": "mine", "image": "mine:1"}],
        "volumes": [{"name": "ca", "configMap": {"name": "ca"}}],
        "containers": [
            {
                "name": "main",
                "resources": {
                    "limits": {"nvidia.com/gpu": 8, "memory": "64Gi"},
                    "requests": {"cpu": "8", "rdma/hca": 1},
                },
                "volumeMounts": [{"name": "ca", "mountPath": "/etc/ca"}],
            }
        ],
    }
}


def trainer(**parts: Any) -> Json:
    return {
        "command": ["torchrun", "train.py"],
        **parts,
    }


def pods(template: Json) -> Json:
    return {
        "train": {
            "image": "mine:2",
            "env": [{"name": "PIP_INDEX_URL", "value": "https://index"}],
            "envFrom": [{"secretRef": {"name": "more"}}],
            "template": template,
        }
    }


def made(kind: str, **parts: Any) -> Json:
    """What is applied of a kind for a job that is about to train."""
    before = status(ACCEPTED, ADMITTED, PREPARED, code=CodeStatus(commit=COMMIT))
    trainer_spec = ftj(before, trainer=trainer(**parts), pods=pods(TEMPLATE))
    decision = conclude(trainer_spec, observed(), settings=SETTINGS)
    (child_body,) = (body for body in decision.apply if body["kind"] == kind)
    return child_body


def pod_spec(**parts: Any) -> Json:
    job_body: Json = made("Job", **parts)["spec"]["template"]["spec"]
    return job_body


# What both have of the container `trainer`.
SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
ENV_FROM = [{"secretRef": {"name": "more", "optional": False}}]
RESOURCES = {"limits": {"memory": "64Gi"}, "requests": {"cpu": "8"}}
MOUNTS = [
    {"name": "tmp", "mountPath": "/tmp"},
    {"name": "shm", "mountPath": "/dev/shm"},
    {"name": "ca", "mountPath": "/etc/ca"},
]
RECIPE = {"name": "recipe", "mountPath": "/etc/finetune", "readOnly": True}


def test_a_commit_is_fetched_by_the_image_of_the_installation() -> None:
    spec_of_pod = pod_spec(code=GIT)
    own_container, checkout = spec_of_pod["initContainers"]
    (main,) = spec_of_pod["containers"]
    assert own_container == {"name": "mine", "image": "mine:1"}
    env = checkout.pop("env")
    assert [item for item in env if item["name"] in ("PIP_INDEX_URL", "HOME")] == [
        {"name": "HOME", "value": "/tmp"},
        {"name": "PIP_INDEX_URL", "value": "https://index"},
    ]
    assert env[-2:] == [
        {
            "name": "FINETUNE_GIT_USERNAME",
            "valueFrom": {"secretKeyRef": {"name": "login", "key": "username", "optional": True}},
        },
        {
            "name": "FINETUNE_GIT_PASSWORD",
            "valueFrom": {"secretKeyRef": {"name": "login", "key": "password", "optional": False}},
        },
    ]
    assert checkout == {
        "name": "checkout",
        "image": "trainer:1",
        "imagePullPolicy": "Always",
        "command": ["finetune-checkout"],
        "args": [URL, COMMIT, "/code"],
        "envFrom": ENV_FROM,
        "resources": RESOURCES,
        "securityContext": SECURITY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [*MOUNTS, {"name": "finetune-code", "mountPath": "/code", "readOnly": False}, RECIPE],
    }
    assert {"name": "finetune-code", "emptyDir": {"sizeLimit": "10Gi"}} in spec_of_pod["volumes"]
    assert (main["workingDir"], main["command"]) == ("/code", ["torchrun", "train.py"])
    assert {"name": "finetune-code", "mountPath": "/code", "readOnly": False} in main["volumeMounts"]
    assert not any(item["name"].startswith("FINETUNE_GIT") for item in main["env"])


def test_packages_are_installed_by_the_image_of_the_command() -> None:
    spec_of_pod = pod_spec(dependencies=["datasets>=3", "trl"])
    _, install = spec_of_pod["initContainers"]
    (main,) = spec_of_pod["containers"]
    install.pop("env")
    place = {"name": "finetune-dependencies", "mountPath": "/var/run/finetune/dependencies"}
    script = ["python3", "/etc/finetune/dependencies.py"]
    assert install == {
        "name": "dependencies",
        "image": "mine:2",
        "imagePullPolicy": "Always",
        "command": [*script, "install"],
        "args": ["datasets>=3", "trl"],
        "envFrom": ENV_FROM,
        "resources": RESOURCES,
        "securityContext": SECURITY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [*MOUNTS, RECIPE, place],
    }
    assert {"name": "finetune-dependencies", "emptyDir": {"sizeLimit": "50Gi"}} in spec_of_pod["volumes"]
    assert main["command"] == [*script, "run", "torchrun", "train.py"]
    assert {**place, "readOnly": True} in main["volumeMounts"]
    files = made("ConfigMap", dependencies=["trl"])["data"]
    assert files["dependencies.py"] == inspect.getsource(installer)


BOTH: Json = {"dependencies": ["trl"], "code": GIT}


def volumes(*user_volumes: Json, **parts: Any) -> dict[str, Json]:
    """The volumes of a job whose pod template has some, by name, without those that every pod has."""
    before = status(ACCEPTED, ADMITTED, PREPARED, code=CodeStatus(commit=COMMIT))
    job = ftj(before, trainer=trainer(**parts), pods=pods({"spec": {"volumes": [*user_volumes]}}))
    (job_body,) = (body for body in conclude(job, settings=SETTINGS).apply if body["kind"] == "Job")
    items = {item["name"]: item for item in job_body["spec"]["template"]["spec"]["volumes"]}
    return {name: item for name, item in items.items() if name not in ("tmp", "shm", "recipe")}


def test_a_pod_template_may_limit_the_volumes() -> None:
    limited: list[Json] = [
        {"name": name, "emptyDir": {"sizeLimit": "5Gi"}}
        for name in ("finetune-code", "finetune-dependencies")
    ]
    assert volumes(*limited, **BOTH) == {item["name"]: item for item in limited}


OF_YOURS: dict[str, Json] = {
    "a commit and packages": BOTH,
    "a ConfigMap": {"code": {"configMapRef": {"name": "mine"}}},
}


@pytest.mark.parametrize("parts", OF_YOURS.values(), ids=OF_YOURS)
def test_volumes_of_your_own_keep_their_names_and_their_content(parts: Json) -> None:
    pods: list[Json] = [
        {"name": name, "persistentVolumeClaim": {"claimName": "mine"}} for name in ("code", "dependencies")
    ]
    volumes_by_name = volumes(*pods, **parts)
    assert [volumes_by_name[item["name"]] for item in pods] == pods


NAMELESS: dict[str, Any] = {"no name": {"value": "x"}, "no text": {"name": 3}, "no variable": "x"}


@pytest.mark.parametrize("item", NAMELESS.values(), ids=NAMELESS)
def test_variables_without_a_name_are_left_for_the_api_server_to_refuse(item: Any) -> None:
    before = status(ACCEPTED, ADMITTED, PREPARED, code=CodeStatus(commit=COMMIT))
    template = {
        "spec": {"containers": [{"name": "main", "env": [item, {"name": "PYTHONHOME", "value": "/"}]}]}
    }
    job = ftj(before, trainer=trainer(code=GIT), pods=pods(template))
    (job_body,) = (body for body in conclude(job, settings=SETTINGS).apply if body["kind"] == "Job")
    pod = job_body["spec"]["template"]["spec"]
    checkout, main = pod["initContainers"][0]["env"], pod["containers"][0]["env"]
    assert item in checkout
    assert item in main
    assert [{"name": "PYTHONHOME", "value": "/"} in env for env in (checkout, main)] == [False, True]


def test_the_code_comes_before_the_packages() -> None:
    names = [item["name"] for item in pod_spec(code=GIT, dependencies=["trl"])["initContainers"]]
    assert names == ["mine", "checkout", "dependencies"]


def test_a_job_without_them_has_neither() -> None:
    assert [item["name"] for item in pod_spec()["initContainers"]] == ["mine"]
    assert "dependencies.py" not in made("ConfigMap")["data"]


MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "none": (["datasets>=3", "torch (>=2)", "a[b]==1; python_version < '4'", "a @ https://host/a.whl"], []),
    "a version that is none": (
        ["datasets>=x.y"],
        ["spec.trainer.dependencies has 'datasets>=x.y', which is not a valid requirement (Expected"],
    ),
}


@pytest.mark.parametrize(("trainer_spec", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_requirements_that_are_none(trainer_spec: list[str], expected: list[str]) -> None:
    wrong = [*own_code.mistakes(spec(trainer=trainer(dependencies=trainer_spec)).trainer)]
    assert [text[: len(start)] for text, start in zip(wrong, expected, strict=True)] == expected


NO_ADDRESS = "spec.trainer.code.git.url {} is not a valid address"
ADDRESSES: dict[str, tuple[str, list[str]]] = {
    "one with a port": ("https://host:8443/a.git", []),
    "one of IPv6": ("https://[::1]:8443/a.git", []),
    "a bracket": ("https://[abc/a.git", [NO_ADDRESS.format("https://[abc/a.git")]),
    "no host": ("https://:8443/a.git", [NO_ADDRESS.format("https://:8443/a.git")]),
    "a port that is no number": ("https://host:abc/a.git", [NO_ADDRESS.format("https://host:abc/a.git")]),
    "a host without a part": ("https://a..b/a.git", [NO_ADDRESS.format("https://a..b/a.git")]),
    "a port that is too large": ("https://host:99999/a.git", [NO_ADDRESS.format("https://host:99999/a.git")]),
}


@pytest.mark.parametrize(("url", "expected"), ADDRESSES.values(), ids=ADDRESSES)
def test_addresses_that_are_none(url: str, expected: list[str]) -> None:
    trainer_spec = spec(trainer=trainer(code={"git": {"url": url}})).trainer
    assert [*own_code.mistakes(trainer_spec)] == expected


def test_a_job_with_an_address_that_is_none_fails() -> None:
    url = "https://host:abc/a.git"
    decision = conclude(ftj(trainer=trainer(code={"git": {"url": url}})), observed(), settings=SETTINGS)
    expected = ("True", ConditionReason.INVALID_SPEC, NO_ADDRESS.format(url) + CORRECTED)
    assert said(decision, ConditionType.FINISHED) == expected


JOB = "tune-train-1"


def waiting(name: str) -> Json:
    """A pod whose init container of a name runs."""
    job_body = pod(JOB, 0, phase="Pending")
    state = {"running": {"startedAt": "2026-08-01T12:00:00Z"}}
    return job_body | {
        "status": {**job_body["status"], "initContainerStatuses": [{"name": name, "state": state}]}
    }


STEPS = {
    "checkout": "; pod tune-train-1-0-abcde fetches the code",
    "dependencies": "; pod tune-train-1-0-abcde installs the packages of trainer.dependencies",
    "mine": "",
}


@pytest.mark.parametrize(("name", "expected"), STEPS.items(), ids=STEPS)
def test_what_a_pod_does_before_it_starts_is_told(name: str, expected: str) -> None:
    trainer_spec = ftj(running(), trainer=trainer(dependencies=["trl"]))
    decision = conclude(trainer_spec, observed(child(JOB), pods=[waiting(name)]), settings=SETTINGS)
    assert said(decision, ConditionType.TRAINED) == (
        "False",
        ConditionReason.STARTING,
        f"attempt 1: 0 of 2 pods are ready{expected}",
    )
