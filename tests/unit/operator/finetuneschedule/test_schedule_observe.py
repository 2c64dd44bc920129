"""What a schedule reads of its jobs, and of the answers of the API server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_crds.schedule_status import TrainedData
from finetune_operator.finetuneschedule.model import ScheduledJob
from finetune_operator.finetuneschedule.observe import explain_refusal, read_job
from finetune_operator.kube import KubeError
from fixtures.operator_in_memory.decisions import NOW, later, stamped

Json = dict[str, Any]
NAME = "nightly-29759760"


def body(name: str = NAME, *, metadata: Json | None = None, **status: Any) -> Json:
    """A FineTuneJob, created a minute after NOW."""
    meta = {"name": name, "uid": "u1", "creationTimestamp": stamped(60)}
    return {"metadata": meta | (metadata or {}), "status": status}


def ended(kind: str, reason: str = "Succeeded", status: str = "True") -> list[Json]:
    """The conditions of a job that ended two minutes after NOW."""
    return [{"type": kind, "status": status, "reason": reason, "lastTransitionTime": stamped(120)}]


def job(**fields: Any) -> ScheduledJob:
    """The FineTuneJob of NOW, with other fields."""
    return replace(ScheduledJob(name=NAME, uid="u1", start=NOW), **fields)


JOBS: dict[str, tuple[Json, ScheduledJob]] = {
    "new": (body(), job()),
    "running": (body(conditions=ended("Succeeded", status="False")), job()),
    "made by a person": (body("tune"), job(name="tune", start=later(60))),
    "a number that is no time": (body("tune-0"), job(name="tune-0", start=later(60))),
    "being deleted": (body(metadata={"deletionTimestamp": stamped(90)}), job(deleting=True)),
    "failed": (
        body(conditions=ended("Failed"), completionTime=stamped(100)),
        job(ended=later(100)),
    ),
    "succeeded, by a version without a completion time": (
        body(conditions=ended("Succeeded"), data={"digest": "d1", "sourceVersion": 3}),
        job(ended=later(120), succeeded=True, data=TrainedData(job=NAME, digest="d1", source_version=3)),
    ),
    "data without a digest": (body(data={"path": "/data"}), job()),
    "unchanged": (
        body(conditions=ended("Succeeded", "DataUnchanged")),
        job(ended=later(120), succeeded=True, is_unchanged=True),
    ),
}


@pytest.mark.parametrize(("resource", "expected"), JOBS.values(), ids=JOBS)
def test_read_job(resource: Json, expected: ScheduledJob) -> None:
    assert read_job(resource) == expected


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (400, ConditionReason.JOB_TEMPLATE_INVALID),
        (422, ConditionReason.JOB_TEMPLATE_INVALID),
        (403, ConditionReason.JOB_TEMPLATE_REJECTED),
        *((status, None) for status in (0, 409, 429, 500, 529)),
    ],
)
def test_explain_refusal(status: int, reason: ConditionReason | None) -> None:
    answer = explain_refusal(KubeError(status, "no"), body())
    assert (answer and (answer.reason, answer.message)) == (
        reason and (reason, f"the API server refuses FineTuneJob {NAME} of spec.jobTemplate: no")
    )
