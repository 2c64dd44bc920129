"""Whether the queue exists that a training Job names."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_operator.finetunejob.observe.queues import find_missing_queue
from finetune_operator.kube import KubeError
from fixtures.fake_kube import StandIn

Json = dict[str, Any]
NOT_FOUND = KubeError(404, "the server could not find the requested resource")
FORBIDDEN = KubeError(403, "localqueues is forbidden")


def naming(queue: str | None, kind: str = "Job") -> Json:
    labels = {"kueue.x-k8s.io/queue-name": queue} if queue else {}
    return {"kind": kind, "metadata": {"name": "tune-train-1", "namespace": "team", "labels": labels}}


def queues(*names: str, kind: str = "LocalQueue", namespace: str = "team") -> list[Json]:
    return [{"kind": kind, "metadata": {"name": name, "namespace": namespace}} for name in names]


# What names the queue, the queues, what the API server refuses by kind, and what is said.
ANSWERS: dict[str, tuple[Json, list[Json], dict[str, KubeError], str | None]] = {
    "no queue": (naming(None), [], {}, None),
    "a pod": (naming("gpus", "Pod"), [], {}, None),
    "its queue": (naming("gpus"), queues("cpus", "gpus"), {}, None),
    "its queue in an older Kueue": (
        naming("gpus"),
        queues("gpus", kind="LocalQueueBeta1"),
        {"LocalQueue": NOT_FOUND},
        None,
    ),
    "another queue": (
        naming("gpu"),
        queues("gpus", "cpus"),
        {},
        "queue gpu does not exist; namespace team has only cpus, gpus",
    ),
    "many others": (
        naming("gpu"),
        queues(*"abcdefg"),
        {},
        "queue gpu does not exist; namespace team has only a, b, c, d, e and 2 more",
    ),
    "the queue of another namespace": (
        naming("gpus"),
        queues("gpus", namespace="other"),
        {},
        "queue gpus does not exist; namespace team has no LocalQueue",
    ),
    "no Kueue": (
        naming("gpus"),
        [],
        {"LocalQueue": NOT_FOUND, "LocalQueueBeta1": NOT_FOUND},
        "queue gpus cannot admit the job, because Kueue is not installed in this cluster",
    ),
    "queues that may not be read": (naming("gpus"), [], {"LocalQueue": FORBIDDEN}, None),
    "an API server that is away": (naming("gpus"), [], {"LocalQueue": KubeError(0, "away")}, None),
}


@pytest.mark.parametrize(("body", "exist", "refuse", "expected"), ANSWERS.values(), ids=ANSWERS)
async def test_a_queue(
    body: Json, exist: list[Json], refuse: dict[str, KubeError], expected: str | None
) -> None:
    kube = StandIn(*exist)
    kube.refuse = {("list", kind): error for kind, error in refuse.items()}
    assert await find_missing_queue(kube, body) == expected
