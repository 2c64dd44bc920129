"""A version is copied from one real MLflow server to another, by the commands of the pod that the operator creates."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from fixtures.operator_processes.registry import GATES, Registry
from fixtures.operator_processes.world import World
from support.mlflow_server import Mlflow
from support.waiting import wait_for

Json = dict[str, Any]
FILES = {"MLmodel": b"flavors: {}\n", "model/weights.safetensors": b"w" * 100_000}
# Of this machine; the pods of the operator have other ones.
_OWN_VARIABLES = ("MLFLOW_", "FINETUNE_")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mlflow]:
    """The other MLflow server."""
    server = Mlflow(tmp_path_factory.mktemp("mlflow-source"), forked=True)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def registry(world: World) -> Registry:
    return Registry(world.api, world.mlflow, world.namespace, f"model-{world.namespace}")


def register(source: Mlflow, registry: Registry, loss: float) -> tuple[Registry, str]:
    """A version with files at the source, whose run has this loss; the registry there, and the number."""
    dev = Registry(registry.api, source, registry.namespace, f"dev-{registry.namespace}")
    version = dev.version(loss)
    body = source.get("model-versions/get", name=dev.model, version=version)["model_version"]
    artifacts = str(body["source"]).partition("mlflow-artifacts:/")[2].lstrip("/")
    for name, content in FILES.items():
        url = f"{source.uri}/api/2.0/mlflow-artifacts/artifacts/{artifacts}/{name}"
        requests.put(url, data=content, timeout=10).raise_for_status()
    return dev, version


def spec(source: Mlflow, dev: Registry, **fields: Any) -> Json:
    return {"type": "Registry", "registry": {"uri": source.uri, "model": dev.model, **fields}}


def wait_copy(world: World) -> Json:
    """The Job of the copy."""

    def find() -> Json | None:
        jobs = world.api.list("Job", world.namespace, "finetune.dev/component=copy")
        alive = [job for job in jobs if "deletionTimestamp" not in job["metadata"]]
        return alive[0] if alive else None

    return wait_for("a Job copies the version", find)


def run_container(container: Json, folder: Path) -> subprocess.CompletedProcess[str]:
    """Play the kubelet: run the command of a container as a process of this machine."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(_OWN_VARIABLES)}
    return subprocess.run(
        [sys.executable, "-m", "finetune_trainer.registry_copy", *container["args"]],
        env={
            **own,
            **{item["name"]: item["value"] for item in container["env"]},
            "HOME": str(folder),
            "FINETUNE_COPY_PATH": str(folder),
            "FINETUNE_TERMINATION_PATH": str(folder / "termination"),
            "FINETUNE_MLFLOW_PATIENCE_SECONDS": "20",
        },
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_version_is_copied_judged_by_its_numbers_and_promoted(
    world: World, registry: Registry, source: Mlflow, tmp_path: Path
) -> None:
    dev, number = register(source, registry, 2.0)
    dev.point("champion", number)
    registry.apply(source=spec(source, dev, alias="champion"), gates=GATES)
    job = wait_copy(world)
    name = job["metadata"]["name"]
    [pod] = world.run_pods(name, 1)
    assert registry.condition("SourceReady")["reason"] == "Copying"
    [download], [main] = pod["spec"]["initContainers"], pod["spec"]["containers"]
    assert download["command"] == main["command"] == ["finetune-copy"]
    for container in (download, main):
        done = run_container(container, tmp_path)
        assert done.returncode == 0, done.stderr
    world.end_pods(name, [0], [""])

    status = registry.wait("Promoted", "1")
    assert (status["copied"]["sourceVersion"], status["copied"]["version"]) == (number, "1")
    version = world.mlflow.get("model-versions/get", name=registry.model, version="1")["model_version"]
    tags = {item["key"]: item["value"] for item in version["tags"]}
    assert (tags["finetune_copied_from"], tags["finetune_copied_model"]) == (source.uri, dev.model)
    run = world.mlflow.get("runs/get", run_id=version["run_id"])["run"]
    assert run["info"]["status"] == "FINISHED"
    assert [(item["key"], item["value"]) for item in run["data"]["metrics"]] == [("eval_loss", 2.0)]

    def is_released() -> bool:
        body = world.api.get("Job", world.namespace, name)
        return body is not None and body["spec"].get("ttlSecondsAfterFinished") == 24 * 3600

    wait_for("the Job may be deleted", is_released)
    # A promotion that is created again finds the copy, and makes no second one.
    world.api.delete("ModelPromotion", world.namespace, "champion")
    wait_for("it is gone", lambda: not registry.get())
    registry.apply("staging", source=spec(source, dev, version=int(number)), gates=GATES)
    registry.wait("Promoted", "1", "staging")
    assert world.api.list("Job", world.namespace, "finetune.dev/component=copy") == [] or (
        wait_copy(world)["metadata"]["name"] == name
    )


def test_a_copy_that_fails_names_the_sentence_of_its_pod(
    world: World, registry: Registry, source: Mlflow, tmp_path: Path
) -> None:
    dev = Registry(world.api, source, world.namespace, f"dev-{world.namespace}")
    number = dev.version(2.0)
    registry.apply(source=spec(source, dev, version=int(number)))
    name = wait_copy(world)["metadata"]["name"]
    [pod] = world.wait_pods(name, 1)
    [download] = pod["spec"]["initContainers"]
    done = run_container(download, tmp_path)
    assert done.returncode == 64, done.stderr
    fail_download(world, pod, done.returncode, (tmp_path / "termination").read_text(encoding="utf-8"))
    registry.wait("Blocked", None)
    assert registry.condition("SourceReady")["message"] == (
        f"version {number} of {dev.model} at {source.uri} cannot be copied: spec.source.registry version {number} of {dev.model} has no "
        f"files: name another version: correct this and delete Job {name} to copy again, or change spec.source"
    )


def fail_download(world: World, pod: Json, code: int, message: str) -> None:
    """Play the kubelet: the init container ends with this message, and its pod fails."""
    ended = {
        "exitCode": code,
        "message": message,
        "reason": "Error",
        "finishedAt": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    state = {"name": "download", "state": {"terminated": ended}}
    container = {**state, "image": "trainer", "imageID": "", "restartCount": 0, "ready": False}
    meta = pod["metadata"]
    status = {"phase": "Failed", "initContainerStatuses": [container]}
    world.api.patch("Pod", meta["namespace"], meta["name"], {"status": status}, status=True)
