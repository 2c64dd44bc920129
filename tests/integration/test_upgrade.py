"""Another version of the operator takes over while jobs run, and the version before returns: nothing changes for the jobs.

No earlier release exists yet. So the versions differ in what a release changes for its jobs: the images and the defaults of the chart.
A status without the newer fields stands for the status of an older version.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import yaml

from finetune_crds.base import API_VERSION
from finetune_crds.contract import EXIT_PREEMPTED
from finetune_operator.names import scheduled_job_name
from finetune_operator.text import format_time
from fixtures.operator_processes.jobs import PREPARED, TRAINED, error, job, splits_given
from fixtures.operator_processes.registry import GATES, Registry
from fixtures.operator_processes.replicas import Replicas
from fixtures.operator_processes.world import OwnWorld, World
from support.operator_process import metric
from support.process import Process
from support.waiting import wait_for

Json = dict[str, Any]
SCHEDULE = "nightly"
SWEEP: Json = {
    "algorithm": "Grid",
    "parameters": [{"field": "training.learningRate", "values": [1e-4, 1e-3]}],
}
EARLIER, LATER = "earlier", "later"
"""The versions. The images, the storage and the variable of the pods have the name of their version."""


@dataclass
class Releases:
    """The operator of the test's namespace, in one version after the other. All versions share a Lease, as in an upgrade by Helm."""

    replicas: Replicas
    leader: Process | None = None

    @property
    def world(self) -> World:
        return self.replicas.world

    def take_over(self, version: str) -> Process:
        """Start a version, and end the one before when it is ready."""
        defaults = self.replicas.folder / f"{version}.yaml"
        variables = [{"name": "RELEASE", "value": version}]
        content = {
            "storage": f"/{version}",
            "pods": {"all": {"env": variables}},
            "checkpoint": {"everySteps": len(version)},
        }
        defaults.write_text(yaml.safe_dump(content), encoding="utf-8")
        settings = {
            "FINETUNE_PREP_IMAGE": f"prep:{version}",
            "FINETUNE_TRAINER_IMAGE": f"trainer:{version}",
            "FINETUNE_DEFAULTS": str(defaults),
            "FINETUNE_POLL_SECONDS": "0.5",
        }
        operator = self.replicas.start(version, settings=settings)
        if self.leader and self.leader.started:
            self.leader.started.send_signal(signal.SIGTERM)
        self.replicas.wait_leader(version, 60)
        self.leader = operator
        return operator


@pytest.fixture
def releases(replicas: Replicas) -> Releases:
    return Releases(replicas)


def settle(world: World, operator: Process) -> Json:
    """Wait until two passes over each resource have written nothing; the versions of all objects, and the MLflow runs."""
    uids = [item["metadata"]["uid"] for item in world.api.list("FineTuneJob", world.namespace)]

    def passes() -> tuple[float, float]:
        name = "finetune_operator_reconcile_seconds_count"
        jobs, promotions = (metric(operator, name, kind=kind) for kind in ("FineTuneJob", "ModelPromotion"))
        return jobs / len(uids), promotions

    def settled() -> Json | None:
        before, (jobs, promotions) = world.versions(), passes()
        wait_for("passes", lambda: passes() >= (jobs + 2, promotions + 2), 60, operator)
        return before if before == world.versions() else None

    versions = wait_for("nothing is written", settled, 60, operator)
    return {"versions": versions, "runs": {uid: world.mlflow.runs_of(uid) for uid in uids}}


def train(world: World, name: str) -> None:
    """Play the training of a job to its end."""
    world.run_pods(f"{name}-train-1", 2)
    world.mlflow.register(world.model, world.wait_phase(name, "Training")["mlflow"]["runId"])
    world.end_pods(f"{name}-train-1", [0, 0], [TRAINED, None])


