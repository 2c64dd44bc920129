"""Children are the operator's by their controller, in their job's namespace; a label alone makes nothing its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune_crds.contract import PrepResult, TerminationMessage
from finetune_crds.status import SplitCounts
from fixtures.operator_processes.jobs import PREPARED, TRAINED, job, splits_given
from fixtures.operator_processes.operators import new_namespace
from fixtures.operator_processes.world import World
from support.api import Api
from support.mlflow_server import Mlflow
from support.operator_process import forked_operator
from support.process import running
from support.waiting import wait_for

Json = dict[str, Any]
FORGED_SPLITS = TerminationMessage(
    prep=PrepResult(rows=SplitCounts(train=1), tokens=SplitCounts(train=1), path="/forged", version=1)
)


@pytest.fixture
def elsewhere(api: Api) -> str:
    """A second namespace that the operator watches."""
    return new_namespace(api)


@pytest.fixture
def world(api: Api, kubeconfig: Path, namespace: str, elsewhere: str, tmp_path: Path) -> Iterator[World]:
    """An operator that watches both namespaces, without MLflow."""
    log = tmp_path / "operator.log"
    operator = forked_operator(kubeconfig, log, {"FINETUNE_NAMESPACES": f"{namespace},{elsewhere}"})
    with running(operator):
        yield World(api, Mlflow(tmp_path), namespace)
    print(log.read_text(encoding="utf-8"))


def labels(ftj: Json, component: str) -> Json:
    """What anybody who can read the FineTuneJob, or its MLflow run, can write onto objects of their own."""
    meta = ftj["metadata"]
    keys = {"job": meta["name"], "job-uid": meta["uid"], "component": component, "attempt": "1"}
    return {f"finetune.dev/{key}": value for key, value in keys.items()}


def pod_spec(container: str) -> Json:
    return {"restartPolicy": "Never", "containers": [{"name": container, "image": "forged:1"}]}


def forged_job(
    ftj: Json, namespace: str, component: str, name: str, owners: list[Json] | None = None
) -> Json:
    """A Job that carries every label of a child."""
    child_labels = labels(ftj, component)
    container = "prep" if component == "prep" else "trainer"
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": child_labels,
            "ownerReferences": owners or [],
        },
        "spec": {"template": {"metadata": {"labels": child_labels}, "spec": pod_spec(container)}},
    }


def forged_pod(ftj: Json, namespace: str, name: str, owners: list[Json] | None = None, **more: str) -> Json:
    """A pod that carries every label of a child's pod."""
    meta = {
        "name": name,
        "namespace": namespace,
        "labels": labels(ftj, "train") | more,
        "ownerReferences": owners or [],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod_spec("trainer")}


def completed(world: World, namespace: str, body: Json, message: TerminationMessage) -> None:
    """Create a Job and have it complete."""
    world.api.create(body)
    name = body["metadata"]["name"]
    namespace_world = World(world.api, world.mlflow, namespace)
    namespace_world.end_pods(name, [0], [message])

    def done() -> bool:
        job_body = world.api.get("Job", namespace, name) or {}
        return any(item["type"] == "Complete" for item in job_body.get("status", {}).get("conditions") or [])

    wait_for(f"Job {name} is complete", done)


def suspended(world: World, body: Json) -> Json:
    """Submit a job that has a uid and no children yet."""
    body = copy.deepcopy(body)
    body["spec"]["suspend"] = True
    ftj = world.submit(body)
    world.wait_phase(ftj["metadata"]["name"], "Suspended")
    return ftj


def resume(world: World, name: str) -> None:
    world.api.patch("FineTuneJob", world.namespace, name, {"spec": {"suspend": False}})


def owner(ftj: Json, **fields: Any) -> Json:
    """An ownerReference as the operator writes it; fields replaced."""
    meta = ftj["metadata"]
    reference = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "name": meta["name"]}
    return reference | {"uid": meta["uid"], "controller": True} | fields


def test_another_namespace_has_no_say(world: World, elsewhere: str) -> None:
    ftj = suspended(world, job(register=None))
    completed(world, elsewhere, forged_job(ftj, elsewhere, "prep", "tune-prep"), FORGED_SPLITS)
    completed(world, elsewhere, forged_job(ftj, elsewhere, "train", "tune-train-1"), TRAINED)
    world.api.create(forged_pod(ftj, elsewhere, "tune-train-1-0-forged"))
    resume(world, "tune")
    world.run_pods("tune-prep", 1)
    world.end_pods("tune-prep", [0], [PREPARED])
    world.run_pods("tune-train-1", 2)
    status = world.wait_phase("tune", "Training")
    assert (status["data"]["path"], status["attempt"]) == ("/data/splits", 1)


FORGED_OWNERS: dict[str, Callable[[Json], list[Json]]] = {
    "no owner": lambda _: [],
    "an owner that does not control it": lambda ftj: [owner(ftj, controller=False)],
}


@pytest.mark.parametrize("owners", FORGED_OWNERS.values(), ids=FORGED_OWNERS)
def test_a_job_that_completes_in_its_place_trains_nothing(
    world: World, owners: Callable[[Json], list[Json]]
) -> None:
    ftj = suspended(world, splits_given(register=None))
    body = forged_job(ftj, world.namespace, "train", "tune-train-1", owners(ftj))
    completed(world, world.namespace, body, TRAINED)
    resume(world, "tune")
    world.wait_condition("tune", "PodsHealthy", "NameTaken")
    assert world.condition("tune", "Trained").get("status") != "True"
    world.api.delete("Job", world.namespace, "tune-train-1")
    wait_for(
        "the forged pod is gone",
        lambda: (
            not [pod for pod in world.remaining_pods() if pod["spec"]["containers"][0]["image"] == "forged:1"]
        ),
    )
    world.run_pods("tune-train-1", 2)
    world.wait_phase("tune", "Training")


def test_a_pod_of_somebody_elses_holds_nothing_up(world: World) -> None:
    ftj = suspended(world, splits_given(register=None))
    foreign_job = world.api.create(forged_job(ftj, world.namespace, "train", "other"))
    foreign_meta = foreign_job["metadata"]
    of_other = owner(ftj, apiVersion="batch/v1", kind="Job", name="other", uid=foreign_meta["uid"])
    owners = {
        "none": [],
        "not-controlled": [owner(ftj, controller=False)],
        "not-through-a-job": [owner(ftj)],
        "of-another-job": [of_other],
    }
    for name, references in owners.items():
        world.api.create(forged_pod(ftj, world.namespace, f"tune-train-1-0-{name}", references))
    resume(world, "tune")
    pods = world.run_pods("tune-train-1", 2)
    world.wait_phase("tune", "Training")
    uid = pods[0]["metadata"]["ownerReferences"][0]["uid"]
    claim = {"batch.kubernetes.io/controller-uid": uid, "controller-uid": uid}
    late = forged_pod(ftj, world.namespace, "tune-train-1-1-late", owners["of-another-job"], **claim)
    world.api.create(late)
    world.set_waiting(late, "ErrImagePull", "no such image")
    world.end_pods("tune-train-1", [0, 0], [TRAINED, None])
    status = world.wait_phase("tune", "Succeeded")
    assert status["nodes"]["ready"] == 2
