"""Schedules on an API server in memory: interrupted passes, refusals, and jobs that end."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from finetune_operator.controller.store import RESOURCES, Store
from finetune_operator.controller.workqueue import WorkQueue
from finetune_operator.finetuneschedule import enqueue
from finetune_operator.finetuneschedule.apply import FineTuneScheduleApplier
from finetune_operator.finetuneschedule.observe import FineTuneScheduleObserver
from finetune_operator.finetuneschedule.reconcile import FineTuneScheduleReconciler
from finetune_operator.kube import KubeError
from finetune_operator.owners import build_owner_reference
from finetune_operator.settings import Settings
from fixtures.fake_kube import StandIn
from fixtures.operator_in_memory.decisions import later
from fixtures.operator_in_memory.schedules import HOURLY, TEMPLATE

Json = dict[str, Any]
HOUR = 3600.0
FIRST, SECOND, THIRD = "nightly-29759820", "nightly-29759880", "nightly-29759940"
Answer = TypeVar("Answer")
WRITES = ("create", "status", "delete")


class KilledError(BaseException):
    """The operator's process ends here."""


class Api(StandIn):
    """An API server that kills the operator before or after one of its writes."""

    def __init__(self, kill_at: int | None = None) -> None:
        """Kill it at this point of all points before and after writes, in their order."""
        super().__init__()
        self.kill_at = kill_at
        self.created: list[str] = []
        """The FineTuneJobs that came to exist."""

    async def create(self, body: Json, *, dry_run: bool = False) -> Json:
        if dry_run:
            return await super().create(body, dry_run=True)
        return await self._write(self._create(body))

    async def _create(self, body: Json) -> Json:
        created = await super().create(body)
        if body["kind"] == "FineTuneJob":
            self.created.append(body["metadata"]["name"])
        return created

    async def apply(self, body: Json, *, subresource: str = "") -> Json:
        return await self._write(super().apply(body, subresource=subresource))

    async def delete(self, *arguments: Any, **options: Any) -> None:
        await self._write(super().delete(*arguments, **options))

    async def _write(self, request: Coroutine[Any, Any, Answer]) -> Answer:
        try:
            self._pass_point()
        except KilledError:
            request.close()
            raise
        answer = await request
        self._pass_point()
        return answer

    def _pass_point(self) -> None:
        if self.kill_at is not None:
            self.kill_at -= 1
            if self.kill_at == -1:
                raise KilledError