def start_schedule(world: World) -> str:
    """Create a schedule whose start time of today has passed and is not handled, and return the name of its job."""
    start = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(minutes=10)
    template = {"spec": splits_given(checkpoint=None, register=None)["spec"]}
    spec = {"schedule": f"{start.minute} {start.hour} * * *", "suspend": True, "jobTemplate": template}
    meta = {"name": SCHEDULE, "namespace": world.namespace}
    kind = "FineTuneSchedule"
    world.api.create({"apiVersion": API_VERSION, "kind": kind, "metadata": meta, "spec": spec})
    missed = {"lastScheduleTime": format_time(start - timedelta(days=2))}
    world.api.patch(kind, world.namespace, SCHEDULE, {"status": missed}, status=True)
    world.api.patch(kind, world.namespace, SCHEDULE, {"spec": {"suspend": False}})
    return scheduled_job_name(SCHEDULE, start)


def start_work(world: World, registry: Registry) -> None:
    """Bring jobs into each phase, a job of a schedule and a trial of a sweep into training, and a promotion into its soak."""
    scheduled = start_schedule(world)
    world.submit(splits_given("sweep", sweep=SWEEP, checkpoint=None, register=None))
    registry.point("staging", registry.version(2.0))
    registry.apply(gates=GATES, soakSeconds=3600)
    world.submit(job("preparing", checkpoint=None))
    for name in ("training", "suspended", "blocked"):
        world.submit(splits_given(name, checkpoint=None))
    world.submit(splits_given("evaluating", evaluation={"metrics": ["Accuracy"]}))
    world.submit(splits_given("succeeded", checkpoint=None))
    world.run_pods("preparing-prep", 1)
    for name in ("training", "suspended", scheduled, "sweep-1"):
        world.run_pods(f"{name}-train-1", 2)
    for pod in world.wait_pods("blocked-train-1", 2):
        world.set_waiting(pod, "ImagePullBackOff", "no such image")
    for name in ("evaluating", "succeeded"):
        train(world, name)
    world.run_pods("evaluating-evaluate", 1)
    world.wait_phase("suspended", "Training")
    world.api.patch("FineTuneJob", world.namespace, "suspended", {"spec": {"suspend": True}})
    wait_for("the pods have stopped", lambda: not pods_of(world, "suspended"))
    phases = {
        "preparing": "Preparing",
        "training": "Training",
        scheduled: "Training",
        "sweep": "Training",
        "suspended": "Suspended",
        "blocked": "Starting",
        "evaluating": "Evaluating",
        "succeeded": "Succeeded",
    }
    for name, phase in phases.items():
        world.wait_phase(name, phase)
    world.wait_condition("blocked", "PodsHealthy", "ImagePullFailed")
    world.wait_condition("succeeded", "Tracked", "RunFinished")
    registry.wait("Soaking", None)


def pods_of(world: World, name: str) -> list[Json]:
    world.remaining_pods()
    return world.api.list("Pod", world.namespace, f"finetune.dev/job={name}")


def from_release(world: World, name: str, attempt: int) -> tuple[str, str, str]:
    """The versions that an attempt has its image, its variables and its checkpoints from."""
    [pod, _] = world.run_pods(f"{name}-train-{attempt}", 2)
    recipe = world.api.get("ConfigMap", world.namespace, f"{name}-train")
    assert recipe is not None
    checkpoint = yaml.safe_load(recipe["data"]["recipe.yaml"])["checkpoint"]
    [container] = pod["spec"]["containers"]
    environment = {item["name"]: item.get("value") for item in container["env"]}
    version = checkpoint["uri"].split("/")[1]
    assert checkpoint["everySteps"] == len(version)
    return container["image"].removeprefix("trainer:"), str(environment["RELEASE"]), version


def test_an_upgrade_and_a_rollback_change_nothing_until_the_next_attempt(releases: Releases) -> None:
    world = releases.world
    registry = Registry(world.api, world.mlflow, world.namespace, f"promoted-{world.namespace}")
    earlier = releases.take_over(EARLIER)
    start_work(world, registry)
    before = settle(world, earlier)

    later = releases.take_over(LATER)
    assert settle(world, later) == before
    world.end_pods("training-train-1", [1, 1], [error("Boom", "it blew up"), None])
    # The values that were resolved when the job was accepted stay for its life.
    assert from_release(world, "training", 2) == (LATER, LATER, EARLIER)
    world.wait_phase("training", "Training")
    before = settle(world, later)

    earlier = releases.take_over(EARLIER)
    assert settle(world, earlier) == before
    # The sweep goes on with its next trial, and the schedule starts no job again.
    world.end_pods("sweep-1-train-1", [0, 0], [TRAINED, None])
    assert from_release(world, "sweep-2", 1) == (EARLIER, EARLIER, EARLIER)
    assert len(world.api.list("FineTuneJob", world.namespace, f"finetune.dev/schedule={SCHEDULE}")) == 1
    world.end_pods("preparing-prep", [0], [PREPARED])
    world.api.patch("FineTuneJob", world.namespace, "suspended", {"spec": {"suspend": False}})
    assert from_release(world, "preparing", 1) == (EARLIER, EARLIER, EARLIER)
    assert from_release(world, "suspended", 2) == (EARLIER, EARLIER, EARLIER)


