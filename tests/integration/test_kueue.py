"""A job in a queue, with Kueue's real Workloads on a real API server. The tests play Kueue, the scheduler and the kubelet.

tests/long/operator/test_kueue.py has the same with the real Kueue.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.crds import KUEUE_WORKLOADS
from finetune_crds.contract import PodError, TerminationMessage
from fixtures.operator_processes.jobs import splits_given
from fixtures.operator_processes.servers import Plane, create_crds
from fixtures.operator_processes.world import World
from support.api import Api
from support.waiting import wait_for

Json = dict[str, Any]
JOB = "tune-train-1"
PREEMPTED = (
    "Preempted to accommodate a workload (UID: u, JobUID: j) due to prioritization in the ClusterQueue"
)
SAVED = TerminationMessage(
    checkpoint_step=40, error=PodError(reason="Preempted", message="stopped by SIGTERM")
)


# NB: the first test of the file, since the Workloads are there from the first test that needs them to the last one.
def test_without_kueue_a_queue_is_said_to_admit_nothing(world: World, plane: Plane) -> None:
    world.submit(splits_given(runPolicy={"queueName": "reserch"}))
    condition = world.wait_condition("tune", "Trained", "QueueInadmissible")
    sentence = (
        "attempt 1 waits, because queue reserch has not admitted Job tune-train-1: "
        "Kueue is not installed in this cluster: install Kueue, or remove spec.runPolicy.queueName, and suspend "
        "and resume the job"
    )
    assert condition["message"] == sentence
    assert sentence in plane.run_kubectl(world.namespace, "describe", "ftj", "tune")
    header, row = plane.run_kubectl(world.namespace, "get", "ftj").splitlines()
    assert header == "NAME PHASE REASON PROGRESS LOSS MODEL AGE"
    assert row.startswith("tune Pending QueueInadmissible ")


@pytest.fixture(scope="module")
def kueue(api: Api) -> Iterator[None]:
    """Kueue's CRD of Workloads, without Kueue."""
    create_crds(api, [KUEUE_WORKLOADS.path()])
    yield
    api.delete("CustomResourceDefinition", "", "workloads.kueue.x-k8s.io")


def create_workload(world: World, job: Json) -> str:
    """Play Kueue: create the Workload of a Job, and return its name."""
    meta = job["metadata"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"]}
    template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "trainer", "image": "trainer"}]}}
    body = {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Workload",
        "metadata": {
            "name": f"job-{meta['name']}-x",
            "namespace": world.namespace,
            "ownerReferences": [{**owner, "controller": True}],
        },
        "spec": {"queueName": "gpus", "podSets": [{"name": "main", "count": 2, "template": template}]},
    }
    return str(world.api.create(body, strict=True)["metadata"]["name"])


