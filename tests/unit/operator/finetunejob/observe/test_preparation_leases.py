"""The Lease of a preparation: read where it matters, and taken by one job at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from finetune_crds.base import API_VERSION
from finetune_operator.controller.store import Store
from finetune_operator.finetunejob.decision import TakeLease
from finetune_operator.finetunejob.model import FineTuneJob, PreparationLease
from finetune_operator.finetunejob.observe.preparation_leases import PreparationLeases
from finetune_operator.finetunejob.preparation import preparation_lease
from finetune_operator.kube import KubeError
from fixtures.fake_kube import StandIn
from fixtures.operator_in_memory.decisions import ADMITTED, SOURCE, UID, child, controller, ftj, status

Json = dict[str, Any]
JOB = ftj(status(ADMITTED), data=SOURCE)
NAME = preparation_lease.lease_name(JOB) or ""


def lease(uid: str = "uid-of-first") -> Json:
    owner = controller(API_VERSION, "FineTuneJob", uid)
    meta = {"name": NAME, "namespace": "team", "ownerReferences": [owner]}
    return {"kind": "Lease", "metadata": meta, "spec": {"holderIdentity": "first"}}


def first(uid: str = "uid-of-first", version: str = "5") -> Json:
    meta = {"name": "first", "namespace": "team", "uid": uid, "resourceVersion": version}
    return {"kind": "FineTuneJob", "metadata": meta, "spec": {}}


def leases(*objects: Json, cached: Json | None = None) -> tuple[PreparationLeases, StandIn]:
    kube, store = StandIn(*objects), Store()
    if cached:
        store.put("FineTuneJob", cached)
    return PreparationLeases(kube, store), kube


async def test_the_holder_comes_from_the_cache_or_from_the_api_server() -> None:
    reader, kube = leases(lease(), first(), cached=first())
    answer = await reader.read(JOB, {})
    assert answer
    assert answer.holder == first()
    assert kube.asked == [("get", "Lease", NAME)]
    # The cache has an earlier job of that name.
    reader, kube = leases(lease(), first(), cached=first(uid="an earlier one"))
    answer = await reader.read(JOB, {})
    assert answer
    assert answer.holder
    assert answer.holder["metadata"]["uid"] == "uid-of-first"
    # A later job of that name holds nothing.
    reader, kube = leases(lease(), first(uid="a later one"))
    assert await reader.read(JOB, {}) == PreparationLease(kube.objects["Lease", "team", NAME], None)


NOT_READ: dict[str, tuple[FineTuneJob, dict[str, Json]]] = {
    "nothing is shared": (ftj(status(ADMITTED)), {}),
    "it has begun": (JOB, {"tune-prep": child("tune-prep")}),
}


@pytest.mark.parametrize(("ours", "jobs"), NOT_READ.values(), ids=NOT_READ)
async def test_it_is_not_read(ours: FineTuneJob, jobs: dict[str, Json]) -> None:
    reader, kube = leases(lease(), first())
    assert (await reader.read(ours, jobs), kube.asked) == (None, [])


async def test_without_the_right_to_read_it_the_job_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    reader, kube = leases()
    kube.refuse["get", "Lease"] = KubeError(403, "leases is forbidden")
    assert await reader.read(JOB, {}) is None
    assert caplog.messages == [
        "team/tune: cannot check whether another job prepares the same data, so this job prepares it: leases is forbidden"
    ]
    kube.refuse["get", "Lease"] = KubeError(500, "etcd is away")
    with pytest.raises(KubeError, match="etcd is away"):
        await reader.read(JOB, {})


async def test_one_of_several_jobs_takes_it() -> None:
    reader, kube = leases(lease())
    answer = await reader.read(JOB, {})
    assert answer
    request = TakeLease(lease(UID), replaces=answer.lease)
    await reader.take(JOB, request)
    objects = kube.objects["Lease", "team", NAME]
    assert objects["metadata"]["ownerReferences"] == lease(UID)["metadata"]["ownerReferences"]
    # Another one had seen the same, and comes too late; the first one may come again.
    for late in (TakeLease(lease("uid-of-late"), replaces=answer.lease), TakeLease(lease("uid-of-late"))):
        with pytest.raises(
            KubeError, match="another job has started the preparation of team/tune"
        ) as refused:
            await reader.take(ftj_of("uid-of-late"), late)
        assert refused.value.status == 409
    await reader.take(JOB, request)
    assert kube.objects["Lease", "team", NAME] == objects


def ftj_of(uid: str) -> FineTuneJob:
    return dataclasses.replace(JOB, uid=uid)
