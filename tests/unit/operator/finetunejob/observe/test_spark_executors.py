"""Which executors the operator reads, and how it learns why others are missing."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator import names
from finetune_operator.finetunejob.observe.spark_executors import ExecutorReader, Executors
from finetune_operator.kube import KubeError
from fixtures.fake_kube import StandIn
from fixtures.operator_in_memory.decisions import SETTINGS, UID, condition, ftj, later, pod, status
from unit.operator.finetunejob.preparation.test_executors import data, executor, running

Json = dict[str, Any]
PREPARED = condition(ConditionType.PREPARED, "True", ConditionReason.PREPARED)
LIST = ("list", "Pod", f"finetune.dev/job-uid={UID},finetune.dev/component=prep-executor")
TRIAL = ("rehearse", "Pod", "tune-prep-executor")
QUOTA = 'pods "tune-prep-executor" is forbidden: exceeded quota: team'


async def read(kube: StandIn, pods: list[Json], job: Any = None) -> Executors:
    return await ExecutorReader(kube, SETTINGS).read(job or ftj(data=data()), pods, later(30))


NOT_READ: dict[str, tuple[Any, list[Json]]] = {
    "Spark in one pod": (ftj(data=data(spark={"mode": "Local"})), [running(0)]),
    "prepared": (ftj(status(PREPARED), data=data()), [running(0)]),
    "no driver": (ftj(data=data()), [pod("tune-train-1")]),
    "a driver that ended": (ftj(data=data()), [pod("tune-prep", 0, "Failed", component=names.PREP)]),
}


@pytest.mark.parametrize(("job", "pods"), NOT_READ.values(), ids=NOT_READ)
async def test_nothing_is_read_where_no_executor_can_be(job: Any, pods: list[Json]) -> None:
    kube = StandIn({"kind": "Pod", **executor(1)})
    assert await read(kube, pods, job) == Executors()
    assert kube.asked == []


async def test_executors_that_are_missing_are_tried() -> None:
    kube = StandIn({"kind": "Pod", **executor(1)})
    kube.refuse["rehearse", "Pod"] = KubeError(403, QUOTA)
    answer = await read(kube, [running(0)])
    assert [item["metadata"]["name"] for item in answer.pods] == ["tune-prep-0-abcde-exec-1"]
    assert answer.refusal == f"1 of 2 executors cannot be created: {QUOTA}"
    assert kube.asked == [LIST, TRIAL]


TRIED: dict[str, KubeError | None] = {
    "it could be created": None,
    "a server that fails": KubeError(500, "no"),
}


@pytest.mark.parametrize("error", TRIED.values(), ids=TRIED)
async def test_a_trial_that_says_nothing(error: KubeError | None) -> None:
    kube = StandIn()
    if error:
        kube.refuse["rehearse", "Pod"] = error
    assert await read(kube, [running(0)]) == Executors()
    assert kube.asked == [LIST, TRIAL]


async def test_executors_that_cannot_be_listed_do_not_end_the_pass() -> None:
    kube = StandIn()
    kube.refuse["list", "Pod"] = KubeError(403, "forbidden")
    assert await read(kube, [running(0)]) == Executors()
