"""Jobs with the same preparation prepare once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from finetune_crds.base import API_VERSION
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status_parts import DatabricksRunStatus, SparkApplicationStatus
from finetune_operator import names
from finetune_operator.finetunejob.decision import TakeLease
from finetune_operator.finetunejob.model import CustomChildren, FineTuneJob, PreparationLease
from finetune_operator.finetunejob.preparation import backends, preparation_lease
from fixtures.operator_in_memory.decisions import (
    ACCEPTED,
    ADMITTED,
    NOW,
    SOURCE,
    SUCCEEDED,
    UID,
    applied,
    child,
    conclude,
    condition,
    controller,
    ftj,
    later,
    observed,
    said,
    stamped,
    status,
)

Json = dict[str, Any]
NEW = status(ADMITTED)
WAITS = (
    "False",
    ConditionReason.WAITING_FOR_PREPARATION,
    "FineTuneJob first prepares the same data: this job waits for the table that first writes, and uses the table",
)
BEGINS = ["ConfigMap/tune-prep", "Job/tune-prep"]


def job(**prepare: Any) -> FineTuneJob:
    """The job of these tests, created at NOW."""
    source = SOURCE["source"] | {"path": "s3://lake/corpus"}
    data = SOURCE | {"source": source, "prepare": SOURCE["prepare"] | prepare}
    return dataclasses.replace(ftj(NEW, data=data), created=NOW)


def lease(uid: str = "uid-of-first") -> Json:
    owner = controller(API_VERSION, "FineTuneJob", uid)
    meta = {"name": "the-lease", "namespace": "team", "uid": "uid-of-lease", "resourceVersion": "8"}
    return {"metadata": meta | {"ownerReferences": [owner]}, "spec": {"holderIdentity": "first"}}


def holder(*conditions: Json, suspend: bool = False, **meta: Any) -> Json:
    """The FineTuneJob first."""
    return {
        "metadata": {"name": "first", "namespace": "team", "uid": "uid-of-first", **meta},
        "spec": {"suspend": suspend},
        "status": {"conditions": [*conditions]},
    }


def one(kind: ConditionType, value: str, reason: ConditionReason, at: float = 0) -> Json:
    return {"type": kind, "status": value, "reason": reason, "lastTransitionTime": stamped(at)}


def unhealthy(reason: ConditionReason, at: float = 0) -> Json:
    return one(ConditionType.PODS_HEALTHY, "False", reason, at)


PREPARING = one(ConditionType.PREPARED, "False", ConditionReason.PREPARING)
IN_QUEUE = one(ConditionType.PREPARED, "False", ConditionReason.QUEUED)
NOT_ADMITTED = one(ConditionType.PREPARED, "False", ConditionReason.QUEUE_INADMISSIBLE)
IS_BEING_DELETED: Json = {"deletionTimestamp": stamped(1)}

# The Lease and its holder; whether this job waits, and whether it takes the Lease.
HOLDERS: dict[str, tuple[PreparationLease | None, bool, bool]] = {
    "not known": (None, False, False),
    "no Lease": (PreparationLease(), False, True),
    "its own": (PreparationLease(lease(UID), holder()), False, False),
    "of something else": (
        PreparationLease({"metadata": {"name": "the-lease", "namespace": "team"}}), False, False,
    ),
    "of a job that is gone": (PreparationLease(lease(), None), False, True),
    "of one without a status yet": (PreparationLease(lease(), holder()), True, False),
    "of one that prepares": (PreparationLease(lease(), holder(PREPARING)), True, False),
    "of one whose turn in its queue comes": (PreparationLease(lease(), holder(IN_QUEUE)), True, False),
    "of one that no queue admits": (PreparationLease(lease(), holder(NOT_ADMITTED)), False, True),
    "of one that waited for another": (
        PreparationLease(lease(), holder(one(ConditionType.PREPARED, "False", ConditionReason.WAITING_FOR_PREPARATION))),
        True, False,
    ),
    "of one whose pods lack a node": (
        PreparationLease(lease(), holder(PREPARING, unhealthy(ConditionReason.UNSCHEDULABLE))), True, False,
    ),
    "of one whose pods lack a node for long": (
        PreparationLease(lease(), holder(PREPARING, unhealthy(ConditionReason.UNSCHEDULABLE, -900))), False, True,
    ),
    "of one whose workspace does not answer": (
        PreparationLease(
            lease(), holder(one(ConditionType.PREPARED, "False", ConditionReason.DATABRICKS_UNREACHABLE))
        ),
        True, False,
    ),
    "of one whose pods cannot start": (
        PreparationLease(lease(), holder(PREPARING, unhealthy(ConditionReason.IMAGE_PULL_FAILED))), False, True,
    ),
    "of one that is suspended": (PreparationLease(lease(), holder(PREPARING, suspend=True)), False, True),
    "of one that is being deleted": (
        PreparationLease(lease(), holder(PREPARING, **IS_BEING_DELETED)), False, True,
    ),
    "of one that failed": (
        PreparationLease(
            lease(),
            holder(PREPARING, one(ConditionType.FAILED, "True", ConditionReason.DEADLINE_EXCEEDED)),
        ),
        False, True,
    ),
    "of one whose spec must change": (
        PreparationLease(
            lease(), holder(PREPARING, one(ConditionType.STALLED, "True", ConditionReason.INVALID_SPEC))
        ),
        False, True,
    ),
    "of one that waits for credentials": (
        PreparationLease(
            lease(), holder(one(ConditionType.PREPARED, "False", ConditionReason.CREDENTIALS_MISSING))
        ),
        False, True,
    ),
    "of one that has prepared since": (
        PreparationLease(lease(), holder(one(ConditionType.PREPARED, "True", ConditionReason.PREPARED, 5))), False, False,
    ),
    "of one that had prepared before": (
        PreparationLease(lease(), holder(one(ConditionType.PREPARED, "True", ConditionReason.PREPARED, -5))), False, True,
    ),
    "of one that had prepared, and is suspended": (
        PreparationLease(
            lease(), holder(one(ConditionType.PREPARED, "True", ConditionReason.PREPARED, 5), suspend=True)
        ),
        False, False,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("lease_state", "waits", "takes"), HOLDERS.values(), ids=HOLDERS)
def test_holders(lease_state: PreparationLease | None, waits: bool, takes: bool) -> None:
    decision = conclude(job(), observed(lease=lease_state), at=later(10))
    assert (applied(decision), decision.status.phase, decision.status.start_time) == (
        ([], "Pending", None) if waits else (BEGINS, "Preparing", later(10))
    )
    assert (said(decision, ConditionType.PREPARED) == WAITS) == waits
    assert (decision.lease is not None) == takes
    if waits:
        assert said(decision, ConditionType.READY) == WAITS
        assert decision.requeue_seconds is not None
    if decision.lease and lease_state:
        assert decision.lease.replaces == lease_state.lease


def test_the_lease_names_its_holder_and_goes_with_it() -> None:
    decision = conclude(job(), observed(lease=PreparationLease()), at=later(10))
    name = preparation_lease.lease_name(job())
    assert decision.lease == TakeLease(
        {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": name,
                "namespace": "team",
                "labels": decision.apply[0]["metadata"]["labels"],
                "ownerReferences": decision.apply[0]["metadata"]["ownerReferences"],
            },
            "spec": {"holderIdentity": "tune"},
        }
    )
    assert name
    assert name.startswith("finetune-prep-")


def test_which_jobs_have_a_lease_in_common() -> None:
    name = preparation_lease.lease_name(job())
    assert (
        preparation_lease.lease_name(job(reportSamples=9))
        == preparation_lease.lease_name(job(output="/data/splits/"))
        == name
    )
    assert preparation_lease.lease_name(job(output="/elsewhere")) not in (None, name)
    assert preparation_lease.lease_name(job(maxTokens=9)) not in (None, name)
    assert preparation_lease.lease_name(job(reuse="Never")) is None
    assert preparation_lease.lease_name(ftj(NEW)) is None


def run(state: str) -> DatabricksRunStatus:
    return DatabricksRunStatus.model_validate({"attempt": 1, "state": state})


def application(state: str) -> SparkApplicationStatus:
    return SparkApplicationStatus(attempt=1, name="tune-prep-1", state=state)


PREPARED = condition(ConditionType.PREPARED, "True", ConditionReason.PREPARED)
BEFORE: dict[str, tuple[FineTuneJob, bool]] = {
    "nothing has begun": (job(), True),
    "a run has failed": (dataclasses.replace(job(), status=status(ACCEPTED, databricks_run=run("Failed"))), True),
    "a run is at work": (dataclasses.replace(job(), status=status(ACCEPTED, databricks_run=run("Running"))), False),
    "an application has failed": (dataclasses.replace(job(), status=status(ACCEPTED, spark_application=application("Failed"))), True),
    "an application is at work": (dataclasses.replace(job(), status=status(ACCEPTED, spark_application=application("New"))), False),
    "suspended": (ftj(NEW, data=SOURCE, suspend=True), False),
    "prepared": (ftj(status(PREPARED), data=SOURCE), False),
    "over": (ftj(status(SUCCEEDED), data=SOURCE), False),
    "a spec that cannot be read": (dataclasses.replace(job(), spec=None), False),
}  # fmt: skip


@pytest.mark.parametrize(("ours", "expected"), BEFORE.values(), ids=BEFORE)
def test_when_the_lease_matters(ours: FineTuneJob, expected: bool) -> None:
    assert backends.has_to_prepare(ours, {}) == expected
    assert not backends.has_to_prepare(ours, {names.prep_name("tune"): child("tune-prep")})


def test_a_databricks_run_waits_too() -> None:
    databricks_fields = {"volume": "/Volumes/a/b/c", "compute": {"type": "Serverless"}}
    spark = {"mode": "Databricks", "databricks": databricks_fields}
    finetunejob = job(output="s3://lake/splits", spark=spark)
    finetunejob = dataclasses.replace(finetunejob, status=status(ACCEPTED, ADMITTED))
    waiting = conclude(
        finetunejob, observed(lease=PreparationLease(lease(), holder(PREPARING))), at=later(10)
    )
    assert (waiting.status.databricks_run, said(waiting, ConditionType.PREPARED)) == (None, WAITS)
    free = conclude(finetunejob, observed(lease=PreparationLease()), at=later(10))
    assert free.lease
    assert free.status.databricks_run == run("Submitting")


def test_a_spark_application_waits_too() -> None:
    finetunejob = job(output="s3://lake/splits", spark={"mode": "SparkApplication"})
    finetunejob = dataclasses.replace(finetunejob, status=status(ACCEPTED, ADMITTED))
    simulation = PreparationLease(lease(), holder(PREPARING))
    waiting = conclude(
        finetunejob, observed(lease=simulation, custom_children=CustomChildren()), at=later(10)
    )
    assert (applied(waiting), waiting.status.start_time) == ([], None)
    assert said(waiting, ConditionType.PREPARED) == WAITS
    free = conclude(
        finetunejob, observed(lease=PreparationLease(), custom_children=CustomChildren()), at=later(10)
    )
    assert free.lease
    assert applied(free) == ["ConfigMap/tune-prep", "SparkApplication/tune-prep-1"]
