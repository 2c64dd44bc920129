"""What the status keeps of the jobs of a schedule, and which jobs are deleted."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.schedule_status import TrainedData
from finetune_operator.finetuneschedule.decide import decide
from finetune_operator.finetuneschedule.model import Observed, ScheduledJob
from fixtures.operator_in_memory.decisions import NOW, later
from fixtures.operator_in_memory.schedules import failed, job, schedule, start_time, succeeded, unchanged

Json = dict[str, Any]
DATA = TrainedData(job="nightly-1", digest="d1")
# Nothing is due: the last start time is handled.
HANDLED: Json = {"last_schedule_time": NOW}


def test_the_last_success_outlives_its_job() -> None:
    jobs = (succeeded(-3, "d2"), succeeded(-2, "d3"), failed(-1), job(0))
    status = decide(schedule(status=HANDLED), Observed(jobs), later(60)).status
    expected = (start_time(-1.5), TrainedData(job=succeeded(-2).name, digest="d3"), 1)
    assert (status.last_successful_time, status.data, status.active_count) == expected
    kept = decide(
        schedule(status=HANDLED | {"last_successful_time": start_time(-1.5), "data": DATA}), Observed(), NOW
    )
    assert (kept.status.last_successful_time, kept.status.data) == (start_time(-1.5), DATA)


def test_a_success_without_a_preparation_clears_the_data() -> None:
    """Its data is not known, so the next job may not be compared with that of an earlier one."""
    status = HANDLED | {"last_successful_time": start_time(-9), "data": DATA}
    assert decide(schedule(status=status), Observed((succeeded(-1),)), NOW).status.data is None


def test_a_job_that_trained_nothing_is_recorded_and_deleted() -> None:
    status = HANDLED | {"last_successful_time": start_time(-3), "data": DATA}
    decision = decide(schedule(status=status, onlyIfDataChanged=True), Observed((unchanged(0),)), later(60))
    scheduled = next(item for item in decision.status.conditions if item.type == "Scheduled")
    assert (scheduled.status, scheduled.reason, scheduled.message) == (
        "True",
        "DataUnchanged",
        "no FineTuneJob was kept for 2026-08-01T12:00:00Z: its data has digest d1, as that of nightly-1, which succeeded",
    )
    assert (decision.status.last_skipped_time, decision.deleted) == (NOW, (unchanged(0),))
    # It is no success, and its data is that of another job.
    assert (decision.status.last_successful_time, decision.status.data) == (start_time(-3), DATA)


def test_a_skipped_job_says_nothing_of_a_later_start_time() -> None:
    status = {"last_schedule_time": start_time(-1), "data": DATA}
    decision = decide(schedule(status=status, onlyIfDataChanged=True), Observed((unchanged(-1),)), NOW)
    reasons = {item.type: item.reason for item in decision.status.conditions}
    assert (decision.status.last_skipped_time, reasons["Scheduled"]) == (start_time(-1), "JobCreated")
    assert decision.deleted == (unchanged(-1),)


@pytest.mark.parametrize(
    ("only_if_data_changed", "data", "expected"),
    {
        "the data of the last success": (True, DATA, "d1"),
        "no success yet": (True, None, None),
        "not asked for": (False, DATA, None),
    }.values(),
)
def test_a_job_knows_which_data_it_need_not_train_on(
    only_if_data_changed: bool, data: TrainedData | None, expected: str | None
) -> None:
    status = {"last_schedule_time": start_time(-1), "data": data}
    decision = decide(schedule(status=status, onlyIfDataChanged=only_if_data_changed), Observed(), NOW)
    assert decision.created is not None
    assert decision.created["metadata"]["annotations"].get("finetune.dev/trained-data") == expected


HISTORY: dict[str, tuple[Json, tuple[ScheduledJob, ...], list[ScheduledJob]]] = {
    "the defaults": (
        {},
        (*(succeeded(-hours) for hours in range(1, 6)), failed(-6), failed(-7)),
        [succeeded(-4), succeeded(-5), failed(-7)],
    ),
    "none": (
        {"successfulJobsHistoryLimit": 0, "failedJobsHistoryLimit": 0},
        (succeeded(-1), failed(-2), job(0)),
        [succeeded(-1), failed(-2)],
    ),
    "those that are being deleted": (
        {"successfulJobsHistoryLimit": 0},
        (succeeded(-1, deleting=True), succeeded(-2)),
        [succeeded(-2)],
    ),
    "skipped jobs do not count": (
        {"successfulJobsHistoryLimit": 1},
        (unchanged(0), unchanged(-1), succeeded(-2)),
        [unchanged(-1), unchanged(0)],
    ),
}


@pytest.mark.parametrize(("fields", "jobs", "deleted"), HISTORY.values(), ids=HISTORY)
def test_history(fields: Json, jobs: tuple[ScheduledJob, ...], deleted: list[ScheduledJob]) -> None:
    decision = decide(schedule(status=HANDLED, **fields), Observed(jobs), later(60))
    assert decision.deleted == tuple(deleted)
    # Whatever is wrong with the schedule meanwhile.
    broken = decide(schedule(status=HANDLED, timeZone="No/Where", **fields), Observed(jobs), later(60))
    assert broken.deleted == tuple(deleted)
