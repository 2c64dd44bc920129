"""The init containers that fetch the code and install the packages of a command of your own."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from finetune_crds.code import CodeStatus
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.contract import PodError, TerminationMessage
from finetune_operator.controller.events import EventTarget, changes, event
from finetune_operator.finetunejob import installer
from finetune_operator.finetunejob.decide import own_code
from finetune_operator.settings import Settings
from worlds.memory.decisions import (
    ACCEPTED,
    ADMITTED,
    NOW,
    PREPARED,
    child,
    conclude,
    ended,
    ftj,
    later,
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
                "name": "trainer",
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
        "image": "mine:2",
        "command": ["torchrun", "train.py"],
        "env": [{"name": "PIP_INDEX_URL", "value": "https://index"}],
        "envFrom": [{"secretRef": {"name": "more"}}],
        **parts,
    }


def made(kind: str, **parts: Any) -> Json:
    """What is applied of a kind for a job that is about to train."""
    before = status(ACCEPTED, ADMITTED, PREPARED, code=CodeStatus(commit=COMMIT))
    given = ftj(before, trainer=trainer(**parts), podTemplate=TEMPLATE)
    decision = conclude(given, observed(), settings=SETTINGS)
    (found,) = (body for body in decision.apply if body["kind"] == kind)
    return found


def pod_spec(**parts: Any) -> Json:
    found: Json = made("Job", **parts)["spec"]["template"]["spec"]
    return found


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
    found = pod_spec(code=GIT)
    mine, checkout = found["initContainers"]
    (main,) = found["containers"]
    assert mine == {"name": "mine", "image": "mine:1"}
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
    assert {"name": "finetune-code", "emptyDir": {}} in found["volumes"]
    assert (main["workingDir"], main["command"]) == ("/code", ["torchrun", "train.py"])
    assert {"name": "finetune-code", "mountPath": "/code", "readOnly": False} in main["volumeMounts"]
    assert not any(item["name"].startswith("FINETUNE_GIT") for item in main["env"])


def test_packages_are_installed_by_the_image_of_the_command() -> None:
    found = pod_spec(dependencies=["datasets>=3", "trl"])
    _, install = found["initContainers"]
    (main,) = found["containers"]
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
    assert {"name": "finetune-dependencies", "emptyDir": {}} in found["volumes"]
    assert main["command"] == [*script, "run", "torchrun", "train.py"]
    assert {**place, "readOnly": True} in main["volumeMounts"]
    files = made("ConfigMap", dependencies=["trl"])["data"]
    assert files["dependencies.py"] == inspect.getsource(installer)


BOTH: Json = {"dependencies": ["trl"], "code": GIT}


def volumes(*given: Json, **parts: Any) -> dict[str, Json]:
    """The volumes of a job whose pod template has some, by name, without those that every pod has."""
    before = status(ACCEPTED, ADMITTED, PREPARED, code=CodeStatus(commit=COMMIT))
    job = ftj(before, trainer=trainer(**parts), podTemplate={"spec": {"volumes": [*given]}})
    (found,) = (body for body in conclude(job, settings=SETTINGS).apply if body["kind"] == "Job")
    items = {item["name"]: item for item in found["spec"]["template"]["spec"]["volumes"]}
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
    mine: list[Json] = [
        {"name": name, "persistentVolumeClaim": {"claimName": "mine"}} for name in ("code", "dependencies")
    ]
    found = volumes(*mine, **parts)
    assert [found[item["name"]] for item in mine] == mine


NAMELESS: dict[str, Any] = {"no name": {"value": "x"}, "no text": {"name": 3}, "no variable": "x"}


@pytest.mark.parametrize("item", NAMELESS.values(), ids=NAMELESS)
def test_variables_without_a_name_are_left_for_the_api_server_to_refuse(item: Any) -> None:
    before = status(ACCEPTED, ADMITTED, PREPARED, code=CodeStatus(commit=COMMIT))
    template = {
        "spec": {"containers": [{"name": "trainer", "env": [item, {"name": "PYTHONHOME", "value": "/"}]}]}
    }
    job = ftj(before, trainer=trainer(code=GIT), podTemplate=template)
    (found,) = (body for body in conclude(job, settings=SETTINGS).apply if body["kind"] == "Job")
    pod = found["spec"]["template"]["spec"]
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
        ["spec.trainer.dependencies has 'datasets>=x.y', which is no requirement (Expected"],
    ),
}


@pytest.mark.parametrize(("given", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_requirements_that_are_none(given: list[str], expected: list[str]) -> None:
    wrong = [*own_code.mistakes(spec(trainer=trainer(dependencies=given)).trainer)]
    assert [text[: len(start)] for text, start in zip(wrong, expected, strict=True)] == expected


JOB = "tune-train-1"


def waiting(name: str) -> Json:
    """A pod whose init container of a name runs."""
    found = pod(JOB, 0, phase="Pending")
    state = {"running": {"startedAt": "2026-08-01T12:00:00Z"}}
    return found | {"status": {**found["status"], "initContainerStatuses": [{"name": name, "state": state}]}}


STEPS = {
    "checkout": "; pod tune-train-1-0-abcde fetches the code",
    "dependencies": "; pod tune-train-1-0-abcde installs the packages of trainer.dependencies",
    "mine": "",
}


@pytest.mark.parametrize(("name", "expected"), STEPS.items(), ids=STEPS)
def test_what_a_pod_does_before_it_starts_is_told(name: str, expected: str) -> None:
    given = ftj(running(), trainer=trainer(dependencies=["trl"]))
    decision = conclude(given, observed(child(JOB), pods=[waiting(name)]), settings=SETTINGS)
    assert said(decision, ConditionType.TRAINED) == (
        "False",
        ConditionReason.STARTING,
        f"attempt 1: 0 of 2 pods are ready{expected}",
    )


def failed(code: int, reason: str, job: str = JOB, container: str = "dependencies") -> Json:
    """A pod whose packages cannot be installed."""
    error = TerminationMessage(error=PodError(reason=reason, message="the index has no trl>=99"))
    ended = {"exitCode": code, "message": error.dump(), "finishedAt": "2026-08-01T12:00:10Z"}
    status = {
        "phase": "Failed",
        "initContainerStatuses": [{"name": container, "state": {"terminated": ended}}],
    }
    return pod(job, 0) | {"status": status}


ENDS: dict[str, tuple[int, str, str, tuple[str, str]]] = {
    "what no attempt changes": (
        64,
        "DependenciesFailed",
        "Failed",
        ("False", ConditionReason.DEPENDENCIES_FAILED),
    ),
    "a commit that is gone": (64, "CheckoutFailed", "Failed", ("False", ConditionReason.CHECKOUT_FAILED)),
    "an index that is away": (69, "DependenciesFailed", "Starting", ("False", ConditionReason.RESTARTING)),
    "what another attempt may change": (
        *(1, "DependenciesFailed", "Starting"),
        ("False", ConditionReason.RESTARTING),
    ),
}


@pytest.mark.parametrize(("code", "reason", "phase", "expected"), ENDS.values(), ids=ENDS)
def test_a_failure_names_the_pod_and_the_requirement(
    code: int, reason: str, phase: str, expected: tuple[str, str]
) -> None:
    given = ftj(running(), trainer=trainer(dependencies=["trl>=99"]))
    decision = conclude(given, observed(child(JOB, "Failed"), pods=[failed(code, reason)]), settings=SETTINGS)
    told = f"pod tune-train-1-0-abcde ended with exit code {code}: init container dependencies: the index has no trl>=99"
    ready = said(decision, ConditionType.READY)
    assert ready
    assert (decision.status.phase, ready[:2]) == (phase, expected)
    assert told in ready[2]
    failure = decision.status.last_failure
    assert failure is not None
    assert (failure.reason, failure.exit_code) == (reason, code)


# Exit code, reason, runPolicy; then the reason of Failed, or the attempt, the restarts and the seconds until it may start.
POLICIES: dict[str, tuple[int, str, Json, tuple[Any, ...]]] = {
    "an index that is away": (69, "DependenciesFailed", {}, (None, 2, 0, 10)),
    "a server of Git that refuses the login": (69, "CheckoutFailed", {}, (None, 2, 0, 10)),
    "an index that is away, where no restarts are left": (
        *(69, "DependenciesFailed", {"maxRestarts": 0}),
        (None, 2, 0, 10),
    ),
    "69 is fatal for a command": (69, "CheckoutFailed", {"fatalExitCodes": [69]}, (None, 2, 0, 10)),
    "what another attempt may change": (1, "DependenciesFailed", {}, (None, 2, 1, None)),
    "code that cannot be fetched": (1, "CheckoutFailed", {}, (None, 2, 1, None)),
    "no restarts are left": (
        *(1, "DependenciesFailed", {"maxRestarts": 0}),
        (ConditionReason.MAX_RESTARTS_REACHED, 1, 0, None),
    ),
    "no restarts are left for code": (
        *(1, "CheckoutFailed", {"maxRestarts": 0}),
        (ConditionReason.MAX_RESTARTS_REACHED, 1, 0, None),
    ),
    "another code is to be retried": (1, "CheckoutFailed", {"retryableExitCodes": [137]}, (None, 2, 1, None)),
    "the code of a command is fatal": (1, "DependenciesFailed", {"fatalExitCodes": [1]}, (None, 2, 1, None)),
    "64 is not fatal for a command": (
        *(64, "CheckoutFailed", {"fatalExitCodes": [42]}),
        (ConditionReason.CHECKOUT_FAILED, 1, 0, None),
    ),
    "64 is to be retried for a command": (
        *(64, "DependenciesFailed", {"fatalExitCodes": [], "retryableExitCodes": [64]}),
        (ConditionReason.DEPENDENCIES_FAILED, 1, 0, None),
    ),
    "an end without a reason": (137, "OOMKilled", {"retryableExitCodes": [137]}, (None, 2, 1, None)),
}


@pytest.mark.parametrize(("code", "reason", "policy", "expected"), POLICIES.values(), ids=POLICIES)
def test_codes_of_runpolicy_are_those_of_the_command(
    code: int, reason: str, policy: Json, expected: tuple[Any, ...]
) -> None:
    container = "checkout" if reason == "CheckoutFailed" else "dependencies"
    given = ftj(running(), trainer=trainer(dependencies=["trl"]), runPolicy=policy)
    seen = observed(child(JOB, "Failed", lived=400), pods=[failed(code, reason, container=container)])
    decision = conclude(given, seen, settings=SETTINGS)
    end, at = said(decision, ConditionType.FAILED), decision.status.restart_time
    waits = (at - NOW).total_seconds() if at else None
    assert (end[1] if end else None, decision.status.attempt, decision.status.restarts, waits) == expected


def test_a_command_and_containers_of_ones_own_cannot_say_that_their_failure_does_not_count() -> None:
    told = TerminationMessage(error=PodError(reason="DependenciesFailed", message="me too"))
    given = ftj(running(), trainer=trainer(dependencies=["trl"]))
    for found in (ended(JOB, 0, 69, told), failed(69, "DependenciesFailed", container="mine")):
        decision = conclude(given, observed(child(JOB, "Failed"), pods=[found]), settings=SETTINGS)
        assert (decision.status.attempt, decision.status.restarts) == (2, 1)


def test_who_waits_for_an_index_is_told_at_each_attempt_and_waits_longer() -> None:
    current, now, waits = running(), 0.0, []
    for number in range(1, 9):
        name = f"tune-train-{number}"
        given = ftj(current, trainer=trainer(dependencies=["trl"]))
        seen = observed(child(name, "Failed", lived=now), pods=[failed(69, "DependenciesFailed", name)])
        now += 400
        after = conclude(given, seen, at=later(now), settings=SETTINGS).status
        assert after.restart_time
        waits.append((after.restart_time - later(now)).total_seconds())
        [change] = changes(current.conditions, after.conditions)
        sentence = (
            f"attempt {number} could not begin and does not count; pod {name}-0-abcde ended with exit code 69: init container "
            f"dependencies: the index has no trl>=99; at {after.restart_time:%H:%M:%S} UTC, attempt {number + 1} starts your "
            "command again"
        )
        told = event(EventTarget("FineTuneJob", "tune", "team", "u"), change, later(now))
        assert (told["type"], told["reason"], told["message"]) == ("Warning", "Restarting", sentence)
        now = (after.restart_time - NOW).total_seconds()
        begun = conclude(ftj(after, trainer=trainer(dependencies=["trl"])), observed(), at=after.restart_time)
        current = begun.status
        starting = said(begun, ConditionType.TRAINED)
        assert starting
        assert starting[1] == ConditionReason.STARTING
        assert starting[2].endswith("init container dependencies: the index has no trl>=99")
    assert waits == [10, 20, 40, 80, 160, 300, 300, 300]
    assert (current.restarts, current.attempt) == (0, 9)
