"""The operator ends before and after every write of a FineTuneJob; each story ends as the undisturbed one does."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from finetune_crds.contract import PrepResult, TerminationMessage, TrainResult
from finetune_crds.status import SplitCounts
from finetune_operator.batch.state import has_ended
from finetune_operator.controller.store import KINDS
from finetune_operator.finetunejob.decision import ActionResult, EnsureRun, SetAlias
from finetune_operator.finetunejob.external_actions import ExternalActions
from finetune_operator.finetunejob.observe.run_creator import RunCreator
from finetune_operator.kube import KubeError
from finetune_operator.mlflow.model import Run
from finetune_operator.mlflow.runs import Server
from finetune_operator.registry.base import RegisteredVersion
from finetune_operator.registry.mlflow import MlflowRegistry
from finetune_operator.registry.tracked import Tracked
from fixtures.operator_in_memory.decisions import NODES, SETTINGS, SOURCE, UID, child, ended, pod
from fixtures.operator_in_memory.parts import parts
from fixtures.operator_in_memory.promotions import ApiServer, KilledError, Writes

Json = dict[str, Any]
KEY = ("FineTuneJob", "team", "tune")
PREPARED = TerminationMessage(
    prep=PrepResult(rows=SplitCounts(train=9), tokens=SplitCounts(train=90), path="/data/splits", version=1)
)
TRAINED = TerminationMessage(train=TrainResult(step=10, eval_loss=2.0))


class Cluster(ApiServer):
    """An API server that sets the default of a Job's parallelism."""

    async def create(self, body: Json, *, dry_run: bool = False) -> Json:
        spec = {"parallelism": 1} | body["spec"] if body["kind"] == "Job" else None
        return await super().create({**body, "spec": spec} if spec else body, dry_run=dry_run)


class World:
    """An API server and an MLflow in memory, whose writes may be the operator's last, and the operator."""

    def __init__(self, writes: Writes) -> None:
        self.writes = writes
        self.kube = Cluster(writes)
        self.seconds = 0.0
        self.runs: list[Run] = []
        self.version: RegisteredVersion | None = None
        self.made: list[str] = []
        self.killed = False
        self.restart()

    def restart(self) -> None:
        """An operator that knows nothing but what is written down."""
        self.store, _, self.reconciler = parts(self.kube, SETTINGS, lambda: self.seconds, "operator")

    def edit(self, **spec: Any) -> None:
        resource = self.kube.objects.get(KEY) or {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "FineTuneJob",
            "metadata": {"name": "tune", "namespace": "team", "uid": UID, "generation": 1},
            "spec": {
                "model": {"base": "/m"},
                "data": SOURCE,
                "distributed": NODES,
                "register": {"model": "m"},
            },
        }
        self.kube.keep({**resource, "spec": {**resource["spec"], **spec}})

    async def settle(self) -> None:
        """Passes until none writes anything; an operator that was killed is started again."""
        for _ in range(40):
            before = self.writes.count
            try:
                await self._pass()
            except KilledError:
                self.killed = True
                self.restart()
                continue
            if self.writes.count == before:
                return
        raise AssertionError(f"it never comes to rest: {self.writes.log[-20:]}")

    async def _pass(self) -> None:
        self.seconds += SETTINGS.poll_seconds
        for kind in KINDS:
            bodies = [body for (stored_kind, _, _), body in self.kube.objects.items() if stored_kind == kind]
            self.store.replace(kind, bodies, self.kube.version)
        try:
            await self.reconciler.reconcile(self.store.finetunejobs["team", "tune"])
        except KubeError:
            self.writes.count += 1  # it is tried again

    # MLflow.

    def find_run(self, *_: object) -> Run | None:
        return self.runs[0] if self.runs else None

    def find_runs(self, *_: object) -> dict[str, Run]:
        return {run.run_id: run for run in self.runs}

    def find_version(self, *_: object) -> RegisteredVersion | None:
        return self.version

    async def create_run(self, _ftj: object, action: EnsureRun) -> ActionResult:
        with self.writes.one("create run"):
            if not self.runs:
                self.runs.append(Run("r1", "e1", "RUNNING"))
            return ActionResult(action, run=self.runs[0], server=SETTINGS.tracking_uri)

    def finish_run(self, run_id: str, status: str) -> None:
        with self.writes.one("finish run"):
            self.runs = [dataclasses.replace(run, status=status) for run in self.runs]

    async def set_alias(self, server: Tracked, action: SetAlias) -> None:
        with self.writes.one("set alias"):
            assert self.version is not None
            aliases = self.version.aliases | {action.alias}
            self.version = dataclasses.replace(self.version, aliases=frozenset(aliases))

    # The Job controller and the kubelets.

    def jobs(self) -> list[Json]:
        return [body for (kind, _, _), body in self.kube.objects.items() if kind == "Job"]

    def run_pods(self) -> None:
        for job in self.jobs():
            self._set_pods(
                job, [pod(job["metadata"]["name"], index, **known(job)) for index in range(size(job))]
            )

    def end_pods(self, code: int = 0) -> None:
        """Every Job at work ends, as its pods do."""
        for job in self.jobs():
            if has_ended(job):
                continue
            name, message = job["metadata"]["name"], TRAINED if size(job) > 1 else PREPARED
            container = "trainer" if size(job) > 1 else "prep"
            says = "" if code else message
            self._set_pods(
                job,
                [
                    ended(name, index, code, says, container=container, at=int(self.seconds), **known(job))
                    for index in range(size(job))
                ],
            )
            status = child(name, "Failed" if code else "Complete", "it ended")["status"]
            self.kube.keep({**job, "status": status})
            if size(job) > 1 and not code:
                self.version = self.version or RegisteredVersion("m", "1")

    def _set_pods(self, job: Json, pods: list[Json]) -> None:
        if not has_ended(job):
            for body in pods:
                self.kube.keep({**body, "kind": "Pod"})

    def collect_garbage(self) -> None:
        """Pods go with their Jobs."""
        simulation = {job["metadata"]["uid"] for job in self.jobs()}
        for key, body in list(self.kube.objects.items()):
            if key[0] == "Pod" and body["metadata"]["ownerReferences"][0]["uid"] not in simulation:
                del self.kube.objects[key]

    def outcome(self) -> object:
        """What counts in the end: what the job says, what exists, what was made, and MLflow."""
        status = self.kube.objects[KEY]["status"]
        conditions = {
            item["type"]: (item["status"], item["reason"], item["message"]) for item in status["conditions"]
        }
        numbers = {
            name: status.get(name) for name in ("phase", "attempt", "restarts", "data", "model", "nodes")
        }
        simulation = {
            f"{kind}/{name}": {part: body.get(part) for part in ("spec", "data")}
            for (kind, _, name), body in self.kube.objects.items()
            if kind != "Event"
        }
        return numbers, conditions, simulation, self.runs, self.version


