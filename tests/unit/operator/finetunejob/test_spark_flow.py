"""Passes over a job whose preparation is a SparkApplication: what is made once, taken over, and deleted."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.conditions import ConditionType
from finetune_operator.kube import KubeError
from fixtures.fake_kube import StandIn
from unit.operator.finetunejob.preparation.test_spark_application import driver
from unit.operator.finetunejob.preparation.test_spark_manifest import data
from unit.operator.finetunejob.test_reconcile import World, submitted

Json = dict[str, Any]
FIRST = ("SparkApplication", "team", "tune-prep-1")


class Allowing(StandIn):
    """An API server under which the account of the driver may create pods."""

    async def create(self, body: Json, *, dry_run: bool = False) -> Json:
        created = await super().create(body, dry_run=dry_run)
        return {**created, "status": {"allowed": True}} if dry_run else created


def started(**spec: Any) -> World:
    return World(Allowing(submitted(data=data(), **spec)))


async def test_a_crash_after_the_creation_makes_no_second_one() -> None:
    world = started()
    world.kube.refuse["status", "FineTuneJob"] = KubeError(409, "modified meanwhile", "Conflict")
    await world.look()
    uid = world.kube.objects[FIRST]["metadata"]["uid"]
    del world.kube.refuse["status", "FineTuneJob"]
    world.restart()
    world.watch()
    await world.look()
    uids = {key: body["metadata"]["uid"] for key, body in world.kube.objects.items() if key[0] == FIRST[0]}
    assert uids == {FIRST: uid}
    assert world.status["sparkApplication"] == {
        "attempt": 1, "failures": 0, "name": "tune-prep-1", "state": "New"
    }  # fmt: skip


async def test_one_of_somebody_else_is_not_taken_over() -> None:
    world = started()
    world.kube.keep({"kind": "SparkApplication", "metadata": {"name": "tune-prep-1"}})
    await world.look()
    reason, message = world.condition(ConditionType.PODS_HEALTHY) or ("", "")
    assert (reason, message.partition(":")[0]) == (
        "NameTaken",
        "SparkApplication tune-prep-1 exists and has another owner",
    )


async def failed() -> World:
    """A job that ran into its deadline while its driver ran."""
    world = started(runPolicy={"ttlSecondsAfterFinished": 300, "activeDeadlineSeconds": 1})
    await world.look()
    world.kube.objects[FIRST]["status"] = {"applicationState": {"state": "RUNNING"}}
    world.kube.keep({"kind": "Pod", **driver()})
    world.kube.keep({"kind": "Pod", "metadata": {"name": "of-somebody-else"}})
    world.seconds = 10
    await world.look()
    return world


async def test_the_deadline_deletes_it_with_its_driver() -> None:
    world = await failed()
    assert (world.status["phase"], world.kube.done("delete")) == (
        "Failed",
        ["SparkApplication/tune-prep-1", "Pod/tune-prep-1-driver"],
    )
    # A spark-submit that was under way makes its driver now.
    await world.look()
    assert (world.status["sparkApplication"]["state"], world.kube.done("delete")) == ("New", [])
    world.kube.keep({"kind": "Pod", **driver()})
    await world.look()
    assert world.kube.done("delete") == ["Pod/tune-prep-1-driver"]
    world.seconds = 10 + 120
    await world.look()
    assert (world.status["sparkApplication"]["state"], world.kube.done("delete")) == ("Deleted", [])
    await world.look()
    assert world.kube.asked == []


async def test_what_a_finished_job_has_is_swept() -> None:
    world = await failed()
    world.seconds = 10 + 120
    await world.look()
    controlled = world.kube.objects["FineTuneJob", "team", "tune"]["metadata"]
    owner = {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "uid": controlled["uid"]}
    meta = {"name": "tune-prep-1", "ownerReferences": [{**owner, "controller": True}]}
    world.kube.keep({"kind": "SparkApplication", "metadata": meta})
    world.kube.keep({"kind": "Pod", **driver("Failed")})
    world.seconds = 400
    await world.look()
    assert world.kube.done("delete") == [
        "ConfigMap/tune-prep",
        "SparkApplication/tune-prep-1",
        "Pod/tune-prep-1-driver",
    ]


SWEPT = {404: "NoPods", 403: "NoPods", 500: ""}


@pytest.mark.parametrize(("code", "reason"), SWEPT.items())
async def test_a_sweep_passes_over_what_cannot_be_read_for_good(code: int, reason: str) -> None:
    world = await failed()
    world.seconds = 10 + 120
    await world.look()
    world.kube.refuse["list", "SparkApplication"] = KubeError(code, "no")
    world.seconds = 400
    await world.look()
    assert (world.condition(ConditionType.PODS_HEALTHY) or ("", ""))[0] == reason
