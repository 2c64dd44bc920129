"""Passes over a job whose preparation is a Databricks run, with a workspace that answers over HTTP."""

from __future__ import annotations

import asyncio
import base64
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from databricks.sdk.service.jobs import TerminationCodeCode

from finetune_crds.contract import PrepResult, RunReport, TerminationMessage
from finetune_crds.status import SplitCounts
from finetune_operator import names
from finetune_operator.finetunejob.observe import databricks_preparations
from finetune_operator.kube import KubeError
from finetune_operator.settings import Settings
from fixtures.fake_databricks import Workspace
from fixtures.fake_kube import StandIn
from fixtures.operator_in_memory.decisions import UID
from fixtures.operator_in_memory.parts import parts

Json = dict[str, Any]
VOLUME = "/Volumes/main/llm/work"
RESULT = PrepResult(
    rows=SplitCounts(train=9), tokens=SplitCounts(train=90), path="s3://lake/splits", version=4
)
DONE = RunReport(exit_code=0, message=TerminationMessage(prep=RESULT))
TIMEOUT_SECONDS = 20.0
CANCELED = TerminationCodeCode.USER_CANCELED


def submitted() -> Json:
    databricks_fields = {
        "volume": VOLUME,
        "compute": {"type": "Serverless"},
        "secretRef": {"name": "databricks"},
    }
    prepare = {"output": "s3://lake/splits", "spark": {"mode": "Databricks", "databricks": databricks_fields}}
    data = {"source": {"type": "Delta", "table": "main.llm.chats"}, "prepare": prepare}
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": "tune", "namespace": "team", "uid": UID, "generation": 1},
        "spec": {"model": {"base": "org/model"}, "data": data},
    }


@dataclass
class World:
    """The operator's parts for one job, between a stand-in for the API server and a workspace."""

    workspace: Workspace
    settings: Settings
    kube: StandIn = field(default_factory=lambda: StandIn(submitted()))
    seconds: float = 0.0

    def __post_init__(self) -> None:
        data = {
            key: base64.b64encode(value.encode()).decode() for key, value in self.workspace.secret.items()
        }
        self.kube.keep({"kind": "Secret", "metadata": {"name": "databricks"}, "data": data})
        self.restart()

    def restart(self) -> None:
        """An operator that knows nothing yet."""
        self.store, self.queue, self.reconciler = parts(self.kube, self.settings, lambda: self.seconds)

    async def look(self, times: int = 1) -> None:
        """So many passes, with a poll interval between them."""
        for _ in range(times):
            self.seconds += 10
            resource = self.kube.objects.get(("FineTuneJob", "team", "tune"))
            self.store.replace("FineTuneJob", [resource] if resource else [], self.kube.version)
            await self.reconciler.handle("team/tune")

    @property
    def job(self) -> Json | None:
        return self.kube.objects.get(("FineTuneJob", "team", "tune"))

    @property
    def run(self) -> Json:
        assert self.job
        return dict(self.job["status"]["databricksRun"])

    def reason(self) -> str:
        assert self.job
        reasons = {item["type"]: item["reason"] for item in self.job["status"]["conditions"]}
        return str(reasons.get("Prepared"))

    @property
    def finalizers(self) -> list[str]:
        assert self.job
        return list(self.job["metadata"].get("finalizers") or [])

    def change(self, spec: Json | None = None, **meta: Any) -> None:
        """What a person does to the job."""
        assert self.job
        self.kube.keep(
            {**self.job, "spec": self.job["spec"] | (spec or {}), "metadata": self.job["metadata"] | meta}
        )


@pytest.fixture
def world(databricks: Workspace, tmp_path: Path) -> World:
    databricks.files.volumes.add(VOLUME)
    databricks.jobs.runs_wheels = False
    (tmp_path / "finetune_prep-1-py3-none-any.whl").write_bytes(b"wheel")
    return World(databricks, Settings(prep_wheels=str(tmp_path)))


async def test_from_the_first_pass_to_training(world: World) -> None:
    await world.look()
    assert (world.run, world.finalizers, world.workspace.jobs.held) == (
        {"attempt": 1, "failures": 0, "state": "Submitting"},
        [names.RUN_FINALIZER],
        {},
    )
    await world.look()
    (run,) = world.workspace.jobs.held.values()
    assert (world.run["runId"], world.run["state"]) == (str(run.run_id), "Pending")
    await world.look()
    world.workspace.files.write(
        f"{VOLUME}/jobs/team-tune-{UID[:8]}/1/report.json", DONE.model_dump_json().encode()
    )
    world.workspace.jobs.end(run.run_id, TerminationCodeCode.SUCCESS)
    await world.look()
    assert world.job
    assert world.job["status"]["data"]["version"] == 4
    assert ("Job", "team", "tune-train-1") in world.kube.objects
    assert world.finalizers == []


