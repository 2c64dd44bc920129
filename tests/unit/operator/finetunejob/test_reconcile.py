"""One pass over one job: what is written, and what is not."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from finetune_crds.base import API_VERSION
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import MlflowStatus
from finetune_operator.controller.reconciler import BUSY_SECONDS
from finetune_operator.defaults import Defaults
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.finetunejob import reconcile as module
from finetune_operator.finetunejob.apply import FineTuneJobApplier, NameTaken
from finetune_operator.finetunejob.decide.failed_action import record_failed_action
from finetune_operator.finetunejob.decision import (
    Action,
    Decision,
    EnsureRun,
    FinishRun,
    LogMetrics,
    SetAlias,
    TagVersion,
)
from finetune_operator.finetunejob.model import Mlflow
from finetune_operator.finetunejob.observe.observer import read_finetunejob
from finetune_operator.finetunejob.observe.run_poller import RunPoller
from finetune_operator.finetunejob.preparation import preparation_lease
from finetune_operator.kube import KubeError
from finetune_operator.mlflow.model import Run
from finetune_operator.mlflow.runs import Server
from finetune_operator.policy.status import with_condition
from finetune_operator.registry.base import RegisteredVersion
from finetune_operator.registry.mlflow import MlflowRegistry
from finetune_operator.registry.writer import build_lease_name
from fixtures.fake_kube import StandIn
from fixtures.operator_in_memory.decisions import (
    ACCEPTED,
    NO_MLFLOW,
    NOW,
    PREPARED,
    SETTINGS,
    SOURCE,
    SPLITS,
    TRAINED,
    UID,
    conclude,
    controller,
    ftj,
    pod,
    said,
    status,
    tracked,
)
from fixtures.operator_in_memory.parts import parts
from support.counted import counted

Json = dict[str, Any]
KEY = "team/tune"
LEASE = f"Lease/{preparation_lease.lease_name(ftj(data=SOURCE, model={'base': '/m'}))}"
CHILDREN = ["Service/tune", "ConfigMap/tune-train", "Job/tune-train-1"]


def submitted(**spec: Any) -> Json:
    return {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": "tune", "namespace": "team", "uid": UID, "generation": 1},
        "spec": {"model": {"base": "/m"}, "data": SPLITS, **spec},
    }


@dataclass
class World:
    """The operator's parts on a stand-in for the API server."""

    kube: StandIn = field(default_factory=lambda: StandIn(submitted()))
    settings: Any = NO_MLFLOW
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.restart()
        self.watch()

    def restart(self) -> None:
        """An operator that knows nothing yet."""
        self.store, self.queue, self.reconciler = parts(self.kube, self.settings, lambda: self.seconds)

    def watch(self) -> None:
        """The watches deliver everything, also what is gone."""
        for kind in ("Job", "Pod", "FineTuneJob"):
            bodies = [
                body
                for (stored_kind, _, _), body in self.kube.objects.items()
                if stored_kind == kind and (kind == "FineTuneJob" or "labels" in body["metadata"])
            ]
            self.store.replace(kind, bodies, self.kube.version)

    async def look(self) -> None:
        self.kube.asked.clear()
        # As the queue does for a worker that takes the key.
        self.queue._due.pop(KEY, None)
        await self.reconciler.handle(KEY)

    def start_pod(self, job_name: str) -> None:
        """A node takes a pod of a Job."""
        uid = self.kube.objects["Job", "team", job_name]["metadata"]["uid"]
        self.kube.keep({"kind": "Pod", **pod(job_name, owner=uid)})

    @property
    def status(self) -> Json:
        return dict(self.kube.objects["FineTuneJob", "team", "tune"].get("status") or {})

    def condition(self, kind: ConditionType) -> tuple[str, str] | None:
        for item in self.status.get("conditions", []):
            if item["type"] == kind:
                return item["reason"], item["message"]
        return None

    def holding(self) -> list[str]:
        """Which of these conditions are True."""
        true = [item["type"] for item in self.status["conditions"] if item["status"] == "True"]
        return [kind for kind in ("Reconciling", "Stalled", "Finished") if kind in true]

    def new_events(self) -> list[str]:
        return [
            f"{kind}/{name}" for verb, kind, name in self.kube.asked if (verb, kind) == ("create", "Event")
        ]

    def next_look(self) -> float | None:
        delay = self.queue._due.get(KEY)
        return delay.end if delay else None

    def events(self) -> list[tuple[str, str]]:
        bodies = (body for (kind, _, _), body in self.kube.objects.items() if kind == "Event")
        return [(body["type"], body["reason"]) for body in bodies]


