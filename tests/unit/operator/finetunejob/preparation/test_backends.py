"""The backends of preparations: which there are, and what another one takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.contract import PrepResult
from finetune_crds.spark import Spark
from finetune_crds.status import SplitCounts
from finetune_operator import names
from finetune_operator.errors import Problem
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.model import CustomChildren, FineTuneJob
from finetune_operator.finetunejob.pods import template
from finetune_operator.finetunejob.preparation import backends, result
from finetune_operator.finetunejob.preparation.backend import Backend, CustomKind
from finetune_operator.kube import KubeError
from finetune_operator.policy.result import Continue, Outcome, Stop
from fixtures.fake_kube import StandIn
from fixtures.operator_in_memory.decisions import SOURCE
from unit.operator.finetunejob.test_reconcile import World, submitted

Json = dict[str, Any]
RAY_JOB = ("RayJob", "team", "tune-prep")
RESULT = PrepResult(
    rows=SplitCounts(train=9), tokens=SplitCounts(train=90), path="/data/splits", version=1
).model_dump(mode="json")


def test_each_mode_of_the_api_has_one_backend() -> None:
    modes = get_args(Spark.model_fields["mode"].annotation)
    assert sorted(mode for backend in backends.BACKENDS for mode in backend.modes) == sorted(modes)


class RayBackend(Backend):
    """A fourth backend: a RayJob, whose status has the result. It takes over mode Local, since the API has no mode of Ray."""

    modes = ("Local",)
    custom_kind = CustomKind(
        name="RayJob",
        missing=Problem(ConditionReason.SPARK_OPERATOR_MISSING, "this cluster has no RayJobs"),
        forbidden=Problem(
            ConditionReason.SPARK_OPERATOR_FORBIDDEN, "the operator may not read RayJobs ({error})"
        ),
        remedy="install KubeRay, and the job continues",
    )

    def has_begun(self, ftj: FineTuneJob, jobs: Mapping[str, Json]) -> bool:
        return ftj.status.start_time is not None

    def reads_custom_kind(self, ftj: FineTuneJob) -> bool:
        return not ftj.holds(ConditionType.PREPARED)

    def prepare(self, draft: Draft) -> Outcome:
        ray_jobs, name = draft.observed.custom_children or CustomChildren(), names.prep_name(draft.ftj.name)
        if ray_jobs.problem:
            draft.set(ConditionType.PREPARED, False, ray_jobs.problem.reason, ray_jobs.problem.message)
            return Stop
        ray_job = ray_jobs.by_name.get(name)
        reported = (ray_job or {}).get("status")
        if reported:
            result.record_result(draft, PrepResult.model_validate(reported))
            return Continue
        if ray_job is None:
            draft.record_start()
            draft.apply.append({"kind": "RayJob", "metadata": template.metadata(draft.ftj, name, names.PREP)})
        draft.set(ConditionType.PREPARED, False, ConditionReason.PREPARING, f"RayJob {name} is running")
        return Stop

    def stop(self, draft: Draft) -> str | None:
        ray_jobs = draft.observed.custom_children or CustomChildren()
        for ray_job in ray_jobs.by_name.values():
            draft.remove(ray_job, "RayJob")
        return "waiting for its RayJob to stop" if ray_jobs.by_name else None


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(backends, "BACKENDS", (RayBackend(), *backends.BACKENDS))
    policy = {"ttlSecondsAfterFinished": 60, "activeDeadlineSeconds": 600}
    return World(StandIn(submitted(data=SOURCE, runPolicy=policy)))


async def look(world: World) -> tuple[str, str] | None:
    """Reason and message of Prepared after a pass."""
    world.watch()
    await world.look()
    return world.condition(ConditionType.PREPARED)


async def test_a_fourth_backend_prepares_a_job(world: World) -> None:
    assert await look(world) == ("Preparing", "RayJob tune-prep is running")
    assert world.kube.done("create", "apply")[:1] == ["RayJob/tune-prep"]
    assert await look(world) == ("Preparing", "RayJob tune-prep is running")
    assert world.kube.done("create", "apply", "delete") == []
    world.kube.objects[RAY_JOB]["status"] = RESULT
    assert await look(world) == (
        "Prepared",
        "/data/splits version 1: 9 train, 0 validation, 0 test rows",
    )
    assert world.status["data"]["version"] == 1
    assert "Job/tune-train-1" in world.kube.done("create")


async def test_a_suspended_job_stops_a_fourth_backend(world: World) -> None:
    await look(world)
    body = world.kube.objects["FineTuneJob", "team", "tune"]
    world.kube.keep({**body, "spec": {**body["spec"], "suspend": True}})
    await look(world)
    assert world.kube.done("delete") == ["RayJob/tune-prep"]
    assert world.condition(ConditionType.SUSPENDED) == ("Suspended", "waiting for its RayJob to stop")
    await look(world)
    assert world.condition(ConditionType.SUSPENDED) == (
        "Suspended",
        "no pod runs; set suspend to false to resume",
    )


async def test_what_a_fourth_backend_leaves_is_swept(world: World) -> None:
    await look(world)
    world.kube.objects[RAY_JOB]["status"] = RESULT
    await look(world)
    world.start_pod("tune-train-1")
    world.seconds = 601
    await look(world)
    assert (world.status["phase"], RAY_JOB in world.kube.objects) == ("Failed", True)
    world.seconds = 700
    await look(world)
    assert RAY_JOB not in world.kube.objects


REFUSED = {
    404: ("SparkOperatorMissing", "this cluster has no RayJobs"),
    403: ("SparkOperatorForbidden", "the operator may not read RayJobs (no)"),
}


@pytest.mark.parametrize(("code", "expected"), REFUSED.items())
async def test_a_job_waits_for_the_kind_of_a_fourth_backend(
    world: World, code: int, expected: tuple[str, str]
) -> None:
    world.kube.refuse["list", "RayJob"] = KubeError(code, "no")
    assert await look(world) == expected


async def test_a_refused_object_says_what_to_correct(world: World) -> None:
    world.kube.refuse["create", "RayJob"] = KubeError(422, "spec: Required value")
    await look(world)
    assert world.condition(ConditionType.PODS_HEALTHY) == (
        "PodTemplateInvalid",
        "spec: Required value: install KubeRay, and the job continues",
    )
