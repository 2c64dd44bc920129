"""What exists of a job: the store first, the API server and MLflow where it does not suffice."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest

from finetune_crds.base import API_VERSION
from finetune_crds.evaluation import EvaluationStatus
from finetune_crds.status import FineTuneJobStatus
from finetune_operator.controller.store import Store
from finetune_operator.defaults import Defaults
from finetune_operator.finetunejob.children import recorded_jobs
from finetune_operator.finetunejob.model import ResumedJob
from finetune_operator.finetunejob.observe.observer import FineTuneJobObserver, read_finetunejob
from finetune_operator.kube import KubeError
from finetune_operator.owners import Owner, find_owner
from finetune_operator.settings import Settings
from fixtures.fake_kube import StandIn
from fixtures.operator_in_memory.decisions import (
    FAILED,
    NO_MLFLOW,
    PREPARED,
    SOURCE,
    SUCCEEDED,
    TRAINED,
    UID,
    child,
    controller,
    ended,
    ftj,
    later,
    lost,
    pod,
    running,
    status,
)
from fixtures.operator_in_memory.reads import wait_for_answers

Json = dict[str, Any]
JOB = "tune-train-1"


@dataclass
class World:
    """An observer, what it stands on, and a clock that the test moves."""

    kube: StandIn = field(default_factory=StandIn)
    store: Store = field(default_factory=lambda: Store(find_owner, recorded_jobs))
    settings: Settings = NO_MLFLOW
    clock: float = 0.0
    woken: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.observer = FineTuneJobObserver(
            self.kube, self.store, self.settings, wait_for_answers(lambda: self.clock, self._wake)
        )

    def _wake(self, key: str, *, is_routine: bool) -> None:
        self.woken.append(key)

    def know(self, kind: str, body: Json, version: int = 1) -> None:
        meta: Json = {
            "namespace": "team",
            "resourceVersion": str(version),
            "creationTimestamp": "2026-08-01T12:00:00Z",
        }
        meta = meta | body["metadata"]
        self.store.put(kind, {"spec": {"parallelism": 2}, **body, "kind": kind, "metadata": meta})

    def exists(self, kind: str, body: Json) -> None:
        self.kube.keep({**body, "kind": kind})


READ: dict[str, tuple[Json, tuple[str | None, str | None]]] = {
    "a spec": (
        {"spec": {"model": {"base": "/m"}, "data": {"columns": {"type": "Text", "text": "t"}}}},
        ("/m", None),
    ),
    "a part missing": (
        {"spec": {"model": {}}},
        (None, "spec.model.base: Field required"),
    ),
    "neither model nor data": ({"spec": {"trainer": {"command": ["python", "t.py"]}}}, (None, None)),
}


@pytest.mark.parametrize(("body", "expected"), READ.values(), ids=READ)
def test_read_job(body: Json, expected: tuple[str | None, str | None]) -> None:
    meta = {"name": "tune", "namespace": "team", "uid": "u", "resourceVersion": "7", "generation": 3}
    job = read_finetunejob({"metadata": meta, **body}, Defaults())
    base = job.spec.model.base if job.spec and job.spec.model else None
    assert (base, job.invalid) == expected
    assert (job.key, job.uid, job.version, job.generation) == ("team/tune", "u", "7", 3)


async def test_children_come_from_the_store_without_a_call() -> None:
    world = World()
    world.know("Job", child(JOB))
    world.know("Pod", pod(JOB, 0))
    world.know("Pod", pod(JOB, 1))
    observation = await world.observer.observe(ftj(running()), later(60))
    assert set(observation.jobs) == {JOB}
    assert [item["metadata"]["name"] for item in observation.pods] == [
        "tune-train-1-0-abcde",
        "tune-train-1-1-abcde",
    ]
    assert (observation.mlflow, observation.rejections, world.kube.asked) == (None, {}, [])


UNREAD: dict[str, tuple[FineTuneJobStatus, str]] = {
    "of an attempt": (running(), JOB),
    "of an evaluation": (status(PREPARED, TRAINED, attempt=1), "tune-evaluate"),
}


@pytest.mark.parametrize(("before", "name"), UNREAD.values(), ids=UNREAD)
async def test_the_end_of_a_child_is_judged_by_its_pods_as_they_are(
    before: FineTuneJobStatus, name: str
) -> None:
    world = World()
    world.know("Job", child(name, "Failed"))
    world.know("Pod", pod(name, 0))
    world.exists("Pod", ended(name, 0, 64))
    observation = await world.observer.observe(ftj(before), later(60))
    assert [item["status"]["phase"] for item in observation.pods] == ["Failed"]
    assert world.kube.asked == [("list", "Pod", f"batch.kubernetes.io/controller-uid=uid-of-{name}")]


READ_ALREADY: dict[str, tuple[FineTuneJobStatus, str]] = {
    "of an attempt that was trained": (status(PREPARED, TRAINED, attempt=1), JOB),
    "of an earlier attempt": (running(attempt=2), JOB),
    "of a preparation": (running(), "tune-prep"),
    "of an evaluation": (
        status(TRAINED, attempt=1, evaluation=EvaluationStatus(digest="d1")),
        "tune-evaluate",
    ),
    "of a job that has failed": (status(FAILED, attempt=1), JOB),
    "of a job that has succeeded": (status(SUCCEEDED, attempt=1), JOB),
}


@pytest.mark.parametrize(("before", "name"), READ_ALREADY.values(), ids=READ_ALREADY)
async def test_an_end_that_was_judged_is_not_asked_for_again(before: FineTuneJobStatus, name: str) -> None:
    world = World()
    world.know("Job", child(name, "Complete"))
    await world.observer.observe(ftj(before), later(60))
    assert world.kube.asked == []


async def test_the_job_that_is_carried_on_is_read_with_its_pods() -> None:
    world = World()
    ours = ftj(status(), checkpoint={"uri": "/c", "resumeFrom": {"type": "Job", "name": "first"}})
    observation = await world.observer.observe(ours, later(60))
    assert (observation.resumed, world.kube.asked) == (ResumedJob(), [("get", "FineTuneJob", "first")])

    owner = controller(API_VERSION, "FineTuneJob", "uid-of-first")
    meta = {"name": "first", "namespace": "team", "uid": "uid-of-first", "resourceVersion": "7"}
    body: Json = {"model": {"base": "/m"}, "data": {}, "checkpoint": {"uri": "/c"}}
    world.exists("FineTuneJob", {"metadata": meta, "spec": body})
    world.know("Job", child("first-train-1", ownerReferences=[owner]))
    world.know("Pod", pod("first-train-1", 0))
    world.know("Pod", pod("first-train-1", 1, "Failed"))
    world.know("Pod", lost(pod("first-train-1", 2)))
    resumed = (await world.observer.observe(ours, later(60))).resumed
    assert resumed
    assert resumed.job
    assert (resumed.job.key, resumed.pods) == ("team/first", 1)
    assert resumed.job.spec
    assert resumed.job.spec.checkpoint


async def test_pods_count_as_checked_once_this_process_has_made_their_dry_runs() -> None:
    world, job = World(), ftj()
    assert not (await world.observer.observe(job, later(0))).has_checked_pods
    await world.observer.dry_runner.run(job, [])
    assert (await world.observer.observe(job, later(0))).has_checked_pods


async def test_nothing_is_kept_of_a_job_that_was_deleted() -> None:
    world = World()
    body: Json = {"kind": "Pod", "metadata": {"name": "p", "namespace": "team"}}
    world.kube.refuse["rehearse", "Pod"] = KubeError(403, "a policy")
    for again in (1.0, 2.0):
        assert (await world.observer.dry_runner.run(ftj(), [body])).retry_seconds == again
        world.clock += again
    world.observer.forget(ftj())
    assert (await world.observer.dry_runner.run(ftj(), [body])).retry_seconds == 1


# Of the trial: the uid of its sweep, and whether its preparation has begun; the name of the trial whose table it can use.
TRIALS: dict[str, tuple[str | None, bool, str | None]] = {
    "about to prepare": ("uid-of-sweep", False, "sweep-1"),
    "prepares already": ("uid-of-sweep", True, None),
    "of another sweep": ("uid-of-another", False, None),
    "no trial": (None, False, None),
}


@pytest.mark.parametrize(("sweep", "has_begun", "expected"), TRIALS.values(), ids=TRIALS)
async def test_a_trial_sees_the_table_of_its_sweep(
    sweep: str | None, has_begun: bool, expected: str | None
) -> None:
    def trial(name: str, uid: str, owner: str | None) -> Json:
        owners = [controller(API_VERSION, "FineTuneJob", owner)] if owner else []
        return {"metadata": {"name": name, "uid": uid, "ownerReferences": owners}, "spec": {"data": {}}}

    world = World()
    prepared = {"type": "Prepared", "status": "True", "lastTransitionTime": "2026-08-01T12:00:00Z"}
    first = trial("sweep-1", "uid-of-first", "uid-of-sweep")
    world.know("FineTuneJob", first | {"status": {"conditions": [prepared], "data": {"path": "/splits"}}})
    world.know("FineTuneJob", trial("tune", UID, sweep))
    if has_begun:
        world.know("Job", child("tune-prep"))
    finetunejob = dataclasses.replace(ftj(data=SOURCE), sweep=Owner("team", sweep) if sweep else None)
    observed = await world.observer.observe(finetunejob, later(0))
    body = observed.prepared_trial
    assert (body and body["metadata"]["name"]) == expected
