"""Why pods cannot be created, from Events."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_operator.finetunejob.observe.rejections import read_rejections
from finetune_operator.kube import KubeError
from fixtures.fake_kube import StandIn
from fixtures.operator_in_memory.decisions import child, ftj, later, pod

Json = dict[str, Any]
JOB = "tune-train-1"
CREATED: Json = {"creationTimestamp": "2026-08-01T12:00:00Z"}


def refusal(text: str, at: int) -> Json:
    stamp = later(at).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"kind": "Event", "metadata": {"name": f"e{at}"}, "message": text, "lastTimestamp": stamp}


SAID = {JOB: f"pods of Job {JOB} cannot be created: exceeded quota"}
REJECTED: dict[str, tuple[Json, int, int, dict[str, str]]] = {
    "no pod": (child(JOB, **CREATED), 0, 5, SAID),
    "some pods": (child(JOB, **CREATED), 1, 5, SAID),
    "all pods": (child(JOB, **CREATED), 2, 5, {}),
    "no pod yet": (child(JOB, **CREATED), 0, 4, {}),
    "a queued job": (child(JOB, **CREATED) | {"spec": {"parallelism": 2, "suspend": True}}, 0, 60, {}),
    "a Job that ended": (child(JOB, "Failed", **CREATED), 0, 60, {}),
    "a Job that is being deleted": (child(JOB, **CREATED, deletionTimestamp="t"), 0, 60, {}),
}


@pytest.mark.parametrize(("job", "count", "seconds", "expected"), REJECTED.values(), ids=REJECTED)
async def test_events_tell_why_pods_are_missing(
    job: Json, count: int, seconds: int, expected: dict[str, str]
) -> None:
    kube = StandIn(refusal("exceeded quota", 3), refusal("an older word", 1))
    pods = [pod(JOB, index) for index in range(count)]
    assert await read_rejections(kube, ftj(), {JOB: job}, pods, later(seconds)) == expected
    selector = f"involvedObject.uid=uid-of-{JOB},reason=FailedCreate"
    assert kube.asked == ([("list", "Event", selector)] if expected else [])


async def test_events_that_cannot_be_read_do_not_end_the_pass() -> None:
    kube = StandIn()
    kube.refuse["list", "Event"] = KubeError(403, "events is forbidden")
    assert await read_rejections(kube, ftj(), {JOB: child(JOB, **CREATED)}, [], later(60)) == {}
