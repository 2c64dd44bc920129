"""The operator ends before and after every write of a sweep; the trials are those of an undisturbed one, in the same order."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.controller.store import KINDS
from finetune_operator.finetunejob import reconcile
from finetune_operator.finetunejob.decision import ActionResult, EnsureRun
from finetune_operator.finetunejob.model import FINISHED_PHASES
from finetune_operator.finetunejob.observe.run_creator import RunCreator
from finetune_operator.finetunejob.sweep import sampler
from finetune_operator.kube import KubeError
from finetune_operator.mlflow.model import Run
from finetune_operator.mlflow.runs import Server
from finetune_operator.tenancy.file import TenancyFile
from finetune_operator.tenancy.model import Tenancy
from finetune_operator.tenancy.permissions import Permissions
from fixtures.operator_in_memory.decisions import SETTINGS, SPLITS, UID
from fixtures.operator_in_memory.parts import parts
from fixtures.operator_in_memory.promotions import ApiServer, KilledError, Writes
from unit.operator.finetunejob.decide.sweep.children import condition_of

if TYPE_CHECKING:
    from collections.abc import Iterator

Json = dict[str, Any]
KEY = ("FineTuneJob", "team", "tune")
SEEDS: Json = {
    "parameters": [{"field": "training.seed", "range": {"min": 1, "max": 900}}],
    "algorithm": "Random",
}


@dataclass
class ManyKills(Writes):
    """Kills the operator before or after every third write, at random."""

    kills: int = 0
    _random: random.Random = field(default_factory=lambda: random.Random(0))  # noqa: S311

    @contextmanager
    def one(self, what: str) -> Iterator[None]:
        self.count += 1
        die = self._random.randrange(6)
        self.kills += die < 2
        if die == 0:
            raise KilledError(f"before {what}")
        yield
        self.log.append(what)
        if die == 1:
            raise KilledError(f"after {what}")


class World:
    """An API server and an MLflow in memory, the operator, and FineTuneJobs of the sweep that the test plays."""

    def __init__(self, writes: Writes) -> None:
        self.writes = writes
        self.kube = ApiServer(writes)
        self.seconds = 0.0
        self.runs: list[Run] = []
        self.created: list[str] = []
        self.is_killed = False
        self.restart()

    def restart(self) -> None:
        """An operator that knows nothing but what is written down."""
        self.store, _, self.reconciler = parts(self.kube, SETTINGS, lambda: self.seconds, "operator")

    def edit(self, **spec: Any) -> None:
        resource = self.kube.objects.get(KEY) or {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "FineTuneJob",
            "metadata": {"name": "tune", "namespace": "team", "uid": UID, "generation": 1},
            "spec": {"model": {"base": "/m"}, "data": SPLITS, "checkpoint": {"uri": "/checkpoints"}},
        }
        self.kube.keep({**resource, "spec": {**resource["spec"], **spec}})

    async def settle(self) -> None:
        """Passes until none writes anything; an operator that was killed is started again."""
        for _ in range(80):
            before = self.writes.count
            try:
                await self._pass()
            except KilledError:
                self.is_killed = True
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
        finally:
            self.created += [name for name in self.trials() if name not in self.created]

    # MLflow.

    def find_run(self, *_: object) -> Run | None:
        return self.runs[0] if self.runs else None

    def find_runs(self, *_: object) -> dict[str, Run]:
        return {run.run_id: run for run in self.runs}

    async def create_run(self, _ftj: object, action: EnsureRun) -> ActionResult:
        with self.writes.one("create run"):
            if not self.runs:
                self.runs.append(Run("r1", "e1", "RUNNING"))
            return ActionResult(action, run=self.runs[0], server=SETTINGS.tracking_uri)

    def finish_run(self, run_id: str, status: str) -> None:
        with self.writes.one("finish run"):
            self.runs = [dataclasses.replace(run, status=status) for run in self.runs]

    def read_metric(self, run_id: str, _name: str) -> dict[int, float]:
        """The losses of a trial at its rung: its run has its name."""
        return {10: self.trials()[run_id]["spec"]["training"]["seed"] / 100}

    # The trials, as the operator itself would report them.

    def trials(self) -> dict[str, Json]:
        """The FineTuneJobs of the sweep, by name."""
        return {
            name: body
            for (kind, _, name), body in self.kube.objects.items()
            if kind == "FineTuneJob" and name != "tune"
        }

    def running(self) -> list[str]:
        return [
            name
            for name, body in self.trials().items()
            if (body.get("status") or {}).get("phase") not in FINISHED_PHASES
        ]

    def report(self, name: str, phase: str, *conditions: Json, **status: Any) -> None:
        body = self.trials()[name]
        self.kube.keep({**body, "status": {"phase": phase, "conditions": list(conditions), **status}})

    def follow_suspend(self) -> None:
        """Each trial that runs is as its spec says."""
        for name in self.running():
            is_suspended = self.trials()[name]["spec"].get("suspend")
            self.report(name, "Suspended" if is_suspended else "Training")

    def end(self, name: str) -> None:
        """A trial ends with a loss that follows from its values; every third fails."""
        number = name.removeprefix("tune-")
        if number != "best" and int(number) % 3 == 0:
            failed = condition_of(ConditionType.FAILED, "True", ConditionReason.OUT_OF_MEMORY, "no memory")
            self.report(name, "Failed", failed)
            return
        loss = self.trials()[name]["spec"]["training"]["seed"] / 100
        self.report(name, "Succeeded", model={"evalLoss": loss}, progress={"step": 10})

    def outcome(self) -> object:
        """What counts in the end: what the job says, its FineTuneJobs and their order, and MLflow."""
        status = self.kube.objects[KEY]["status"]
        conditions = {
            item["type"]: (item["status"], item["reason"], item["message"]) for item in status["conditions"]
        }
        reported = {name: status.get(name) for name in ("phase", "sweep", "progress", "model")}
        specs = {name: body["spec"] for name, body in self.trials().items()}
        return reported, conditions, self.created, specs, self.runs


async def suggest_here(request: Json) -> Json:
    """Suggest values without a process."""
    return sampler.suggest(request)


async def completed(world: World) -> None:
    """All trials end, and the best one is delivered."""
    world.edit(sweep=SEEDS | {"trials": 4, "parallel": 2}, output={"uri": "s3://bucket/model"})
    await _train(world)


async def learning(world: World) -> None:
    """TPE chooses values from the results of earlier trials."""
    world.edit(sweep={**SEEDS, "algorithm": "TPE", "trials": 4, "parallel": 2, "maxFailedTrials": 1})
    await _train(world)


async def halving(world: World) -> None:
    """ASHA: each trial reaches its rung, is suspended there, and the best one resumes."""
    sweep = SEEDS | {"algorithm": "ASHA", "trials": 4, "parallel": 2, "rungs": [10]}
    world.edit(sweep=sweep, training={"evalEverySteps": 10})
    await world.settle()
    at_rung: set[str] = set()
    while running := [name for name in world.running() if not world.trials()[name]["spec"].get("suspend")]:
        name = running[-1]
        if name in at_rung:
            world.end(name)
        else:
            world.report(name, "Training", progress={"step": 10}, mlflow={"runId": name})
        at_rung.add(name)
        await world.settle()
        for other in at_rung & {*world.running()}:
            is_suspended = world.trials()[other]["spec"].get("suspend")
            phase = "Suspended" if is_suspended else "Training"
            world.report(other, phase, progress={"step": 10}, mlflow={"runId": other})
        await world.settle()


async def suspended(world: World) -> None:
    """Suspended with two trials that run, and resumed."""
    world.edit(sweep=SEEDS | {"trials": 2, "parallel": 2})
    await world.settle()
    world.follow_suspend()
    world.edit(suspend=True)
    for _ in range(2):
        await world.settle()
        world.follow_suspend()
    world.edit(suspend=False, pods={"all": {"serviceAccountName": "new"}})
    for _ in range(2):
        await world.settle()
        world.follow_suspend()
    await _train(world)


async def failed(world: World) -> None:
    """A trial fails while others run; they are suspended, and deleted with the TTL."""
    world.edit(
        sweep=SEEDS | {"trials": 4, "parallel": 4, "maxFailedTrials": 0},
        runPolicy={"ttlSecondsAfterFinished": 600},
    )
    await world.settle()
    world.end("tune-3")
    for _ in range(2):
        await world.settle()
        world.follow_suspend()
    world.seconds += 600
    await world.settle()


async def large(world: World) -> None:
    """64 trials, eight at a time."""
    world.edit(
        sweep=SEEDS | {"trials": 64, "parallel": 8, "maxFailedTrials": 21},
        output={"uri": "s3://bucket/model"},
    )
    await _train(world)


async def _train(world: World) -> None:
    await world.settle()
    while running := world.running():
        # The last one that started ends first.
        world.end(running[-1])
        await world.settle()


STORIES: dict[str, tuple[Callable[[World], Awaitable[None]], str]] = {
    "completed": (completed, "Succeeded"),
    "learning": (learning, "Succeeded"),
    "halving": (halving, "Succeeded"),
    "suspended": (suspended, "Succeeded"),
    "failed": (failed, "Failed"),
}


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Awaitable[World]]:
    """Tells a story with an operator that some writes kill."""

    async def told(story: Callable[[World], Awaitable[None]], writes: Writes) -> World:
        world = World(writes)
        monkeypatch.setattr(Server, "find_run", world.find_run)
        monkeypatch.setattr(Server, "find_runs", world.find_runs)
        monkeypatch.setattr(RunCreator, "create", world.create_run)
        monkeypatch.setattr(Server, "finish_run", world.finish_run)
        monkeypatch.setattr(Server, "read_metric", world.read_metric)
        monkeypatch.setattr(reconcile, "suggest_values", suggest_here)
        await story(world)
        return world

    return told


@pytest.mark.parametrize("name", STORIES)
async def test_the_operator_may_end_at_every_write_of_a_sweep(
    name: str, tell: Callable[..., Awaitable[World]]
) -> None:
    story, phase = STORIES[name]
    undisturbed = await tell(story, Writes())
    expected, writes = undisturbed.outcome(), undisturbed.writes.count
    assert undisturbed.kube.objects[KEY]["status"]["phase"] == phase
    for number in range(1, writes + 1):
        for point, kill in (("before", Writes(kill_before=number)), ("after", Writes(kill_after=number))):
            world = await tell(story, kill)
            where = f"{point} write {number} of {writes}: {world.writes.log}"
            assert world.is_killed, where
            assert world.outcome() == expected, where


async def test_the_suspension_of_a_sweep_that_is_not_permitted_any_longer_suspends_its_trials(
    tell: Callable[..., Awaitable[World]],
) -> None:
    tenancy = TenancyFile("tenancy.yaml")
    tenancy.tenancy = Tenancy.model_validate({"tenants": [{"namespaces": ["other"]}]})

    async def story(world: World) -> None:
        world.edit(sweep=SEEDS | {"trials": 2, "parallel": 2})
        await world.settle()
        world.follow_suspend()
        world.reconciler.permissions = Permissions(SETTINGS, tenancy)
        world.edit(suspend=True)
        for _ in range(2):
            await world.settle()
            world.follow_suspend()
        await world.settle()

    world = await tell(story, Writes())
    status = world.kube.objects[KEY]["status"]
    conditions = {item["type"]: (item["status"], item["reason"]) for item in status["conditions"]}
    trials = {name: body["spec"]["suspend"] for name, body in world.trials().items()}
    assert (status["phase"], conditions["Accepted"], conditions["Suspended"], trials) == (
        "Suspended",
        ("False", "NotPermitted"),
        ("True", "Suspended"),
        {"tune-1": True, "tune-2": True},
    )


async def test_64_trials_start_in_order_and_once_though_the_operator_is_killed_again_and_again(
    tell: Callable[..., Awaitable[World]],
) -> None:
    undisturbed = await tell(large, Writes())
    assert undisturbed.created == [*(f"tune-{number}" for number in range(1, 65)), "tune-best"]
    assert undisturbed.writes.log.count("create FineTuneJob") == 65
    status = undisturbed.kube.objects[KEY]["status"]
    assert (status["phase"], len(status["sweep"]["trials"])) == ("Succeeded", 64)
    writes = ManyKills()
    killed = await tell(large, writes)
    assert (writes.kills > 50, writes.log.count("create FineTuneJob")) == (True, 65)
    assert killed.outcome() == undisturbed.outcome()