async def test_a_pass_makes_the_children_then_tells_people_then_writes_the_status() -> None:
    world = World()
    await world.look()
    verbs = [(verb, kind) for verb, kind, _ in world.kube.asked]
    assert verbs == [
        ("rehearse", "Pod"),
        ("create", "Service"),
        ("create", "ConfigMap"),
        ("create", "Job"),
        ("create", "Event"),
        ("status", "FineTuneJob"),
    ]
    assert (world.status["phase"], world.status["attempt"]) == ("Starting", 1)
    assert world.events() == [("Normal", "Starting")]


async def test_what_was_written_is_known_before_the_watches_tell_and_nothing_is_written_twice() -> None:
    world = World()
    await world.look()
    await world.look()
    assert world.kube.done("create", "apply", "delete") == []
    await world.look()
    assert world.kube.done("create", "apply", "delete", "status") == []
    assert world.next_look() == NO_MLFLOW.poll_seconds


async def test_a_status_is_written_onto_the_version_it_was_decided_on_and_no_other() -> None:
    world = World()
    body = world.kube.objects["FineTuneJob", "team", "tune"]
    world.kube.keep({**body, "spec": {**body["spec"], "suspend": True}})
    await world.look()
    assert world.status == {}
    assert world.next_look() is not None
    world.watch()
    await world.look()
    assert world.status["phase"] == "Suspended"


async def test_a_phase_is_counted_once_when_the_status_is_written() -> None:
    world = World()
    await world.look()
    world.start_pod("tune-train-1")
    world.watch()
    world.seconds = 60
    world.kube.refuse["status", "FineTuneJob"] = KubeError(0, "away")
    with counted("finetune_operator_job_phase_seconds") as changes:
        await world.look()
    assert changes == {}
    del world.kube.refuse["status", "FineTuneJob"]
    with counted("finetune_operator_job_phase_seconds") as changes:
        await world.look()
        world.restart()
        world.watch()
        await world.look()
    assert (world.status["phase"], changes) == ("Training", {"_count Starting": 1, "_sum Starting": 60})


async def test_a_pass_that_was_cut_short_is_made_up_for() -> None:
    world = World()
    world.kube.refuse["status", "FineTuneJob"] = KubeError(0, "away")
    await world.look()
    companions = ["Service/tune", "ConfigMap/tune-train"]
    assert world.kube.done("create") == [*companions, "Job/tune-train-1", *world.new_events()]
    del world.kube.refuse["status", "FineTuneJob"]
    world.restart()
    world.store.put("FineTuneJob", world.kube.objects["FineTuneJob", "team", "tune"])
    await world.look()
    assert (world.status["phase"], world.status["attempt"]) == ("Starting", 1)
    assert [name for _, _, name in world.kube.objects if name.startswith("tune-train-")] == ["tune-train-1"]


async def test_events_of_a_pass_that_was_cut_short_are_written_once() -> None:
    world = World()
    world.kube.refuse["status", "FineTuneJob"] = KubeError(0, "away")
    await world.look()
    written_before = world.events()
    del world.kube.refuse["status", "FineTuneJob"]
    world.restart()
    world.store.put("FineTuneJob", world.kube.objects["FineTuneJob", "team", "tune"])
    await world.look()
    assert written_before == world.events() == [("Normal", "Starting")]


async def test_after_a_restart_no_second_gang_starts_beside_pods_whose_job_a_person_deleted() -> None:
    world = World()
    await world.look()
    await world.look()
    job = world.kube.objects.pop(("Job", "team", "tune-train-1"))
    pod_body = pod("tune-train-1", owner=job["metadata"]["uid"])
    world.kube.keep({"kind": "Pod", **pod_body})
    world.restart()
    world.watch()
    await world.look()
    assert [kind for verb, kind, _ in world.kube.asked if verb in ("create", "apply", "delete")] == ["Event"]
    world.seconds += 10
    await world.look()
    name = pod_body["metadata"]["name"]
    assert world.condition(ConditionType.TRAINED) == (
        ConditionReason.RESTARTING,
        f"attempt 2 waits for pod {name} of the previous attempt to stop",
    )
    assert [kind for verb, kind, _ in world.kube.asked if verb in ("create", "apply", "delete")] == []
    del world.kube.objects["Pod", "team", name]
    world.watch()
    await world.look()
    assert "Job/tune-train-2" in world.kube.done("create")


