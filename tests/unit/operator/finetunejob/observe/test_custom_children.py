"""Which objects of another operator's kind the operator reads, and the pods that the job controls, and what it says where it cannot."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.errors import Problem
from finetune_operator.finetunejob.model import CustomChildren
from finetune_operator.finetunejob.observe.custom_children import CustomChildReader
from finetune_operator.kube import KubeError
from fixtures.fake_kube import StandIn
from fixtures.operator_in_memory.decisions import UID, condition, controller, ftj, status
from unit.operator.finetunejob.preparation.test_spark_application import application, driver
from unit.operator.finetunejob.preparation.test_spark_manifest import data

Json = dict[str, Any]
OWNER = [controller("finetune.dev/v1alpha1", "FineTuneJob", UID)]
PREPARED = condition(ConditionType.PREPARED, "True", ConditionReason.PREPARED)


async def test_what_the_job_controls_is_read() -> None:
    own_application = {"kind": "SparkApplication", **application(ownerReferences=OWNER)}
    forged = {"kind": "SparkApplication", **application(name="forged")}
    pods: list[Json] = [{"kind": "Pod", **driver()}, {"kind": "Pod", **driver(name="forged")}]
    del pods[1]["metadata"]["ownerReferences"]
    kube = StandIn(own_application, forged, *pods)
    answer = await CustomChildReader(kube).read(ftj(data=data()))
    assert answer
    assert ([*answer.by_name], [pod["metadata"]["name"] for pod in answer.pods]) == (
        ["tune-prep-1"],
        ["tune-prep-1-driver"],
    )
    assert kube.asked == [
        ("list", "SparkApplication", f"finetune.dev/job-uid={UID}"),
        ("list", "Pod", f"finetune.dev/job-uid={UID},finetune.dev/component=prep"),
    ]


async def test_nothing_is_read_of_other_jobs() -> None:
    kube = StandIn()
    for job in (ftj(data=data({"mode": "Kubernetes"})), ftj(status(PREPARED), data=data())):
        assert await CustomChildReader(kube).read(job) is None
    assert kube.asked == []


PROBLEMS = {
    404: (ConditionReason.SPARK_OPERATOR_MISSING, "install the spark-operator, and the job continues"),
    403: (ConditionReason.SPARK_OPERATOR_FORBIDDEN, "install the chart with rbac.sparkApplications"),
}


@pytest.mark.parametrize(("code", "expected"), PROBLEMS.items())
async def test_without_the_spark_operator_or_its_rights(
    code: int, expected: tuple[ConditionReason, str]
) -> None:
    kube = StandIn()
    kube.refuse["list", "SparkApplication"] = KubeError(code, "no")
    answer = await CustomChildReader(kube).read(ftj(data=data()))
    assert isinstance(answer, CustomChildren)
    assert isinstance(answer.problem, Problem)
    assert (answer.problem.reason, expected[1] in answer.problem.message) == (expected[0], True)


async def test_an_api_server_that_is_away_is_asked_again() -> None:
    kube = StandIn()
    kube.refuse["list", "SparkApplication"] = KubeError(0, "no answer")
    with pytest.raises(KubeError):
        await CustomChildReader(kube).read(ftj(data=data()))
