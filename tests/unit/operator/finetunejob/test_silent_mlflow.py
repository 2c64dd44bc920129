"""A server that takes requests and never answers delays no restart, whether the operator reads from it or writes to it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from finetune_crds.status import FineTuneJobStatus, MlflowStatus
from finetune_crds.status_parts import DatabricksRunStatus
from finetune_operator import names
from finetune_operator.controller.workqueue import work
from finetune_operator.databricks import workspace
from finetune_operator.finetunejob.abandoned_runs import close_run_of_deleted
from finetune_operator.finetunejob.observe import databricks_preparations
from finetune_operator.finetunejob.observe.background_reads import ReadPace
from finetune_operator.mlflow.model import Run
from finetune_operator.mlflow.runs import Server
from finetune_operator.registry.base import ModelVersion, RegisteredModel, RegisteredVersion
from finetune_operator.registry.mlflow import MlflowRegistry
from fixtures.fake_kube import StandIn
from fixtures.operator_in_memory.decisions import (
    ACCEPTED,
    ADMITTED,
    FAILED,
    NOW,
    PREPARED,
    SETTINGS,
    SPLITS,
    TRAINED,
    UID,
    child,
    ended,
    ftj,
    running,
    status,
)
from fixtures.operator_in_memory.parts import parts

Json = dict[str, Any]
JOBS = 40
# NB: on two cores that do nothing else, all jobs restart in 0.8 s, and one job beside writes in 0.4 s. The server never answers, so a pass
# that waits for it takes 60 s.
RESTARTED_SECONDS = 10.0
PATIENCE_SECONDS = 60.0
THREADS_PER_WORKER = 3
DATABRICKS_DATA: Json = {
    "source": {"type": "Delta", "table": "main.llm.chats"},
    "prepare": {
        "output": "s3://lake/splits",
        "spark": {
            "mode": "Databricks",
            "databricks": {"volume": "/Volumes/main/llm/work", "secretRef": {"name": "databricks"}},
        },
    },
}
SPEC: Json = {"model": {"base": "/m"}, "data": SPLITS, "distributed": {"nodes": 2}}


@dataclass
class SilentMlflow:
    """Holds every request until the test ends.

    Attributes:
        uids: of the jobs that it was asked about.
        run_ids: of the runs that it was asked to close.
        requests: is released by each call of `hold`.
        closings: is released by each request to close a run.
    """

    uids: list[str] = field(default_factory=list)
    run_ids: list[str] = field(default_factory=list)
    requests: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    closings: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    is_over: threading.Event = field(default_factory=threading.Event)

    def find_run(self, uid: str, *_: object) -> None:
        self.uids.append(uid)
        self.is_over.wait(PATIENCE_SECONDS)

    def find_runs(self, experiments: Mapping[str, str]) -> dict[str, Run]:
        self.uids += experiments
        self.is_over.wait(PATIENCE_SECONDS)
        return {}

    def hold(self) -> None:
        self.requests.release()
        self.is_over.wait(PATIENCE_SECONDS)

    def finish_run(self, run_id: str, *_: object) -> None:
        self.run_ids.append(run_id)
        self.closings.release()
        self.is_over.wait(PATIENCE_SECONDS)


class Restarts(StandIn):
    """Tells when this many jobs have their second attempt."""

    def __init__(self, *objects: Json, restarts: int = JOBS) -> None:
        super().__init__(*objects)
        self.restarts = restarts
        self.second_attempts: set[str] = set()
        self.have_all_restarted = asyncio.Event()

    async def create(self, body: Json, *, dry_run: bool = False) -> Json:
        created = await super().create(body, dry_run=dry_run)
        if created["metadata"]["name"].endswith("-train-2") and not dry_run:
            self.second_attempts.add(created["metadata"]["name"])
        if len(self.second_attempts) == self.restarts:
            self.have_all_restarted.set()
        return created


def of_job(number: int, body: Json) -> Json:
    """A body of the helpers, whose job is called tune, as that of another job."""
    text = json.dumps(body).replace(UID, f"uid-{number}").replace('"tune', f'"tune-{number}')
    return dict(json.loads(text.replace("uid-of-tune", f"uid-of-tune-{number}")))


def failed_job(number: int) -> list[Json]:
    """A FineTuneJob whose first attempt has just failed, with the Job and the pods of it."""
    before = running(mlflow=MlflowStatus(experiment_id="e1", run_id="r1"))
    name = "tune-train-1"
    bodies = [
        {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "FineTuneJob",
            "metadata": {"name": "tune", "namespace": "team", "uid": UID, "generation": 1},
            "spec": SPEC,
            "status": before.model_dump(mode="json", by_alias=True, exclude_none=True),
        },
        {"kind": "Job", **child(name, "Failed")},
        *({"kind": "Pod", **ended(name, index, 1)} for index in range(2)),
    ]
    return [of_job(number, body) for body in bodies]


async def test_every_job_starts_its_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = SilentMlflow()
    monkeypatch.setattr(Server, "find_run", lambda _server, *question: mlflow.find_run(*question))
    monkeypatch.setattr(Server, "find_runs", lambda _server, experiments: mlflow.find_runs(experiments))
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2 * SETTINGS.workers))
    kube = Restarts(*(body for number in range(JOBS) for body in failed_job(number)))
    store, queue, reconciler = parts(kube, SETTINGS, time.monotonic, make_pace=partial(ReadPace.of, SETTINGS))
    for kind in ("Job", "Pod", "FineTuneJob"):
        bodies = [body for (held, _, _), body in kube.objects.items() if held == kind]
        store.replace(kind, bodies, kube.version)
    for number in range(JOBS):
        queue.add(f"team/tune-{number}")

    workers = [asyncio.create_task(work(queue, reconciler.handle)) for _ in range(SETTINGS.workers)]
    try:
        await asyncio.wait_for(kube.have_all_restarted.wait(), RESTARTED_SECONDS)
    finally:
        mlflow.is_over.set()
        for worker in workers:
            worker.cancel()
    assert kube.second_attempts == {f"tune-{number}-train-2" for number in range(JOBS)}
    assert mlflow.uids


def other_job(status: FineTuneJobStatus, **parts: Any) -> Json:
    """A FineTuneJob without pods."""
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {
            "name": "tune",
            "namespace": "team",
            "uid": UID,
            "generation": 1,
            "finalizers": parts.pop("finalizers", []),
        },
        "spec": SPEC | parts,
        "status": status.model_dump(mode="json", by_alias=True, exclude_none=True),
    }


RUN = MlflowStatus(experiment_id="e1", run_id="r1")
WRITES: dict[str, tuple[Json, object, str]] = {
    "the end of a run": (other_job(status(FAILED, mlflow=RUN)), Server, "finish_run"),
    "an alias": (
        other_job(
            status(ACCEPTED, PREPARED, TRAINED, attempt=1, start_time=NOW, mlflow=RUN),
            register={"model": "m", "aliases": ["candidate"]},
        ),
        MlflowRegistry,
        "set_alias",
    ),
    "a Databricks run": (
        other_job(
            status(
                ACCEPTED,
                ADMITTED,
                mlflow=RUN,
                databricks_run=DatabricksRunStatus(attempt=1, failures=0, state="Submitting"),
            ),
            data=DATABRICKS_DATA,
            finalizers=[names.RUN_FINALIZER],
        ),
        databricks_preparations,
        "_submit",
    ),
}
OPEN_RUN = Run("r1", "e1", "RUNNING")


@pytest.mark.parametrize(("waiting_job", "owner", "write"), WRITES.values(), ids=WRITES)
async def test_a_write_that_gets_no_response_delays_no_restart(
    monkeypatch: pytest.MonkeyPatch, waiting_job: Json, owner: object, write: str
) -> None:
    mlflow = SilentMlflow()
    monkeypatch.setattr(Server, "find_run", lambda *_: OPEN_RUN)
    monkeypatch.setattr(
        Server, "find_runs", lambda _server, experiments: dict.fromkeys(experiments, OPEN_RUN)
    )
    monkeypatch.setattr(MlflowRegistry, "find_version", lambda *_: RegisteredVersion("m", "1"))
    monkeypatch.setattr(MlflowRegistry, "model", lambda *_: RegisteredModel("m", {}))
    monkeypatch.setattr(
        MlflowRegistry, "version", lambda *_: ModelVersion("1", ready=True, run_id="r1", tags={}, metrics={})
    )
    monkeypatch.setattr(workspace, "open_workspace", lambda *_: None)
    monkeypatch.setattr(owner, write, lambda *_: mlflow.hold())
    settings = dataclasses.replace(SETTINGS, prep_wheels="/wheels")
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS_PER_WORKER * settings.workers))
    kube = Restarts(*failed_job(JOBS), *(of_job(number, waiting_job) for number in range(JOBS)), restarts=1)
    kube.keep({"kind": "Secret", "metadata": {"name": "databricks"}, "data": {}})
    store, queue, reconciler = parts(kube, settings, time.monotonic, make_pace=partial(ReadPace.of, settings))
    for kind in ("Job", "Pod", "FineTuneJob"):
        bodies = [body for (held, _, _), body in kube.objects.items() if held == kind]
        store.replace(kind, bodies, kube.version)
    for number in range(JOBS):
        queue.add(f"team/tune-{number}")
    workers = [asyncio.create_task(work(queue, reconciler.handle)) for _ in range(settings.workers)]
    try:
        # The first writes have been sent. Now a pod of another job fails.
        assert await asyncio.to_thread(mlflow.requests.acquire, timeout=RESTARTED_SECONDS)
        queue.add(f"team/tune-{JOBS}")
        await asyncio.wait_for(kube.have_all_restarted.wait(), RESTARTED_SECONDS)
    finally:
        mlflow.is_over.set()
        for worker in workers:
            worker.cancel()
    assert kube.second_attempts == {f"tune-{JOBS}-train-2"}


async def test_runs_of_deleted_jobs_are_closed_in_turns_and_leave_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mlflow = SilentMlflow()
    monkeypatch.setattr(Server, "finish_run", lambda _server, *question: mlflow.finish_run(*question))
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2 * SETTINGS.workers))
    reconciler = parts(
        Restarts(), SETTINGS, time.monotonic, make_pace=partial(ReadPace.of, SETTINGS)
    ).reconciler
    before = running(mlflow=MlflowStatus(experiment_id="e1", run_id="r1"))
    deletions = [
        asyncio.create_task(close_run_of_deleted(reconciler.observer, ftj(status=before)))
        for _ in range(JOBS)
    ]
    try:
        for _ in range(SETTINGS.workers // 2):
            assert await asyncio.to_thread(mlflow.closings.acquire, timeout=RESTARTED_SECONDS)
        # A thread is free, and no other run is being closed.
        assert not await asyncio.wait_for(
            asyncio.to_thread(mlflow.closings.acquire, timeout=0.1), RESTARTED_SECONDS
        )
    finally:
        mlflow.is_over.set()
    await asyncio.gather(*deletions)
    assert mlflow.run_ids == ["r1"] * JOBS