TAKEN: dict[str, tuple[Json, str]] = {
    "a Service of somebody else's": (
        {"kind": "Service", "metadata": {"name": "tune"}},
        "Service tune exists and has another owner: delete this object, or create a FineTuneJob with another name",
    ),
    "a Job of somebody else's": (
        {
            "kind": "Job",
            "metadata": {"name": "tune-train-1", "ownerReferences": [controller("v1", "X", "x")]},
        },
        "Job tune-train-1 exists and has another owner: delete this object, or create a FineTuneJob with another name",
    ),
    "a Job of an earlier FineTuneJob": (
        {
            "kind": "Job",
            "metadata": {
                "name": "tune-train-1",
                "ownerReferences": [controller(API_VERSION, "FineTuneJob", "earlier")],
            },
        },
        "Job tune-train-1 of an earlier job is still being deleted: waiting until it no longer exists",
    ),
    "one's own Job, on its way out": (
        {
            "kind": "Job",
            "metadata": {
                "name": "tune-train-1",
                "ownerReferences": [controller(API_VERSION, "FineTuneJob", UID)],
                "deletionTimestamp": "2026-08-01T12:00:00Z",
            },
        },
        "Job tune-train-1 of an earlier job is still being deleted: waiting until it no longer exists",
    ),
}


@pytest.mark.parametrize(("second", "message"), TAKEN.values(), ids=TAKEN)
async def test_a_name_that_is_taken_is_said_and_waited_for(second: Json, message: str) -> None:
    world = World(StandIn(submitted(), second))
    await world.look()
    assert world.condition(ConditionType.PODS_HEALTHY) == (ConditionReason.NAME_TAKEN, message)
    assert (world.status["phase"], world.next_look() is not None) == ("Pending", True)
    key = (second["kind"], "team", second["metadata"]["name"])
    assert world.kube.objects[key]["metadata"]["name"] == second["metadata"]["name"]
    del world.kube.objects[key]
    await world.look()
    assert world.status["phase"] == "Starting"


async def test_a_pass_that_fails_leaves_no_write_of_a_companion_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    written_kinds: list[str] = []

    async def apply_companion(_self: object, _ftj: object, body: Json) -> None:
        if body["kind"] == "Service":
            raise NameTaken("Service tune belongs to another object")
        for _ in range(50):
            await asyncio.sleep(0)
        written_kinds.append(body["kind"])

    monkeypatch.setattr(FineTuneJobApplier, "_apply_companion", apply_companion)
    await world.look()
    assert written_kinds == ["ConfigMap"]


async def test_the_same_complaint_is_written_once() -> None:
    world = World(StandIn(submitted(), {"kind": "Service", "metadata": {"name": "tune"}}))
    for expected in (["FineTuneJob/tune"], [], []):
        await world.look()
        assert world.kube.done("status") == expected
    assert world.events() == [("Warning", "NameTaken")]


async def test_children_that_the_api_server_refuses_are_said() -> None:
    world = World()
    world.kube.refuse["create", "Job"] = KubeError(
        422, "spec.template.spec.containers[1].name: Required value"
    )
    await world.look()
    assert world.condition(ConditionType.PODS_HEALTHY) == (
        ConditionReason.POD_TEMPLATE_INVALID,
        "spec.template.spec.containers[1].name: Required value: correct spec.pods.train, and the job continues",
    )
    assert world.holding() == ["Stalled"]
    del world.kube.refuse["create", "Job"]
    await world.look()
    assert (world.condition(ConditionType.PODS_HEALTHY), world.holding()) == (None, ["Reconciling"])


async def test_a_job_that_is_resumed_is_not_suspended_while_its_next_pods_are_refused() -> None:
    world = World()
    await world.look()
    for suspend in (True, False):
        body = world.kube.objects["FineTuneJob", "team", "tune"]
        world.kube.keep({**body, "spec": {**body["spec"], "suspend": suspend}})
        world.watch()
        if not suspend:
            world.kube.refuse["create", "Job"] = KubeError(422, "nodeSelector: Invalid value")
        await world.look()
        await world.look()
    assert (world.status["phase"], world.status["attempt"], world.holding()) == ("Starting", 2, ["Stalled"])
    assert world.condition(ConditionType.SUSPENDED) == (
        ConditionReason.RESUMED,
        "the job starts from the beginning: spec.checkpoint is not set",
    )
    await world.look()
    assert world.kube.done("status") == []


async def test_a_quota_that_changes_meanwhile_is_not_taken_for_a_child_that_exists() -> None:
    world = World()
    world.kube.refuse["create", "Job"] = KubeError(409, "resourcequotas gpus: please apply again", "Conflict")
    await world.look()
    assert [verb for verb, kind, _ in world.kube.asked if kind == "Job"] == ["create"]
    assert world.condition(ConditionType.PODS_HEALTHY) is None
    del world.kube.refuse["create", "Job"]
    await world.look()
    assert world.status["phase"] == "Starting"


async def test_a_typo_in_the_template_of_the_preparation_names_the_field() -> None:
    world = World(StandIn(submitted(data=SOURCE)))
    world.kube.refuse["create", "Job"] = KubeError(400, 'unknown field "spec.template.spec.tolerationz"')
    await world.look()
    assert world.condition(ConditionType.PODS_HEALTHY) == (
        ConditionReason.POD_TEMPLATE_INVALID,
        'unknown field "spec.template.spec.tolerationz": correct spec.pods.prepare, and the job continues',
    )


