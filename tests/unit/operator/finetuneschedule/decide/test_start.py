"""When a FineTuneJob is created: start times that are due, missed, waiting or replaced."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator import names
from finetune_operator.finetuneschedule.decide import decide
from finetune_operator.finetuneschedule.model import Observed, ScheduledJob
from fixtures.operator_in_memory.decisions import NOW, condition, later
from fixtures.operator_in_memory.schedules import failed, job, schedule, start_time, succeeded

Json = dict[str, Any]
NAME = names.scheduled_job_name("nightly", NOW)
CREATED = f"True JobCreated: FineTuneJob {NAME} was created for 2026-08-01T12:00:00Z"


@dataclass(frozen=True)
class Case:
    """A schedule whose last job was that of `last` hours before NOW, its jobs, and what is decided at `seconds` after NOW."""

    fields: Json = field(default_factory=dict)
    jobs: tuple[ScheduledJob, ...] = ()
    last: float = 1
    seconds: float = 0
    created: str | None = NAME
    scheduled: str | None = CREATED
    replaced: tuple[str, ...] = ()
    active: tuple[str, ...] = (NAME,)


CASES = {
    "at the start time": Case(),
    "soon after it": Case(seconds=20),
    "just before it": Case(seconds=-1, created=None, scheduled=None, active=()),
    "handled before": Case(last=0, created=None, scheduled=None, active=()),
    "many missed: the last one is caught up on": Case(last=500, seconds=1800),
    "created by a pass that was interrupted": Case(jobs=(job(0),), created=None),
    "created, finished, and not recorded": Case(jobs=(failed(0),), created=None, active=()),
    "created, replacing, and not recorded": Case(
        {"concurrencyPolicy": "Replace"}, jobs=(job(0),), created=None
    ),
    "within the deadline": Case({"startingDeadlineSeconds": 60}, seconds=60),
    "past the deadline": Case(
        {"startingDeadlineSeconds": 60},
        seconds=61,
        created=None,
        scheduled="False StartTimeMissed: the start time 2026-08-01T12:00:00Z was missed by more than "
        "spec.startingDeadlineSeconds (60)",
        active=(),
    ),
    "beside a job that runs": Case(jobs=(job(-1),), active=(job(-1).name, NAME)),
    "forbidden beside a job that runs": Case(
        {"concurrencyPolicy": "Forbid"},
        jobs=(job(-1),),
        created=None,
        scheduled=f"False JobStillRunning: the start for 2026-08-01T12:00:00Z waits until FineTuneJob {job(-1).name} has finished: "
        "spec.concurrencyPolicy is Forbid",
        active=(job(-1).name,),
    ),
    "forbidden beside a job that is being deleted": Case(
        {"concurrencyPolicy": "Forbid"},
        jobs=(job(-1, deleting=True),),
        created=None,
        scheduled=f"False JobStillRunning: the start for 2026-08-01T12:00:00Z waits until FineTuneJob {job(-1).name} has finished: "
        "spec.concurrencyPolicy is Forbid",
        active=(job(-1).name,),
    ),
    "allowed once it has finished": Case(
        {"concurrencyPolicy": "Forbid"}, jobs=(succeeded(-1),), seconds=1800
    ),
    "too late once it has finished": Case(
        {"concurrencyPolicy": "Forbid", "startingDeadlineSeconds": 600},
        jobs=(succeeded(-1),),
        seconds=1800,
        created=None,
        scheduled="False StartTimeMissed: the start time 2026-08-01T12:00:00Z was missed by more than "
        "spec.startingDeadlineSeconds (600)",
        active=(),
    ),
    "replaces a job that runs": Case(
        {"concurrencyPolicy": "Replace"},
        jobs=(job(-1), job(-2, deleting=True), failed(-3)),
        replaced=(job(-1).name,),
        active=(job(-2).name, job(-1).name, NAME),
    ),
    "suspended": Case({"suspend": True}, created=None, scheduled=None, active=()),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_start_time(case: Case) -> None:
    status = {"last_schedule_time": start_time(-case.last)}
    decision = decide(schedule(status=status, **case.fields), Observed(case.jobs), later(case.seconds))
    by_type = {item.type: item for item in decision.status.conditions}
    scheduled = by_type.get(ConditionType.SCHEDULED)
    assert (
        Case(
            fields=case.fields,
            jobs=case.jobs,
            last=case.last,
            seconds=case.seconds,
            created=decision.created["metadata"]["name"] if decision.created else None,
            scheduled=f"{scheduled.status} {scheduled.reason}: {scheduled.message}" if scheduled else None,
            replaced=tuple(item.name for item in decision.replaced),
            active=tuple(item.name for item in decision.status.active),
        )
        == case
    )
    assert decision.status.active_count == len(case.active)
    handled = case.scheduled == CREATED
    assert decision.status.last_schedule_time == (NOW if handled else status["last_schedule_time"])


def test_a_new_schedule_has_no_start_time_from_before_its_creation() -> None:
    decision = decide(schedule(age=timedelta(minutes=10)), Observed(), later(-1))
    assert (decision.created, decision.status.last_schedule_time) == (None, None)
    assert decide(schedule(age=timedelta(minutes=10)), Observed(), NOW).status.last_schedule_time == NOW


def test_the_next_pass_comes_at_the_next_start_time() -> None:
    decision = decide(schedule(status={"last_schedule_time": NOW}), Observed(), later(3599.5))
    assert (decision.status.next_schedule_time, decision.requeue_seconds) == (start_time(1), 1.0)


def test_a_schedule_that_was_resumed_catches_up_on_the_last_start_time() -> None:
    suspended = condition(ConditionType.SUSPENDED, "True", ConditionReason.SUSPENDED)
    resumed = schedule(suspended, status={"last_schedule_time": start_time(-24)})
    decision = decide(resumed, Observed(), later(60))
    by_type = {item.type: f"{item.status} {item.reason}" for item in decision.status.conditions}
    assert by_type == {
        "Accepted": "True Accepted",
        "Suspended": "False Resumed",
        "Scheduled": "True JobCreated",
        "Ready": "True JobCreated",
    }


def test_the_job_is_the_template_with_a_name_an_owner_and_its_start_time() -> None:
    zoned = schedule(timeZone="America/New_York", status={"last_schedule_time": start_time(-1)})
    assert decide(zoned, Observed(), NOW).created == {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {
            "name": "nightly-29759760",
            "namespace": "team",
            "labels": {"team": "support", "finetune.dev/schedule": "nightly"},
            "annotations": {"cost-center": "7", "finetune.dev/start-time": "2026-08-01T08:00:00-04:00"},
            "ownerReferences": [
                {
                    "apiVersion": "finetune.dev/v1alpha1",
                    "kind": "FineTuneSchedule",
                    "name": "nightly",
                    "uid": "uid-of-nightly",
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": {"model": {"base": "org/base"}, "data": {"source": {"type": "Parquet", "path": "/data"}}},
    }