def report_workload(world: World, name: str, **conditions: tuple[str, str, str]) -> None:
    """Play Kueue: write the conditions of a Workload, each as status, reason and message."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    items = [
        {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": stamp}
        for kind, (status, reason, message) in conditions.items()
    ]
    world.api.patch("Workload", world.namespace, name, {"status": {"conditions": items}}, status=True)


def wait_job(world: World) -> Json:
    return wait_for("the Job", lambda: world.api.get("Job", world.namespace, JOB))


def resume(world: World, workload: str) -> list[Json]:
    """Play Kueue: the Job is resumed. Return its pods, which are not scheduled."""
    report_workload(
        world, workload, QuotaReserved=("True", "QuotaReserved", "ok"), Admitted=("True", "Admitted", "ok")
    )
    world.api.patch("Job", world.namespace, JOB, {"spec": {"suspend": False}})
    return world.wait_pods(JOB, 2)


def admit(world: World, workload: str) -> list[Json]:
    """Play Kueue, the scheduler and the kubelet: the Job is resumed, and its pods run."""
    pods = resume(world, workload)
    for pod in pods:
        world.bind_pod(pod, "node-a")
    return world.run_pods(JOB, 2)


def evict(world: World, workload: str) -> None:
    """Play Kueue: the Job is suspended, and its start time reset."""
    report_workload(
        world,
        workload,
        QuotaReserved=("False", "Pending", "insufficient unused quota"),
        Evicted=("True", "Preempted", PREEMPTED),
    )
    world.api.patch("Job", world.namespace, JOB, {"spec": {"suspend": True}})
    world.api.patch("Job", world.namespace, JOB, {"status": {"startTime": None}}, status=True)


def wait_ends(world: World, expected: list[tuple[int, str, str, int | None, int | None]]) -> Json:
    """Wait until the status has these ends of attempts, and return the status."""
    wait_for(f"the ends {expected}", lambda: ends(world.status("tune")) == expected)
    return world.status("tune")


def wait_message(world: World, text: str) -> None:
    """Wait until the message of the condition Trained contains this text."""
    wait_for(f"Trained says {text}", lambda: text in world.condition("tune", "Trained").get("message", ""))


def ends(status: Json) -> list[tuple[int, str, str, int | None, int | None]]:
    return [
        (item["attempt"], item["cause"], item["reason"], item.get("exitCode"), item.get("checkpointStep"))
        for item in status.get("attempts") or []
    ]


def test_a_wrong_queue_is_named_with_what_to_check(world: World, plane: Plane, kueue: None) -> None:
    world.submit(splits_given(runPolicy={"queueName": "reserch"}))
    name = create_workload(world, wait_job(world))
    report_workload(world, name, QuotaReserved=("False", "Inadmissible", "LocalQueue reserch doesn't exist"))
    sentence = (
        "attempt 1 waits, because queue reserch has not admitted Job tune-train-1: "
        f"LocalQueue reserch doesn't exist: check kubectl get localqueue -n {world.namespace}"
    )
    wait_for("what Kueue says", lambda: world.condition("tune", "Trained").get("message") == sentence)
    assert {item["type"] for item in world.events("QueueInadmissible")} == {"Warning"}
    assert sentence in plane.run_kubectl(world.namespace, "describe", "ftj", "tune")
    quota = ("False", "Pending", "insufficient unused quota for nvidia.com/gpu")
    report_workload(world, name, QuotaReserved=quota)
    condition = world.wait_condition("tune", "Trained", "Queued")
    assert condition["message"].endswith("queue reserch: insufficient unused quota for nvidia.com/gpu")
    wait_for("a Normal Event", lambda: "Normal" in {item["type"] for item in world.events("Queued")})
    assert plane.run_kubectl(world.namespace, "get", "ftj").splitlines()[1].startswith("tune Queued Queued ")


def test_an_attempt_that_kueue_preempts_goes_on_in_the_same_job_at_no_cost(world: World, kueue: None) -> None:
    checkpoint = {"uri": "s3://runs/tune"}
    world.submit(splits_given(runPolicy={"queueName": "gpus", "maxRestarts": 0}, checkpoint=checkpoint))
    world.wait_phase("tune", "Queued")
    uid = wait_job(world)["metadata"]["uid"]
    workload = create_workload(world, wait_job(world))
    for count in (1, 2):
        pods = admit(world, workload)
        world.wait_phase("tune", "Training")
        evict(world, workload)
        wait_message(
            world, f"attempt 1 waits for pod {pods[0]['metadata']['name']} on node node-a and 1 more to stop"
        )
        world.stop_pods(JOB, pods, SAVED)
        world.wait_phase("tune", "Queued")
        status = wait_ends(world, [(1, "Preempted", "Preempted", 75, 40)] * count)
        assert (status["attempt"], status["restarts"], status["checkpoint"]["step"]) == (1, 0, 40)
        assert status["attempts"][-1]["message"] == f"Kueue evicted Job tune-train-1: {PREEMPTED}"
        wait_message(
            world,
            "attempt 1 waits in Kueue's queue gpus: insufficient unused quota; its pods were stopped, and it resumes from the newest "
            "checkpoint",
        )
        assert wait_job(world)["metadata"]["uid"] == uid

    admit(world, workload)
    world.wait_phase("tune", "Training")
    assert world.condition("tune", "Trained")["message"].startswith("attempt 1 runs on 2 pods")
    # The pods of before, which ended with 75, do not hide why these end.
    world.end_pods(JOB, [1, 1], ["ValueError: it broke", "ValueError: it broke"])
    status = world.wait_phase("tune", "Failed")
    assert (status["lastFailure"]["exitCode"], status["lastFailure"]["message"]) == (
        1,
        "ValueError: it broke",
    )
    assert [item["cause"] for item in status["attempts"]] == ["Preempted", "Preempted", "Failed"]


def test_an_eviction_before_any_pod_ran_is_no_end_of_an_attempt(world: World, kueue: None) -> None:
    world.submit(splits_given(runPolicy={"queueName": "gpus"}))
    workload = create_workload(world, wait_job(world))
    resume(world, workload)
    wait_for("the start of the pods", lambda: world.status("tune").get("jobs", {}).get("trainStartTime"))
    evict(world, workload)
    wait_for("its end", lambda: not world.status("tune")["jobs"].get("trainStartTime"))
    condition = world.wait_condition("tune", "Trained", "Queued")
    wait_message(world, "insufficient unused quota")
    assert "its pods were stopped" not in condition["message"]
    assert ends(world.status("tune")) == []