async def test_a_crash_after_the_submission_gives_no_second_run(world: World) -> None:
    await world.look()
    world.kube.refuse["status", "FineTuneJob"] = KubeError(409, "modified meanwhile", "Conflict")
    await world.look()
    assert "runId" not in world.run
    del world.kube.refuse["status", "FineTuneJob"]
    world.restart()
    await world.look()
    (run,) = world.workspace.jobs.held.values()
    assert world.run["runId"] == str(run.run_id)


async def test_a_job_that_is_deleted_during_a_slow_submission_waits_and_cancels_the_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_submit, submit = threading.Event(), databricks_preparations._submit

    def submit_slowly(*arguments: Any) -> str:
        may_submit.wait(TIMEOUT_SECONDS)
        return submit(*arguments)

    monkeypatch.setattr(databricks_preparations, "_submit", submit_slowly)
    world.reconciler.observer.pace.patience_seconds = 0.01
    await world.look(2)
    assert world.run == {"attempt": 1, "failures": 0, "state": "Submitting"}
    world.change(deletionTimestamp="2026-08-01T12:00:00Z")
    await world.look()
    world.queue.drop("team/tune")
    await world.look()
    # No pass follows at once: it would decide the same.
    assert (world.run["state"], world.finalizers, world.queue._due) == (
        "Submitting",
        [names.RUN_FINALIZER],
        {"team/tune": (world.seconds + 1.0, False)},
    )
    may_submit.set()
    assert await asyncio.wait_for(world.queue.take(), TIMEOUT_SECONDS) == "team/tune"
    world.queue.done("team/tune")
    world.reconciler.observer.pace.patience_seconds = 60.0
    await world.look()
    (run,) = world.workspace.jobs.held.values()
    assert (run.life.value, world.run["state"], world.run["runId"]) == (
        "TERMINATING",
        "Canceling",
        str(run.run_id),
    )


async def test_a_run_that_the_status_does_not_know_is_canceled_with_its_job(world: World) -> None:
    await world.look()
    world.kube.refuse["status", "FineTuneJob"] = KubeError(409, "modified meanwhile", "Conflict")
    await world.look()
    del world.kube.refuse["status", "FineTuneJob"]
    world.restart()
    world.change(deletionTimestamp="2026-08-01T12:00:00Z")
    await world.look()
    (run,) = world.workspace.jobs.held.values()
    assert (run.life.value, world.run["state"], world.run["runId"]) == (
        "TERMINATING",
        "Canceling",
        str(run.run_id),
    )
    world.workspace.jobs.end(run.run_id, CANCELED)
    await world.look()
    assert world.job is None


async def test_suspended_and_resumed(world: World) -> None:
    await world.look(3)
    (run,) = world.workspace.jobs.held.values()
    world.change({"suspend": True})
    await world.look(3)
    posts = [path for method, path in world.workspace.asked if method == "POST" and path.endswith("/cancel")]
    assert (run.life.value, len(posts), world.run["state"], world.finalizers) == (
        "TERMINATING",
        1,
        "Canceling",
        [names.RUN_FINALIZER],
    )
    world.workspace.jobs.end(run.run_id, CANCELED)
    await world.look()
    assert (world.run["state"], world.finalizers) == ("Canceled", [])
    world.change({"suspend": False})
    await world.look(2)
    assert (world.run["attempt"], len(world.workspace.jobs.held), world.finalizers) == (
        2,
        2,
        [names.RUN_FINALIZER],
    )


async def test_a_workspace_that_is_away_is_asked_again(world: World) -> None:
    await world.look()
    world.workspace.tokens.clear()
    await world.look()
    assert (world.reason(), world.run["state"]) == ("DatabricksForbidden", "Submitting")
    world.workspace.tokens.add("dapi-good")
    await world.look(2)
    assert (world.reason(), world.run["state"]) == ("Preparing", "Pending")


async def test_a_job_whose_login_never_worked_can_be_deleted(world: World) -> None:
    await world.look()
    del world.kube.objects["Secret", "team", "databricks"]
    await world.look()
    assert world.reason() == "CredentialsMissing"
    world.change(deletionTimestamp="2026-08-01T12:00:00Z")
    await world.look()
    assert world.job is None


async def test_a_job_that_is_deleted_while_the_workspace_is_away_waits(world: World) -> None:
    await world.look(3)
    (run,) = world.workspace.jobs.held.values()
    world.workspace.denied.add("POST /api/2.2/jobs/runs/cancel")
    world.change(deletionTimestamp="2026-08-01T12:00:00Z")
    await world.look(2)
    assert (world.reason(), world.finalizers) == ("DatabricksForbidden", [names.RUN_FINALIZER])
    world.workspace.denied.clear()
    await world.look(2)
    world.workspace.jobs.end(run.run_id, CANCELED)
    await world.look()
    assert world.job is None