def size(job: Json) -> int:
    return 1 if job["metadata"]["name"] == "tune-prep" else 2


def known(job: Json) -> Json:
    return {"owner": job["metadata"]["uid"], "component": job["metadata"]["labels"]["finetune.dev/component"]}


async def trained(world: World) -> None:
    """Prepared, trained, registered."""
    world.edit()
    await world.settle()
    for _ in ("preparation", "training"):
        world.run_pods()
        await world.settle()
        world.end_pods()
        await world.settle()


async def restarted(world: World) -> None:
    """The first attempt fails, and the second succeeds."""
    world.edit()
    await world.settle()
    world.end_pods()
    await world.settle()
    world.end_pods(1)
    await world.settle()
    world.run_pods()
    await world.settle()
    world.end_pods()
    await world.settle()


async def suspended(world: World) -> None:
    """Suspended in mid-training, and resumed."""
    world.edit()
    await world.settle()
    world.end_pods()
    await world.settle()
    world.run_pods()
    await world.settle()
    world.edit(suspend=True)
    await world.settle()
    world.collect_garbage()
    await world.settle()
    world.edit(suspend=False)
    await world.settle()
    world.end_pods()
    await world.settle()


async def failed_and_swept(world: World) -> None:
    """It fails for good, and its children are deleted a minute later."""
    world.edit(runPolicy={"ttlSecondsAfterFinished": 60})
    await world.settle()
    world.end_pods()
    await world.settle()
    world.end_pods(64)
    await world.settle()
    world.seconds += 60
    await world.settle()
    world.collect_garbage()
    await world.settle()


STORIES: dict[str, Callable[[World], Awaitable[None]]] = {
    "trained": trained,
    "restarted": restarted,
    "suspended": suspended,
    "failed and swept": failed_and_swept,
}
ENDS = {
    "trained": "Succeeded",
    "restarted": "Succeeded",
    "suspended": "Succeeded",
    "failed and swept": "Failed",
}


@pytest.mark.parametrize("name", STORIES)
async def test_the_operator_may_end_at_every_write(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def told(*, before: int | None = None, after: int | None = None) -> World:
        simulation = World(Writes(kill_before=before, kill_after=after))
        monkeypatch.setattr(Server, "find_run", simulation.find_run)
        monkeypatch.setattr(Server, "find_runs", simulation.find_runs)
        monkeypatch.setattr(MlflowRegistry, "find_version", simulation.find_version)
        monkeypatch.setattr(RunCreator, "create", simulation.create_run)
        monkeypatch.setattr(Server, "finish_run", simulation.finish_run)
        monkeypatch.setattr(ExternalActions, "_set_alias", simulation.set_alias)
        await STORIES[name](simulation)
        return simulation

    undisturbed = await told()
    expected, writes = undisturbed.outcome(), undisturbed.writes.count
    assert undisturbed.kube.objects[KEY]["status"]["phase"] == ENDS[name]
    for number in range(1, writes + 1):
        for point in ("before", "after"):
            simulation = await told(**{point: number})
            where = f"{point} write {number} of {writes}: {simulation.writes.log}"
            assert simulation.killed, where
            assert simulation.outcome() == expected, where
