"""Events about pods that wait: of which pods they are read, how often, and when they occurred."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_operator.finetunejob.model import PodEvent
from finetune_operator.finetunejob.observe.pod_events import PodEventReader
from finetune_operator.kube import KubeError
from fixtures.fake_kube import StandIn
from fixtures.operator_in_memory.decisions import ftj, later, pod, stamped

Json = dict[str, Any]
JOB = "tune-train-1"
UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU"}


def without_node(index: int) -> Json:
    return pod(JOB, index, "Pending", ready=False, conditions=[UNSCHEDULABLE])


def pending_on_node(index: int, since: float) -> Json:
    return pod(JOB, index, "Pending", ready=False, node="node-1", startTime=stamped(since))


ASKED: dict[str, tuple[list[Json], list[int]]] = {
    "no pods": ([], []),
    "pods that run": ([pod(JOB, 0), pod(JOB, 1)], []),
    "a pod that the scheduler has not seen": ([pod(JOB, 0, "Pending", ready=False)], []),
    "one without a node": ([pod(JOB, 0), without_node(1)], [1]),
    "the first and the last of many": ([without_node(index) for index in range(9)], [0, 8]),
    "one that was given a node just now": ([pending_on_node(0, since=25)], []),
    "the first that takes long to start": (
        [pending_on_node(0, 25), pending_on_node(1, 20), pending_on_node(2, 0)],
        [1],
    ),
    "both kinds": ([without_node(0), pending_on_node(1, 0)], [0, 1]),
}


@pytest.mark.parametrize(("alive", "expected"), ASKED.values(), ids=ASKED)
async def test_few_pods_are_asked_about(alive: list[Json], expected: list[int]) -> None:
    kube = StandIn()
    answer = await PodEventReader(kube, lambda: 0.0).read(ftj(), alive, later(30))
    assert answer == {f"{JOB}-{index}-abcde": () for index in expected}
    selectors = [f"involvedObject.uid=uid-of-{JOB}-{index}-abcde" for index in expected]
    assert kube.asked == [("list", "Event", selector) for selector in selectors]


async def test_events_are_in_the_order_of_their_last_occurrence() -> None:
    bodies: list[Json] = [
        {"reason": "Nominated", "message": "soon", "lastTimestamp": stamped(9), "count": 2},
        {
            "reason": "FailedScheduling",
            "message": "no\n GPU",
            "eventTime": stamped(1),
            "series": {"lastObservedTime": stamped(12)},
        },
        {"reason": "Created", "metadata": {"creationTimestamp": stamped(3)}},
        {"reason": "Pulled", "message": "", "lastTimestamp": None, "eventTime": stamped(5)},
    ]
    events = [
        {"kind": "Event", **body, "metadata": {"name": f"e{index}", **body.get("metadata", {})}}
        for index, body in enumerate(bodies)
    ]
    answer = await PodEventReader(StandIn(*events), lambda: 0.0).read(ftj(), [without_node(0)], later(30))
    assert [*answer.values()] == [
        (
            PodEvent("Created", "", later(3)),
            PodEvent("Pulled", "", later(5)),
            PodEvent("Nominated", "soon", later(9)),
            PodEvent("FailedScheduling", "no GPU", later(12)),
        )
    ]


async def test_a_pod_is_asked_about_once_in_ten_seconds() -> None:
    kube, seconds = StandIn(), 0.0
    reader = PodEventReader(kube, lambda: seconds)
    requests = []
    for now in (0.0, 5.0, 9.9, 10.0, 19.0, 20.0):
        seconds = now
        await reader.read(ftj(), [without_node(0)], later(now))
        requests.append(len(kube.asked))
    assert requests == [1, 1, 1, 2, 2, 3]


async def test_events_that_cannot_be_read_do_not_end_the_pass() -> None:
    kube = StandIn()
    kube.refuse["list", "Event"] = KubeError(0, "away")
    assert await PodEventReader(kube, lambda: 0.0).read(ftj(), [without_node(0)], later(30)) == {}