# Fields that the status of commit 4e7283c did not have.
NEWER_FIELDS = (
    "attempts",
    "noProgressSince",
    "phaseTime",
    "productiveSeconds",
    "reducedMemory",
    "waitingSeconds",
    "waitingSince",
)
NEWER_PARTS = {"jobs": ("trainAttempt",), "lastFailure": ("step",)}


def as_older(status: Json) -> Json:
    """A status without the newer fields."""
    older = {name: value for name, value in status.items() if name not in NEWER_FIELDS}
    for part, fields in NEWER_PARTS.items():
        if part in older:
            older[part] = {name: value for name, value in older[part].items() if name not in fields}
    return older


def list_newer_fields(status: Json) -> list[str]:
    """The newer fields that a status has."""
    parts = [
        f"{part}.{name}"
        for part, fields in NEWER_PARTS.items()
        for name in fields
        if name in status.get(part, {})
    ]
    return [*parts, *(name for name in NEWER_FIELDS if name in status)]


def without_newer_fields(status: Json) -> Json:
    """A merge patch that removes the newer fields from a status."""
    parts = {part: dict.fromkeys(fields) for part, fields in NEWER_PARTS.items() if part in status}
    return {"status": dict.fromkeys(NEWER_FIELDS) | parts}


def test_a_status_without_the_newer_fields_is_continued(own_world: OwnWorld) -> None:
    world, names = own_world, ("restarted", "suspended", "succeeded")
    for name in names:
        world.submit(splits_given(name))
    world.run_pods("restarted-train-1", 2)
    world.end_pods("restarted-train-1", [1, 1], [error("Boom", "it blew up"), None])
    world.run_pods("restarted-train-2", 2)
    world.wait_phase("restarted", "Training")
    world.run_pods("suspended-train-1", 2)
    world.wait_phase("suspended", "Training")
    world.api.patch("FineTuneJob", world.namespace, "suspended", {"spec": {"suspend": True}})
    train(world, "succeeded")
    world.wait_condition("succeeded", "Tracked", "RunFinished")
    wait_for("the pods have stopped", lambda: not pods_of(world, "suspended"))
    world.settle(world.operator)
    world.operator.kill()
    older = {}
    for name in names:
        status = world.status(name)
        world.api.patch("FineTuneJob", world.namespace, name, without_newer_fields(status), status=True)
        older[name] = world.status(name)
        assert older[name] == as_older(status)
        assert older[name] != status or name == "succeeded"
    children = {key: value for key, value in world.versions().items() if not key.startswith("FineTuneJob/")}

    world.operator.start()
    after = world.settle(world.operator)
    assert {key: value for key, value in after.items() if not key.startswith("FineTuneJob/")} == children
    statuses = {name: world.status(name) for name in names}
    assert {name: as_older(status) for name, status in statuses.items()} == older
    assert {name: list_newer_fields(status) for name, status in statuses.items()} == {
        "restarted": ["jobs.trainAttempt"],
        "suspended": ["waitingSince"],
        "succeeded": [],
    }
    world.api.patch("FineTuneJob", world.namespace, "suspended", {"spec": {"suspend": False}})
    world.end_pods("restarted-train-2", [EXIT_PREEMPTED, EXIT_PREEMPTED], [None, None])
    world.run_pods("suspended-train-2", 2)
    status = wait_for("the attempt is recorded", lambda: ended_twice(world.status("restarted")))
    assert [item["attempt"] for item in status["attempts"]] == [2]


def ended_twice(status: Json) -> Json | None:
    return status if status["attempt"] == 3 else None
