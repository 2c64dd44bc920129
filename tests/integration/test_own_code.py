"""A script from a repository, on a real API server: its commit is resolved once, and every attempt has it."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from fixtures.git_server import git_server
from fixtures.operator_processes.jobs import error, splits_given
from fixtures.operator_processes.world import World
from support.api import Api
from support.mlflow_server import Mlflow
from support.operator_process import operator_process, watching
from support.process import running
from support.waiting import wait_for

Json = dict[str, Any]


def fetched(world: World, attempt: int) -> list[Json]:
    """The init containers of the pods of an attempt, by name and what they get."""
    pods = world.wait_pods(f"tune-train-{attempt}", 2)
    assert len({str(pod["spec"]["initContainers"]) for pod in pods}) == 1
    return [{item["name"]: item["args"]} for item in pods[0]["spec"]["initContainers"]]


def job_spec(world: World) -> Json:
    """The spec of the third attempt's Job."""
    body = world.api.get("Job", world.namespace, "tune-train-3")
    assert body is not None
    return dict(body["spec"])


def one_pod_tries_first(world: World) -> None:
    """A server was away: the next attempt has one pod until its command runs."""
    world.wait_pods("tune-train-3", 1)
    assert job_spec(world)["parallelism"] == 1
    starting = world.wait_condition("tune", "Trained", "Starting")
    assert starting["message"].startswith("attempt 3: 1 of 2 pods starts first")
    world.run_pods("tune-train-3", 1)
    world.run_pods("tune-train-3", 2)
    assert job_spec(world)["parallelism"] == 2
    assert world.wait_phase("tune", "Training")["restarts"] == 1


def test_a_commit_is_resolved_once(
    api: Api, kubeconfig: Path, mlflow_server: Mlflow, namespace: str, tmp_path: Path
) -> None:
    with git_server(tmp_path / "git") as server:
        settings = watching(namespace, mlflow_server.uri) | {"SSL_CERT_FILE": str(server.authority)}
        with running(operator_process(kubeconfig, tmp_path / "operator.log", settings)):
            world = World(api, mlflow_server, namespace)
            server.create("code")
            first = server.commit("code", {"train.py": "1"})
            server.logins["code"] = ("git", "token")
            git = {"url": server.url("code"), "revision": "main", "secretRef": {"name": "login"}}
            trainer = {
                "command": ["torchrun", "train.py"],
                "code": {"git": git},
                "dependencies": ["datasets>=3", "trl"],
            }
            world.submit(splits_given(trainer=trainer))
            waits = world.wait_condition("tune", "CodeResolved", "CredentialsMissing")
            assert "Secret login of spec.trainer.code.git.secretRef does not exist" in waits["message"]
            assert world.condition("tune", "Reconciling")["status"] == "True"

            data = {"password": base64.b64encode(b"token").decode()}
            secret = {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": "login", "namespace": namespace},
            }
            api.create({**secret, "data": data})
            assert fetched(world, 1) == [
                {"checkout": [server.url("code"), first, "/workspace"]},
                {"dependencies": ["datasets>=3", "trl"]},
            ]
            assert world.status("tune")["code"] == {"commit": first, "branch": "main"}
            (run,) = wait_for("the run", lambda: mlflow_server.runs_of(world.job("tune")["metadata"]["uid"]))
            tags = {item["key"]: item["value"] for item in run["data"]["tags"]}
            git_tags = {key: value for key, value in tags.items() if key.startswith("mlflow.source.git.")}
            assert git_tags == {
                "mlflow.source.git.commit": first,
                "mlflow.source.git.branch": "main",
                "mlflow.source.git.repoURL": server.url("code"),
            }

            server.commit("code", {"train.py": "2"})
            failed = error("ScriptFailed", "it broke")
            world.end_pods("tune-train-1", [1, 1], [failed, failed])
            assert fetched(world, 2)[0] == {"checkout": [server.url("code"), first, "/workspace"]}
            world.fail_init("tune-train-2", 2, "dependencies", 69)
            one_pod_tries_first(world)
            world.delete_all()
