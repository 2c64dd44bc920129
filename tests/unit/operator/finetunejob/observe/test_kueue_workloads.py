"""What Kueue says of a training Job that waits."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from finetune_operator.finetunejob.model import QueueState
from finetune_operator.finetunejob.observe.kueue_workloads import WorkloadReader
from finetune_operator.kube import KubeError, Listing
from fixtures.fake_kube import StandIn
from fixtures.operator_in_memory.decisions import NOW, child, controller, ftj, later, running
from fixtures.operator_in_memory.reads import wait_for_answers

Json = dict[str, Any]
JOB = "tune-train-1"
NOT_FOUND = KubeError(404, "the server could not find the requested resource")
FORBIDDEN = KubeError(403, "workloads is forbidden")


def suspended(ended: str = "", *, suspend: bool = True, queue: str = "gpus", name: str = JOB) -> Json:
    states = child(name, ended)
    states["spec"]["suspend"] = suspend
    states["metadata"]["labels"] |= {"kueue.x-k8s.io/queue-name": queue} if queue else {}
    return states


def workload(*conditions: tuple[str, str, str, str], uid: str = f"uid-of-{JOB}", **status: Any) -> Json:
    """A Workload; its conditions are type, status, reason and message."""
    keys = ("type", "status", "reason", "message")
    conditions_json = [dict(zip(keys, item, strict=True)) for item in conditions]
    meta = {"name": "job-tune-x", "ownerReferences": [controller("batch/v1", "Job", uid)]}
    return {"kind": "Workload", "metadata": meta, "status": {"conditions": conditions_json, **status}}


def pending(*names: str) -> Json:
    items = [{"metadata": {"name": name}, "positionInLocalQueue": at} for at, name in enumerate(names)]
    return {"kind": "QueueVisibility", "metadata": {"name": "gpus"}, "items": items}


FULL = ("QuotaReserved", "False", "Pending", "insufficient unused quota")
RESERVED = ("QuotaReserved", "True", "QuotaReserved", "Quota reserved in ClusterQueue all")
CHECK = {"name": "provision", "state": "Pending", "message": "waiting for nodes"}
CHECKING = "its quota is reserved; it waits for the admission check provision (waiting for nodes)"

SAID: dict[str, tuple[list[Json], QueueState]] = {
    "no Workload": ([], QueueState(workload=False, read_at=NOW)),
    "the Workload of another Job": ([workload(FULL, uid="other")], QueueState(workload=False, read_at=NOW)),
    "one that Kueue has not looked at": ([workload()], QueueState()),
    "no room": ([workload(FULL)], QueueState(reason="Pending", message="insufficient unused quota")),
    "its position": (
        [workload(FULL), pending("job-a-y", "job-tune-x")],
        QueueState(reason="Pending", message="insufficient unused quota", position=2),
    ),
    "a queue of others": (
        [workload(FULL), pending("job-a-y")],
        QueueState(reason="Pending", message="insufficient unused quota"),
    ),
    "a queue that does not exist": (
        [workload(("QuotaReserved", "False", "Inadmissible", "LocalQueue gpus doesn't exist"))],
        QueueState(reason="Inadmissible", message="LocalQueue gpus doesn't exist"),
    ),
    "checks after the quota": (
        [workload(RESERVED, admissionChecks=[CHECK, {"name": "done", "state": "Ready"}])],
        QueueState(message=CHECKING),
    ),
    "evicted": (
        [workload(FULL, ("Evicted", "True", "Preempted", "Preempted to accommodate a workload"))],
        QueueState(
            reason="Pending",
            message="insufficient unused quota",
            eviction_reason="Preempted",
            eviction_message="Preempted to accommodate a workload",
        ),
    ),
    "evicted, and its pods still stop": (
        [
            workload(
                RESERVED,
                ("Admitted", "True", "Admitted", "ok"),
                ("Evicted", "True", "Preempted", "for another"),
            )
        ],
        QueueState(eviction_reason="Preempted", eviction_message="for another"),
    ),
    "admitted after an eviction": (
        [
            workload(
                RESERVED, ("Admitted", "True", "Admitted", "ok"), ("Evicted", "False", "QuotaReserved", "ok")
            )
        ],
        QueueState(admitted=True),
    ),
    "admitted": (
        [workload(RESERVED, ("Admitted", "True", "Admitted", "The workload is admitted"))],
        QueueState(admitted=True),
    ),
}


@pytest.mark.parametrize(("exist", "expected"), SAID.values(), ids=SAID)
async def test_said(exist: list[Json], expected: QueueState) -> None:
    reader = WorkloadReader(StandIn(*exist), wait_for_answers(lambda: 0.0))
    assert await reader.read(ftj(running()), {JOB: suspended()}, NOW) == expected


QUIET: dict[str, dict[str, Json]] = {
    "no Job": {},
    "a Job that runs": {JOB: suspended(suspend=False)},
    "a Job that ended": {JOB: suspended("Failed")},
    "a Job that no queue holds": {JOB: suspended(queue="")},
    "a Job of another attempt": {"tune-train-2": suspended()},
}


@pytest.mark.parametrize("jobs", QUIET.values(), ids=QUIET)
async def test_nothing_is_asked_about_what_waits_in_no_queue(jobs: dict[str, Json]) -> None:
    kube = StandIn()
    assert await WorkloadReader(kube, wait_for_answers(lambda: 0.0)).read(ftj(running()), jobs, NOW) is None
    assert kube.asked == []


async def test_an_evaluation_is_looked_up_once_the_training_has_ended() -> None:
    kube = StandIn(workload(FULL, uid="uid-of-tune-evaluate"))
    jobs = {JOB: suspended("Complete", suspend=False), "tune-evaluate": suspended(name="tune-evaluate")}
    states = await WorkloadReader(kube, wait_for_answers(lambda: 0.0)).read(ftj(running()), jobs, NOW)
    assert states == QueueState(reason="Pending", message="insufficient unused quota")


async def test_a_preparation_is_looked_up() -> None:
    kube = StandIn(workload(FULL, uid="uid-of-tune-prep"))
    jobs = {"tune-prep": suspended(name="tune-prep")}
    states = await WorkloadReader(kube, wait_for_answers(lambda: 0.0)).read(ftj(running()), jobs, NOW)
    assert states == QueueState(reason="Pending", message="insufficient unused quota")


REFUSED: dict[str, tuple[dict[str, KubeError], QueueState | None]] = {
    "no Kueue": ({"Workload": NOT_FOUND, "WorkloadBeta1": NOT_FOUND}, QueueState(installed=False)),
    "an older Kueue": (
        {"Workload": NOT_FOUND},
        QueueState(reason="Pending", message="insufficient unused quota"),
    ),
    "a Kueue that may not be read": ({"Workload": FORBIDDEN}, None),
    "an API server that is away": ({"Workload": KubeError(0, "away")}, None),
    "positions that may not be read": (
        {"QueueVisibility": FORBIDDEN},
        QueueState(reason="Pending", message="insufficient unused quota"),
    ),
}


@pytest.mark.parametrize(("refuse", "expected"), REFUSED.values(), ids=REFUSED)
async def test_what_cannot_be_read_does_not_end_the_pass(
    refuse: dict[str, KubeError], expected: QueueState | None
) -> None:
    kube = StandIn(workload(FULL), {**workload(FULL), "kind": "WorkloadBeta1"})
    kube.refuse = {
        ("get" if kind == "QueueVisibility" else "list", kind): error for kind, error in refuse.items()
    }
    assert (
        await WorkloadReader(kube, wait_for_answers(lambda: 0.0)).read(
            ftj(running()), {JOB: suspended()}, NOW
        )
        == expected
    )


async def test_all_jobs_of_a_namespace_share_a_list_for_five_seconds() -> None:
    kube, seconds = StandIn(), 0.0
    reader = WorkloadReader(kube, wait_for_answers(lambda: seconds))
    counts = []
    for now in (0.0, 4.9, 5.0):
        seconds = now
        for _ in range(3):
            await reader.read(ftj(running()), {JOB: suspended()}, NOW)
        counts.append(len(kube.asked))
    assert counts == [1, 1, 2]


async def test_a_missing_workload_is_as_old_as_the_list() -> None:
    seconds = 0.0
    reader = WorkloadReader(StandIn(), wait_for_answers(lambda: seconds))
    for seconds, read in ((0.0, 0.0), (4.5, 0.0), (5.0, 5.0)):
        states = await reader.read(ftj(running()), {JOB: suspended()}, later(seconds))
        assert states == QueueState(workload=False, read_at=later(read))


class Slow(StandIn):
    """Answers a list when it is told to."""

    def __init__(self, *objects: Json) -> None:
        super().__init__(*objects)
        self.is_asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def list(
        self,
        kind: str,
        namespace: str | None,
        *,
        metadata_only: bool = False,
        project: Callable[[Json], Json] | None = None,
        **selectors: str,
    ) -> Listing:
        listing = await super().list(
            kind, namespace, metadata_only=metadata_only, project=project, **selectors
        )
        self.is_asked.set()
        await self.may_answer.wait()
        return listing


async def test_all_that_read_at_the_same_time_share_a_list_however_long_it_takes() -> None:
    kube, seconds = Slow(workload(FULL), pending("job-tune-x")), 0.0
    reader = WorkloadReader(kube, wait_for_answers(lambda: seconds))

    async def answer() -> None:
        nonlocal seconds
        await kube.is_asked.wait()
        seconds = 60.0
        kube.may_answer.set()

    reads = [
        reader.read(dataclasses.replace(ftj(running()), uid=f"u{number}"), {JOB: suspended()}, NOW)
        for number in range(16)
    ]
    *states, _ = await asyncio.wait_for(asyncio.gather(*reads, answer()), timeout=10)
    assert states == [QueueState(reason="Pending", message="insufficient unused quota", position=1)] * 16
    assert kube.done("list", "get") == ["Workload/", "QueueVisibility/gpus"]


async def test_a_read_that_is_cancelled_leaves_the_others_theirs() -> None:
    kube = Slow(workload(FULL))
    reader = WorkloadReader(kube, wait_for_answers(lambda: 0.0))
    first, second = (
        asyncio.create_task(
            reader.read(dataclasses.replace(ftj(running()), uid=uid), {JOB: suspended()}, NOW)
        )
        for uid in ("u1", "u2")
    )
    await asyncio.wait_for(kube.is_asked.wait(), timeout=10)
    first.cancel()
    kube.may_answer.set()
    assert await asyncio.wait_for(second, timeout=10) == QueueState(
        reason="Pending", message="insufficient unused quota"
    )