async def test_a_typo_in_the_template_of_the_evaluation_names_the_field(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def registered(*_: Any) -> Mlflow:
        return tracked(RegisteredVersion("tune", "4"))

    monkeypatch.setattr(RunPoller, "_read", registered)
    body = submitted(evaluation={}, register={})
    trained = status(ACCEPTED, PREPARED, TRAINED, attempt=1, mlflow=MlflowStatus(run_id="r1"))
    world = World(StandIn({**body, "status": trained.to_json()}), SETTINGS)
    world.kube.refuse["create", "Job"] = KubeError(400, 'unknown field "spec.template.spec.tolerationz"')
    for _ in range(2):
        await world.look()
        world.watch()
    assert world.condition(ConditionType.PODS_HEALTHY) == (
        ConditionReason.POD_TEMPLATE_INVALID,
        'unknown field "spec.template.spec.tolerationz": correct spec.pods.evaluate, and the job continues',
    )
    assert (world.status["phase"], world.holding()) == ("Evaluating", ["Stalled"])
    del world.kube.refuse["create", "Job"]
    await world.look()
    assert world.kube.done("create")[:1] == ["Job/tune-evaluate"]
    assert (world.condition(ConditionType.PODS_HEALTHY), world.holding()) == (None, ["Reconciling"])


async def test_a_typo_is_told_before_the_preparation_and_its_correction_counts_at_once() -> None:
    world = World(StandIn(submitted(data=SOURCE)))
    world.kube.refuse["rehearse", "Job"] = KubeError(400, 'unknown field "spec.template.spec.tolerationz"')
    await world.look()
    assert world.kube.done("rehearse", "create", "apply", "status") == [
        "Job/tune-train-1",
        *world.new_events(),
        "FineTuneJob/tune",
    ]
    assert (world.holding(), world.events()) == (["Stalled"], [("Warning", "PodTemplateInvalid")])
    for _ in range(3):
        await world.look()
        assert world.kube.done("rehearse", "create", "apply", "status") == []

    del world.kube.refuse["rehearse", "Job"]
    body = world.kube.objects["FineTuneJob", "team", "tune"]
    world.kube.keep({**body, "metadata": {**body["metadata"], "generation": 2}})
    world.watch()
    await world.look()
    assert world.kube.done("rehearse", "apply", "create")[:5] == [
        "Job/tune-train-1",
        "Pod/tune-train-1-0",
        LEASE,
        "ConfigMap/tune-prep",
        "Job/tune-prep",
    ]
    await world.look()
    assert world.kube.done("rehearse") == []
    assert (world.status["phase"], world.holding()) == ("Preparing", ["Reconciling"])


NO_PRIORITY = KubeError(403, "no PriorityClass with name gpu was found")
NO_ANSWER = KubeError(500, "failed calling webhook")


@pytest.mark.parametrize("error", [NO_PRIORITY, NO_ANSWER], ids=str)
async def test_a_job_whose_pods_are_refused_goes_on_by_itself_when_they_are_not(error: KubeError) -> None:
    world = World(StandIn(submitted(data=SOURCE)))
    world.kube.refuse["rehearse", "Pod"] = error
    await world.look()
    assert (world.holding(), world.condition(ConditionType.PODS_HEALTHY)) == (["Reconciling"], None)
    assert str(error) in (world.condition(ConditionType.READY) or ("", ""))[1]
    for delay in (1, 2, 4):
        world.watch()
        world.queue._due.clear()
        await world.look()
        assert world.kube.done("rehearse", "create", "apply", "status") == []
        due = world.next_look()
        assert due == world.seconds + delay
        world.seconds = due
        await world.look()
        assert world.kube.done("rehearse") == ["Job/tune-train-1", "Pod/tune-train-1-0"]

    del world.kube.refuse["rehearse", "Pod"]
    world.seconds += 8
    await world.look()
    assert (world.status["phase"], world.kube.done("create")[2]) == ("Preparing", "Job/tune-prep")


async def test_a_webhook_that_fails_keeps_no_running_job_from_its_deadline() -> None:
    world = World(StandIn(submitted(data=SOURCE, runPolicy={"activeDeadlineSeconds": 3})))
    await world.look()
    world.kube.refuse["rehearse", "Pod"] = NO_ANSWER
    body = world.kube.objects["FineTuneJob", "team", "tune"]
    world.kube.keep({**body, "metadata": {**body["metadata"], "generation": 2}})
    world.start_pod("tune-prep")
    world.watch()
    await world.look()
    assert (world.condition(ConditionType.PODS_ADMITTED) or ("",))[0] == ConditionReason.CHECK_FAILED
    assert world.status["phase"] == "Preparing"
    world.seconds = 4
    world.watch()
    await world.look()
    assert (world.condition(ConditionType.FAILED) or ("",))[0] == ConditionReason.DEADLINE_EXCEEDED


async def test_pods_beyond_a_quota_are_told_of_and_the_preparation_goes_on() -> None:
    world = World(StandIn(submitted(data=SOURCE)))
    world.kube.refuse["rehearse", "Pod"] = KubeError(403, "exceeded quota: gpus")
    await world.look()
    assert (world.status["phase"], world.holding()) == ("Preparing", ["Reconciling"])
    assert world.kube.done("create")[2] == "Job/tune-prep"
    assert (world.condition(ConditionType.READY) or ("",))[0] == ConditionReason.QUOTA_EXCEEDED


async def test_an_error_of_the_operator_is_in_the_status_until_a_pass_succeeds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    await world.look()
    accepted = world.condition(ConditionType.ACCEPTED)
    with monkeypatch.context() as broken, caplog.at_level(logging.CRITICAL):
        broken.setattr("finetune_operator.finetunejob.reconcile.decide", lambda *_: 1 // 0)
        for _ in range(2):
            await world.look()
    assert world.condition(ConditionType.ACCEPTED) == (
        ConditionReason.INTERNAL_ERROR,
        "the operator failed to reconcile this resource (ZeroDivisionError) and retries: read the operator's log",
    )
    assert world.status["phase"] == "Starting"
    await world.look()
    assert world.condition(ConditionType.ACCEPTED) == accepted


async def test_delays_grow_while_it_fails_and_the_key_goes_with_the_job() -> None:
    world = World()
    world.kube.refuse["create", "Job"] = KubeError(0, "away")
    delays = []
    for _ in range(4):
        world.queue._due.clear()
        await world.look()
        delays.append(world.next_look() or 0.0)
    assert delays == sorted(delays)
    assert delays[-1] > 2
    world.store.drop("FineTuneJob", world.kube.keep(submitted()))
    await world.look()
    assert (world.next_look(), world.kube.asked) == (None, [])


# The resync interval; the longest wait of a finished job whose pods still run, and of one whose cleanup is complete.
WAITS: dict[str, tuple[float, float, float]] = {
    "by default": (30.0, 30.0, 600.0),
    "with a short resync interval": (1.0, 1.0, 600.0),
    "with a long resync interval": (3600.0, 3600.0, 3600.0),
}


@pytest.mark.parametrize(("resync_seconds", "cleanup_seconds", "quiet_seconds"), WAITS.values(), ids=WAITS)
async def test_a_finished_job_is_left_alone_until_one_of_its_objects_changes(
    resync_seconds: float, cleanup_seconds: float, quiet_seconds: float
) -> None:
    settings = dataclasses.replace(NO_MLFLOW, resync_seconds=resync_seconds)
    world = World(StandIn(submitted(runPolicy={"activeDeadlineSeconds": 1})), settings)
    await world.look()
    world.start_pod("tune-train-1")
    world.watch()
    await world.look()
    world.seconds = 60
    while world.kube.done("create", "apply", "delete", "status"):
        await world.look()
        world.watch()
    # The pod of the deleted Job still runs.
    wait = (world.next_look() or 0) - world.seconds
    assert (world.status["phase"], 0.8 * cleanup_seconds <= wait <= cleanup_seconds) == ("Failed", True)
    world.kube.objects = {key: body for key, body in world.kube.objects.items() if key[0] != "Pod"}
    world.kube.version += 1
    world.watch()
    await world.look()
    wait = (world.next_look() or 0) - world.seconds
    assert (world.kube.asked, 0.8 * quiet_seconds <= wait <= quiet_seconds) == ([], True)


async def test_a_job_that_is_being_deleted_is_left_alone() -> None:
    body = submitted()
    body["metadata"]["deletionTimestamp"] = "2026-08-01T12:00:00Z"
    world = World(StandIn(body))
    await world.look()
    assert world.kube.asked == []


async def test_nothing_unexpected_ends_a_worker(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    del world.store.finetunejobs["team", "tune"]["metadata"]["uid"]
    with caplog.at_level(logging.ERROR):
        await world.look()
    assert world.next_look() is not None
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "team/tune: unexpected error",
        "team/tune: failed to report the error in the status",
    ]


async def test_an_event_that_cannot_be_written_does_not_fail_the_pass() -> None:
    world = World()
    world.kube.refuse["create", "Event"] = KubeError(403, "events is forbidden")
    await world.look()
    assert (world.status["phase"], world.next_look()) == ("Starting", world.seconds + 0.3)


# Whether the operator creates NetworkPolicies, and what is left of a job with two pods after its TTL besides Jobs: deleted in this order.
SWEPT = {
    "with a NetworkPolicy": (True, ["Service/tune", "ConfigMap/tune-train", "NetworkPolicy/tune"]),
    "without": (False, ["Service/tune", "ConfigMap/tune-train"]),
}


@pytest.mark.parametrize(("network_policies", "swept"), SWEPT.values(), ids=SWEPT)
async def test_children_are_swept_by_their_uid(swept: list[str], *, network_policies: bool) -> None:
    run_policy = {"ttlSecondsAfterFinished": 60, "activeDeadlineSeconds": 1}
    api = StandIn(submitted(runPolicy=run_policy, distributed={"nodes": 2}))
    # What the operator does not create, it may not list either.
    if not network_policies:
        api.refuse["list", "NetworkPolicy"] = KubeError(403, "no")
    world = World(api, settings=replace(NO_MLFLOW, network_policies=network_policies))
    await world.look()
    world.start_pod("tune-train-1")
    world.watch()
    world.seconds = 10
    await world.look()
    assert (world.status["phase"], world.kube.done("delete")) == ("Failed", ["Job/tune-train-1"])
    world.seconds = 100
    world.watch()
    await world.look()
    assert world.kube.done("delete") == swept
    assert {kind for kind, _, _ in world.kube.objects} == {"FineTuneJob", "Pod", "Event"}
    await world.look()
    assert world.kube.asked == []


NAME_OF_POLICY_TAKEN = "NetworkPolicy tune exists and has another owner: delete this object, or create a FineTuneJob with another name"
# Why the NetworkPolicy of a running job cannot be created (None: another object has its name), and what the Event says.
UNRESTORED: dict[str, tuple[KubeError | None, str, str]] = {
    "its name is taken": (None, "NameTaken", NAME_OF_POLICY_TAKEN),
    "a policy of the cluster refuses it": (KubeError(403, "denied"), "PodRejected", "denied"),
}


def upgrade(world: World) -> None:
    """The operator starts again as a version that creates NetworkPolicies."""
    world.settings = NO_MLFLOW
    world.restart()
    world.watch()
    for kind in ("Service", "ConfigMap"):
        bodies = [body for (stored_kind, _, _), body in world.kube.objects.items() if stored_kind == kind]
        world.store.replace(kind, bodies, world.kube.version)


@pytest.mark.parametrize(("refusal", "reason", "message"), UNRESTORED.values(), ids=UNRESTORED)
async def test_a_running_job_goes_on_without_its_network_policy(
    refusal: KubeError | None, reason: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(
        StandIn(submitted(distributed={"nodes": 2})), settings=replace(NO_MLFLOW, network_policies=False)
    )
    await world.look()
    if refusal:
        world.kube.refuse["create", "NetworkPolicy"] = refusal
    else:
        world.kube.keep({"kind": "NetworkPolicy", "metadata": {"name": "tune"}})
    upgrade(world)
    for seconds in (10.0, 20.0, 30.0):
        world.seconds = seconds
        await world.look()
        assert "NetworkPolicy/tune" in world.kube.done("create")
    world.kube.objects["Job", "team", "tune-train-1"]["status"] = {
        "conditions": [{"type": "Complete", "status": "True"}],
        "succeeded": 2,
    }
    world.watch()
    await world.look()
    condition = world.condition(ConditionType.TRAINED)
    assert condition is not None
    assert condition[0] != ConditionReason.TRAINING
    bodies = [body for (kind, _, _), body in world.kube.objects.items() if kind == "Event"]
    events = [(body["reason"], body["message"]) for body in bodies if "NetworkPolicy" in body["message"]]
    problem = f"NetworkPolicy tune cannot be created, and the running pods go on without it: {message}"
    assert events == [(reason, problem)]
    assert caplog.messages.count(f"{KEY}: {problem}") == 1


async def test_a_new_job_does_not_start_without_its_network_policy() -> None:
    world = World(StandIn(submitted(distributed={"nodes": 2})))
    world.kube.refuse["create", "NetworkPolicy"] = KubeError(403, "denied")
    await world.look()
    assert ("Job", "team", "tune-train-1") not in world.kube.objects
    assert world.condition(ConditionType.PODS_HEALTHY) == (ConditionReason.POD_REJECTED, "denied")


PROBLEM = Problem(ConditionReason.MLFLOW_FORBIDDEN, "no")
UNDONE: dict[str, tuple[Action, ConditionType, tuple[str, str, str]]] = {
    "a run that could not be made": (
        EnsureRun("e", "r", {}),
        ConditionType.TRACKED,
        ("False", ConditionReason.MLFLOW_FORBIDDEN, "no"),
    ),
    "a run that could not be closed": (
        FinishRun("r1", "FINISHED"),
        ConditionType.TRACKED,
        ("False", ConditionReason.MLFLOW_FORBIDDEN, "no"),
    ),
    "an alias that could not be set": (
        SetAlias("m", "candidate", "4"),
        ConditionType.REGISTERED,
        ("False", ConditionReason.REGISTERING, "alias candidate of m cannot be set: no"),
    ),
    "tags that could not be set": (
        TagVersion("m", "4", {"eval_f1": "1"}),
        ConditionType.EVALUATED,
        ("False", ConditionReason.MLFLOW_FORBIDDEN, "the metrics of the evaluation cannot be written: no"),
    ),
    "metrics that could not be logged": (
        LogMetrics("r1", {"eval_f1": 1.0}, 41),
        ConditionType.EVALUATED,
        ("False", ConditionReason.MLFLOW_FORBIDDEN, "the metrics of the evaluation cannot be written: no"),
    ),
}


@pytest.mark.parametrize(("action", "kind", "expected"), UNDONE.values(), ids=UNDONE)
def test_a_write_that_failed_is_in_the_status(
    action: Action, kind: ConditionType, expected: tuple[str, str, str]
) -> None:
    decision = conclude(ftj())
    after = record_failed_action(ftj(), decision, action, PROBLEM, now=NOW)
    assert said(after, kind) == expected
    assert (after.apply, after.status.phase) == (decision.apply, decision.status.phase)


def test_ready_says_which_write_failed() -> None:
    decision = conclude(ftj())
    trained = with_condition(
        decision.status,
        ConditionType.TRAINED,
        True,
        ConditionReason.TRAINED,
        "done",
        now=NOW,
        generation=1,
    )
    decision = dataclasses.replace(decision, status=trained)
    action = SetAlias("m", "candidate", "4")
    after = record_failed_action(ftj(), decision, action, PROBLEM, now=NOW)
    assert said(after, ConditionType.READY) == said(after, ConditionType.REGISTERED)


async def test_mlflow_that_refuses_a_write_does_not_keep_the_status_from_being_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise ExternalError(PROBLEM)

    monkeypatch.setattr(Server, "finish_run", refuse)
    world = World(settings=SETTINGS)
    after = read_finetunejob(world.kube.objects["FineTuneJob", "team", "tune"], Defaults())
    status = after.status.model_copy(update={"mlflow": MlflowStatus(run_id="r1")})
    decision = Decision(status=status, actions=(FinishRun("r1", "FAILED"),))
    with pytest.raises(ExternalError):
        await world.reconciler._carry_out(after, decision, NOW)
    assert world.status["mlflow"] == {"runId": "r1"}
    assert world.condition(ConditionType.TRACKED) == (ConditionReason.MLFLOW_FORBIDDEN, "no")


@dataclass
class Lagging:
    """MLflow on a replica of a database, which shows a new run after some seconds.

    Attributes:
        created: the ids of its runs.
        lag: whether it does not show them yet.
    """

    created: list[str] = field(default_factory=list)
    lag: bool = True

    def find_run(self, _uid: str, _experiment: str, run_id: str | None = None) -> Run | None:
        return None if self.lag or run_id not in self.created else Run(run_id, "e1", "RUNNING")

    def ensure_run(self, *_: Any) -> Run:
        self.created.append(f"r{len(self.created) + 1}")
        return Run(self.created[-1], "e1", "RUNNING")


async def test_a_run_that_mlflow_does_not_show_yet_is_created_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world, mlflow = World(settings=SETTINGS), Lagging()
    monkeypatch.setattr(Server, "find_run", mlflow.find_run)
    # A search shows a new run no sooner.
    monkeypatch.setattr(Server, "find_runs", lambda _server, _experiments: {})
    monkeypatch.setattr(Server, "ensure_run", mlflow.ensure_run)
    for second in range(50):
        world.seconds = float(second)
        await world.look()
        if second == 25:
            # Nothing but the status knows of the run.
            world.restart()
            world.watch()
    assert mlflow.created == ["r1"]
    assert world.status["mlflow"]["runId"] == "r1"
    assert world.condition(ConditionType.TRACKED) == (
        ConditionReason.RUN_NOT_FOUND,
        "MLflow run r1 cannot be found: the operator checks again before it creates another run",
    )
    mlflow.lag, world.seconds = False, 60.0
    await world.look()
    assert world.condition(ConditionType.TRACKED) == (ConditionReason.RUN_READY, "MLflow run r1")


async def test_a_new_job_writes_its_status_twice_until_its_pods_exist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first status records the run before pods log to it. The second describes the pods."""
    monkeypatch.setattr(Server, "ensure_run", lambda *_: Run("r1", "e1", "RUNNING"))
    monkeypatch.setattr(Server, "find_runs", lambda *_: {"r1": Run("r1", "e1", "RUNNING")})
    world = World(settings=SETTINGS)
    await world.look()
    assert world.kube.done("create", "status") == [*world.new_events(), "FineTuneJob/tune"]
    assert (world.status["phase"], world.status["mlflow"]["runId"]) == ("Starting", "r1")
    assert world.next_look() == world.seconds
    # The Job is created, and the status waits for pods.
    await world.look()
    assert world.kube.done("create", "status") == CHILDREN
    assert world.next_look() == world.seconds + 1.0
    world.start_pod("tune-train-1")
    world.watch()
    await world.look()
    assert world.kube.done("create", "status")[-1] == "FineTuneJob/tune"
    assert (world.status["attempt"], world.status["phase"]) == (1, "Training")


@pytest.mark.parametrize("is_restarted", [False, True], ids=["by itself", "after a restart"])
async def test_a_status_that_waited_is_written_without_pods(
    monkeypatch: pytest.MonkeyPatch, *, is_restarted: bool
) -> None:
    monkeypatch.setattr(Server, "ensure_run", lambda *_: Run("r1", "e1", "RUNNING"))
    monkeypatch.setattr(Server, "find_runs", lambda *_: {"r1": Run("r1", "e1", "RUNNING")})
    world = World(settings=SETTINGS)
    for _ in range(2):
        await world.look()
    assert world.status.get("attempt") is None
    if is_restarted:
        world.restart()
        world.watch()
    await world.look()
    assert "Job/tune-train-1" not in world.kube.done("create")
    assert world.kube.done("status") == ["FineTuneJob/tune"]
    assert (world.status["attempt"], world.status["nodes"]["summary"]) == (1, "0/1")


async def test_the_first_status_waits_for_a_slow_run_but_not_long(monkeypatch: pytest.MonkeyPatch) -> None:
    may_answer = threading.Event()

    def ensure_run(*_: object) -> Run:
        may_answer.wait(60)
        return Run("r1", "e1", "RUNNING")

    monkeypatch.setattr(Server, "ensure_run", ensure_run)
    world = World(settings=SETTINGS)
    world.reconciler.observer.pace.patience_seconds = 0.01
    await world.look()
    assert (world.status, world.next_look()) == ({}, 5.0)
    world.seconds = 5.0
    await world.look()
    assert world.kube.done("create", "status") == [*world.new_events(), "FineTuneJob/tune"]
    await world.look()
    assert world.condition(ConditionType.TRAINED) == (
        ConditionReason.STARTING,
        "training waits for MLflow: the MLflow run is being created",
    )
    # No write is repeated, and no pass follows at once.
    assert world.kube.done("create", "status") == []
    assert world.next_look() == world.seconds + SETTINGS.poll_seconds
    may_answer.set()
    assert await asyncio.wait_for(world.queue.take(), 60) == KEY
    world.queue.done(KEY)
    await world.look()
    assert world.status["mlflow"]["runId"] == "r1"


async def test_numbers_go_to_the_run_before_the_version_says_that_it_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[Any] = []
    monkeypatch.setattr(Server, "log_metrics", lambda _, *arguments: written.append(arguments))
    monkeypatch.setattr(MlflowRegistry, "set_tags", lambda _, *arguments: written.append(arguments))
    world = World(settings=SETTINGS)
    after = read_finetunejob(world.kube.objects["FineTuneJob", "team", "tune"], Defaults())
    actions = (LogMetrics("r1", {"eval_f1": 0.5}, 41), TagVersion("m", "4", {"eval_f1": "0.5"}))
    await world.reconciler.applier.apply(after, Decision(status=after.status, actions=actions), NOW)
    assert written == [("r1", {"eval_f1": 0.5}, 41), ("m", "4", {"eval_f1": "0.5"})]


async def test_an_alias_waits_for_another_replica_without_a_complaint(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(settings=SETTINGS)
    name = build_lease_name("http://mlflow:5000", "m")
    world.kube.keep(
        {
            "kind": "Lease",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"holderIdentity": "somebody"},
        }
    )
    deciding = Decision(
        status=read_finetunejob(submitted_as_kept(world), Defaults()).status,
        actions=(SetAlias("m", "a", "4"),),
    )
    monkeypatch.setattr(module, "decide", lambda *_: deciding)
    monkeypatch.setattr(RunPoller, "_read", no_answer)
    with caplog.at_level(logging.INFO):
        await world.look()
    complaints = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert (complaints, world.next_look()) == ([], world.seconds + BUSY_SECONDS)
    message = f"alias a of m cannot be set: Lease default/{name} is held by somebody: retrying"
    assert world.condition(ConditionType.REGISTERED) == (ConditionReason.REGISTERING, message)


def submitted_as_kept(world: World) -> Json:
    return world.kube.objects["FineTuneJob", "team", "tune"]


async def no_answer(*_: Any, **__: Any) -> None:
    """MLflow is not asked."""