@dataclass
class World:
    """An operator for schedules, which starts anew with `restart`; `seconds` after NOW."""

    api: Api = field(default_factory=Api)
    seconds: float = 0.0
    queued_jobs: list[str] = field(default_factory=list)
    """The FineTuneJobs that are reconciled since they were created."""

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start a process that lists what exists."""
        self.store, self.queue = Store(), WorkQueue(clock=lambda: self.seconds)
        self.reconciler = FineTuneScheduleReconciler(
            self.store,
            self.queue,
            FineTuneScheduleObserver(self.api, self.store),
            FineTuneScheduleApplier(self.api, self.store, self.queued_jobs.append),
            Settings(),
            now=lambda: later(self.seconds),
        )
        for (kind, _namespace, _name), body in self.api.objects.items():
            if kind in RESOURCES:
                self.store.put(kind, copy.deepcopy(body))

    def submit(self, **fields: Any) -> None:
        self.keep(
            {
                "kind": "FineTuneSchedule",
                "metadata": {"name": "nightly", "uid": "u1", "generation": 1},
                "spec": {"schedule": HOURLY, "jobTemplate": TEMPLATE, **fields},
            }
        )

    def end(self, name: str, condition: str, reason: str = "", **data: Any) -> None:
        """A FineTuneJob ends now."""
        time = later(self.seconds).isoformat()
        job = self.api.objects["FineTuneJob", "team", name]
        item = {
            "type": condition,
            "status": "True",
            "reason": reason or condition,
            "lastTransitionTime": time,
        }
        self.keep({**job, "status": {"conditions": [item], "completionTime": time, "data": data}})

    def keep(self, body: Json) -> None:
        """Somebody else writes an object, and its event arrives."""
        stored = self.api.keep(body)
        self.store.put(stored["kind"], stored)

    def tick(self, hours: float = 0) -> None:
        """Time passes, and passes follow until nothing is written. A process that is killed starts anew."""
        self.seconds += hours * HOUR
        for _ in range(9):
            writes = len(self.api.done(*WRITES))
            try:
                asyncio.run(self.reconciler.handle("team/nightly"))
            except KilledError:
                self.restart()
                continue
            # The events about what the operator itself deleted.
            for key, body in [*self.store.finetunejobs.items()]:
                if ("FineTuneJob", *key) not in self.api.objects:
                    self.store.drop("FineTuneJob", body)
            if len(self.api.done(*WRITES)) == writes:
                return
        raise AssertionError("the operator does not settle")

    @property
    def jobs(self) -> list[str]:
        return sorted(name for kind, _, name in self.api.objects if kind == "FineTuneJob")

    @property
    def status(self) -> Json:
        return dict(self.api.objects["FineTuneSchedule", "team", "nightly"]["status"])

    @property
    def outcome(self) -> Json:
        """The status without times of transitions."""
        status = copy.deepcopy(self.status)
        conditions = [{**item, "lastTransitionTime": ""} for item in status["conditions"]]
        return status | {"conditions": sorted(conditions, key=lambda item: str(item["type"]))}

    @property
    def ready(self) -> str:
        item = next(item for item in self.status["conditions"] if item["type"] == "Ready")
        return f"{item['status']} {item['reason']}: {item['message']}"


def test_two_start_times() -> None:
    world = World()
    world.submit()
    world.tick()
    assert (world.jobs, world.ready) == (
        [],
        "True Accepted: the API server accepts the FineTuneJobs of spec.jobTemplate",
    )
    world.tick(hours=1)
    world.tick(hours=1)
    assert world.jobs == [FIRST, SECOND]
    assert world.queued_jobs == [f"team/{FIRST}", f"team/{SECOND}"]
    assert world.status["active"] == [{"name": FIRST}, {"name": SECOND}]
    assert world.status["lastScheduleTime"] == "2026-08-01T14:00:00Z"
    events = [body["message"] for (kind, *_), body in world.api.objects.items() if kind == "Event"]
    assert events == [
        f"FineTuneJob {FIRST} was created for 2026-08-01T13:00:00Z",
        f"FineTuneJob {SECOND} was created for 2026-08-01T14:00:00Z",
    ]
    writes = world.api.done(*WRITES)
    world.restart()
    world.tick()
    assert world.api.done(*WRITES) == writes


def replace_job(world: World) -> None:
    """A job runs at the next start time, and is replaced."""
    world.submit(concurrencyPolicy="Replace")
    world.tick(hours=1)
    world.tick(hours=1)


def skip_job(world: World) -> None:
    """The second job finds the data of the first one, and the third one finds other data."""
    world.submit(onlyIfDataChanged=True)
    world.tick(hours=1)
    world.end(FIRST, "Succeeded", digest="d1")
    world.tick(hours=1)
    world.end(SECOND, "Succeeded", "DataUnchanged", digest="d1")
    world.tick()
    world.tick(hours=1)


def trim_history(world: World) -> None:
    """Of two jobs that failed, the older one is deleted."""
    world.submit(concurrencyPolicy="Forbid")
    world.tick(hours=1)
    world.end(FIRST, "Failed")
    world.tick(hours=1)
    world.end(SECOND, "Failed")
    world.tick()


Story = Callable[[World], None]
STORIES: dict[Story, tuple[list[str], str]] = {
    replace_job: ([SECOND], "True JobCreated"),
    skip_job: ([FIRST, THIRD], "True JobCreated"),
    trim_history: ([SECOND], "True JobCreated"),
}


@pytest.mark.parametrize("story", STORIES)
def test_an_operator_that_is_killed_at_any_write_creates_each_job_once(
    story: Story,
) -> None:
    undisturbed = World()
    story(undisturbed)
    jobs, ready = STORIES[story]
    assert (undisturbed.jobs, undisturbed.ready.partition(":")[0]) == (jobs, ready)
    kills = 0
    while True:
        world = World(Api(kill_at=kills))
        story(world)
        if world.api.kill_at is not None and world.api.kill_at >= 0:
            # The story has fewer writes.
            break
        assert (kills, world.jobs, world.outcome) == (kills, undisturbed.jobs, undisturbed.outcome)
        assert len(world.api.created) == len(set(world.api.created)), kills
        kills += 1
    assert kills > 10


REFUSALS = {
    "the template is wrong": (
        KubeError(422, 'FineTuneJob is invalid: spec.modle: unknown field "modle"'),
        "False JobTemplateInvalid: the API server refuses FineTuneJob nightly-29759820 of spec.jobTemplate: FineTuneJob is "
        'invalid: spec.modle: unknown field "modle"',
        "Stalled",
    ),
    "a quota is exhausted": (
        KubeError(403, "exceeded quota"),
        "False JobTemplateRejected: the API server refuses FineTuneJob nightly-29759820 of spec.jobTemplate: exceeded quota",
        "Reconciling",
    ),
}


@pytest.mark.parametrize(("error", "ready", "summary"), REFUSALS.values(), ids=REFUSALS)
@pytest.mark.parametrize("verb", ["rehearse", "create"])
def test_what_the_api_server_refuses(verb: str, error: KubeError, ready: str, summary: str) -> None:
    world = World()
    world.submit()
    if verb == "create":
        world.tick()
    world.api.refuse[verb, "FineTuneJob"] = error
    world.seconds = 0 if verb == "rehearse" else HOUR
    asyncio.run(world.reconciler.handle("team/nightly"))
    assert world.ready == ready
    assert [item["type"] for item in world.status["conditions"]][-1] == summary
    assert "lastScheduleTime" not in world.status
    del world.api.refuse[verb, "FineTuneJob"]
    world.seconds = HOUR
    world.tick()
    assert world.jobs == [FIRST]


def test_a_dry_run_without_an_answer_is_repeated() -> None:
    world = World()
    world.submit()
    world.api.refuse["rehearse", "FineTuneJob"] = KubeError(0, "the API server cannot be reached")
    asyncio.run(world.reconciler.handle("team/nightly"))
    assert "status" not in world.api.objects["FineTuneSchedule", "team", "nightly"]
    world.api.refuse["rehearse", "FineTuneJob"] = KubeError(409, "already exists", "AlreadyExists")
    world.tick()
    assert world.ready.startswith("True Accepted")


def test_a_job_of_somebody_else_has_the_name() -> None:
    world = World()
    world.api.keep({"kind": "FineTuneJob", "metadata": {"name": FIRST}})
    world.submit()
    world.tick()
    world.seconds = HOUR
    asyncio.run(world.reconciler.handle("team/nightly"))
    assert world.ready == (
        f"False NameTaken: FineTuneJob {FIRST} exists and does not belong to this schedule: delete it, or wait for the next start time"
    )
    world.tick(hours=1)
    assert (world.jobs, world.ready.partition(":")[0]) == ([FIRST, SECOND], "True JobCreated")


def test_a_job_that_no_watch_has_delivered_is_the_job() -> None:
    """A leader that lost its Lease may have created it after this one listed what exists."""
    world = World()
    world.submit()
    world.tick()
    job = {"name": FIRST, "ownerReferences": [build_owner_reference("FineTuneSchedule", "nightly", "u1")]}
    uid = world.api.keep({"kind": "FineTuneJob", "metadata": job})["metadata"]["uid"]
    world.tick(hours=1)
    assert (world.jobs, world.ready.partition(":")[0]) == ([FIRST], "True JobCreated")
    assert world.api.objects["FineTuneJob", "team", FIRST]["metadata"]["uid"] == uid


def test_a_schedule_that_is_being_deleted_creates_nothing() -> None:
    world = World()
    world.submit()
    world.tick()
    body = world.api.objects["FineTuneSchedule", "team", "nightly"]
    world.keep({**body, "metadata": {**body["metadata"], "deletionTimestamp": "2026-08-01T12:00:00Z"}})
    world.tick(hours=1)
    assert world.jobs == []


def test_an_internal_error_is_reported_and_does_not_stay() -> None:
    world = World()
    world.submit()
    body = world.store.of("FineTuneSchedule")["team", "nightly"]
    asyncio.run(world.reconciler.report_internal_error(body, "the operator failed"))
    assert world.ready == "False InternalError: the operator failed"
    world.tick()
    assert world.ready.startswith("True Accepted")


def owned(name: str, version: str = "1", owner: str = "nightly") -> Json:
    """A FineTuneJob of a schedule."""
    reference = build_owner_reference("FineTuneSchedule", owner, f"uid-of-{owner}")
    meta = {"namespace": "team", "name": name, "uid": name, "resourceVersion": version}
    return {"metadata": meta | {"ownerReferences": [reference]}}


def test_events_of_jobs_and_schedules_queue_the_schedule() -> None:
    store, queue = Store(), WorkQueue(clock=lambda: 0.0)
    meta = {"namespace": "team", "name": "nightly", "uid": "u1", "resourceVersion": "5"}
    enqueue.on_finetunejob(queue, {"metadata": {"namespace": "team", "name": "alone"}})
    assert list(queue._queued) == []
    enqueue.on_finetunejob(queue, owned("nightly-1"))
    assert list(queue._queued) == ["team/nightly"]
    queue = WorkQueue(clock=lambda: 0.0)
    enqueue.on_event(store, queue, "ADDED", {"metadata": meta})
    assert (list(queue._queued), len(store.of("FineTuneSchedule"))) == (["team/nightly"], 1)
    queue = WorkQueue(clock=lambda: 0.0)
    # What the operator wrote itself.
    enqueue.on_event(store, queue, "MODIFIED", {"metadata": meta})
    assert list(queue._queued) == []
    enqueue.on_event(store, queue, "DELETED", {"metadata": meta})
    assert (list(queue._queued), len(store.of("FineTuneSchedule"))) == (["team/nightly"], 0)
