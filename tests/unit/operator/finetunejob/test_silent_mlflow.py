"""An MLflow server that takes requests and never answers delays no restart."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from finetune_crds.status import MlflowStatus
from finetune_operator.__main__ import _close_run_of_deleted
from finetune_operator.controller.workqueue import work
from finetune_operator.finetunejob.observe.background_reads import ReadPace
from finetune_operator.mlflow.model import Run
from finetune_operator.mlflow.runs import Server
from fixtures.fake_kube import StandIn
from fixtures.operator_in_memory.decisions import SETTINGS, SPLITS, UID, child, ended, ftj, running
from fixtures.operator_in_memory.parts import parts

Json = dict[str, Any]
JOBS = 40
# NB: it takes 0.8 s on two cores that do nothing else. The server never answers, so reads that a pass waits for take 60 s.
RESTARTED_SECONDS = 10.0
PATIENCE_SECONDS = 60.0
SPEC: Json = {"model": {"base": "/m"}, "data": SPLITS, "distributed": {"nodes": 2}}


@dataclass
class SilentMlflow:
    """Holds every request until the test ends.

    Attributes:
        uids: of the jobs that it was asked about.
        run_ids: of the runs that it was asked to close.
        closings: is released by each request to close a run.
    """

    uids: list[str] = field(default_factory=list)
    run_ids: list[str] = field(default_factory=list)
    closings: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    is_over: threading.Event = field(default_factory=threading.Event)

    def find_run(self, uid: str, *_: object) -> None:
        self.uids.append(uid)
        self.is_over.wait(PATIENCE_SECONDS)

    def find_runs(self, experiments: Mapping[str, str]) -> dict[str, Run]:
        self.uids += experiments
        self.is_over.wait(PATIENCE_SECONDS)
        return {}

    def finish_run(self, run_id: str, *_: object) -> None:
        self.run_ids.append(run_id)
        self.closings.release()
        self.is_over.wait(PATIENCE_SECONDS)


class Restarts(StandIn):
    """Tells when every job has its second attempt."""

    def __init__(self, *objects: Json) -> None:
        super().__init__(*objects)
        self.second_attempts: set[str] = set()
        self.have_all_restarted = asyncio.Event()

    async def create(self, body: Json, *, dry_run: bool = False) -> Json:
        created = await super().create(body, dry_run=dry_run)
        if created["metadata"]["name"].endswith("-train-2") and not dry_run:
            self.second_attempts.add(created["metadata"]["name"])
        if len(self.second_attempts) == JOBS:
            self.have_all_restarted.set()
        return created


def of_job(number: int, body: Json) -> Json:
    """A body of the helpers, whose job is called tune, as that of another job."""
    text = json.dumps(body).replace(UID, f"uid-{number}").replace('"tune', f'"tune-{number}')
    return dict(json.loads(text.replace("uid-of-tune", f"uid-of-tune-{number}")))


def failed_job(number: int) -> list[Json]:
    """A FineTuneJob whose first attempt has just failed, with the Job and the pods of it."""
    status = running(mlflow=MlflowStatus(experiment_id="e1", run_id="r1")).model_dump(
        mode="json", by_alias=True, exclude_none=True
    )
    name = "tune-train-1"
    bodies = [
        {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "FineTuneJob",
            "metadata": {"name": "tune", "namespace": "team", "uid": UID, "generation": 1},
            "spec": SPEC,
            "status": status,
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


async def test_runs_of_deleted_jobs_are_closed_in_turns_and_leave_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mlflow = SilentMlflow()
    monkeypatch.setattr(Server, "finish_run", lambda _server, *question: mlflow.finish_run(*question))
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2 * SETTINGS.workers))
    reconciler = parts(
        Restarts(), SETTINGS, time.monotonic, make_pace=partial(ReadPace.of, SETTINGS)
    ).reconciler
    status = running(mlflow=MlflowStatus(experiment_id="e1", run_id="r1"))
    deletions = [
        asyncio.create_task(_close_run_of_deleted(reconciler.observer, ftj(status=status)))
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
