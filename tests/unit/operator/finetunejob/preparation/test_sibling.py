"""The trials of a sweep share what one of them has prepared."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from finetune_crds.base import API_VERSION
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import DataStatus
from finetune_operator.finetunejob.model import CustomChildren, FineTuneJob, PreparationLease
from finetune_operator.owners import Owner
from fixtures.operator_in_memory.decisions import (
    ACCEPTED,
    ADMITTED,
    NOW,
    SOURCE,
    applied,
    conclude,
    controller,
    ftj,
    later,
    observed,
    said,
    stamped,
    status,
)

Json = dict[str, Any]
SWEEP = Owner("team", "uid-of-the-sweep")
DATA: Json = {
    "rows": {"train": 90, "validation": 5, "test": 5},
    "path": "s3://lake/splits",
    "version": 7,
    "digest": "c0ffee",
}
MESSAGE = "s3://lake/splits version 7: 90 train, 5 validation, 5 test rows"
BEGINS = ["ConfigMap/tune-prep", "Job/tune-prep"]


def trial(**parts: Any) -> FineTuneJob:
    """A trial of the sweep, created at NOW."""
    source = SOURCE["source"] | {"path": "s3://lake/corpus"}
    data = SOURCE | {"source": source, "prepare": SOURCE["prepare"] | parts}
    return dataclasses.replace(ftj(status(ACCEPTED, ADMITTED), data=data), created=NOW, sweep=SWEEP)


def prepared(
    value: str = "True",
    *,
    reason: ConditionReason = ConditionReason.PREPARED,
    sweep: str = SWEEP.uid,
    at: float = -60,
    **data: Any,
) -> PreparationLease:
    """The Lease of trial tune-1 of a sweep, which has prepared or not."""
    owner = controller(API_VERSION, "FineTuneJob", "uid-of-first")
    lease = {"name": "the-lease", "namespace": "team", "uid": "uid-of-lease", "resourceVersion": "8"}
    holder_condition = {
        "type": ConditionType.PREPARED,
        "status": value,
        "reason": reason,
        "message": MESSAGE,
        "lastTransitionTime": stamped(at),
    }
    holder = {
        "metadata": {
            "name": "sweep-1",
            "namespace": "team",
            "uid": "uid-of-first",
            "ownerReferences": [controller(API_VERSION, "FineTuneJob", sweep)],
        },
        "spec": {},
        "status": {"conditions": [holder_condition], "data": DATA | data},
    }
    return PreparationLease(
        {"metadata": lease | {"ownerReferences": [owner]}, "spec": {"holderIdentity": "sweep-1"}}, holder
    )


# The Lease and its holder; the reason of Prepared and who wrote the table, if the trial uses it.
LEASES: dict[str, tuple[PreparationLease, tuple[ConditionReason, str] | None]] = {
    "prepared before this trial was created": (prepared(), (ConditionReason.PREPARED, "sweep-1")),
    "prepared after this trial was created": (prepared(at=5), (ConditionReason.PREPARED, "sweep-1")),
    "prepared with a warning": (
        prepared(reason=ConditionReason.PREPARED_WITH_WARNING),
        (ConditionReason.PREPARED_WITH_WARNING, "sweep-1"),
    ),
    "found a table of an earlier job": (prepared(writtenBy="earlier"), (ConditionReason.PREPARED, "earlier")),
    "of another sweep": (prepared(sweep="uid-of-another"), None),
    "nobody has prepared": (PreparationLease(), None),
}  # fmt: skip


@pytest.mark.parametrize(("lease_state", "expected"), LEASES.values(), ids=LEASES)
def test_a_trial_uses_the_table_of_another_one(
    lease_state: PreparationLease, expected: tuple[ConditionReason, str] | None
) -> None:
    decision = conclude(trial(), observed(lease=lease_state), at=later(10))
    if expected is None:
        assert (applied(decision), decision.status.data) == (BEGINS, None)
        return
    reason, writer = expected
    message = f"trial sweep-1 of the same sweep has prepared the data: {MESSAGE}"
    assert said(decision, ConditionType.PREPARED) == ("True", reason, message)
    assert decision.status.data == DataStatus.model_validate(DATA | {"writtenBy": writer})
    assert not [name for name in applied(decision) if name in BEGINS]
    assert decision.lease is None


def test_a_trial_waits_while_another_one_prepares() -> None:
    preparing = prepared("False", reason=ConditionReason.PREPARING)
    decision = conclude(trial(), observed(lease=preparing), at=later(10))
    assert (applied(decision), decision.status.phase) == ([], "Pending")
    message = "FineTuneJob sweep-1 prepares the same data: this job waits for the table that sweep-1 writes, and uses the table"
    assert said(decision, ConditionType.PREPARED) == (
        "False",
        ConditionReason.WAITING_FOR_PREPARATION,
        message,
    )


def test_a_job_without_a_sweep_checks_its_sources() -> None:
    decision = conclude(
        dataclasses.replace(trial(), sweep=None), observed(lease=prepared(at=5)), at=later(10)
    )
    assert (applied(decision), decision.status.data) == (BEGINS, None)


MODES: dict[str, Json] = {
    "SparkApplication": {"mode": "SparkApplication"},
    "Databricks": {
        "mode": "Databricks", "databricks": {"volume": "/Volumes/a/b/c", "compute": {"type": "Serverless"}},
    },
}  # fmt: skip


@pytest.mark.parametrize("spark", MODES.values(), ids=MODES)
def test_every_backend(spark: Json) -> None:
    finetunejob = trial(output="s3://lake/splits", spark=spark)
    decision = conclude(
        finetunejob, observed(lease=prepared(), custom_children=CustomChildren()), at=later(10)
    )
    assert decision.status.data == DataStatus.model_validate(DATA | {"writtenBy": "sweep-1"})
    assert (decision.status.databricks_run, decision.status.spark_application) == (None, None)
