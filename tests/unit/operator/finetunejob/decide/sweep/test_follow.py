"""What the FineTuneJobs of a sweep take over from it: suspend, runPolicy and pods; and what remains of them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.finetunejob.decision import Decision
from fixtures.operator_in_memory.decisions import (
    FAILED,
    NOW,
    applied,
    condition,
    deleted,
    failure_of,
    later,
    said,
)
from unit.operator.finetunejob.decide.sweep.children import decide_sweep, record, sweep_job, trial

Json = dict[str, Any]
POLICY: Json = {"maxRestarts": 9}


def changes(decision: Decision) -> dict[str, Json]:
    return {change.name: change.fields for change in decision.changed}


def test_suspending_the_job_suspends_its_trials() -> None:
    children = (trial(1, "Succeeded", 0.9), trial(2), trial(3, "Suspended", spec={"suspend": True}))
    decision = decide_sweep(sweep_job(record(1, metric=0.9), suspend=True), *children)
    assert changes(decision) == {"tune-2": {"suspend": True}}
    assert (decision.status.phase, applied(decision)) == ("Suspended", [])
    assert said(decision, ConditionType.SUSPENDED) == (
        "True",
        "Suspended",
        "waiting until tune-2 is suspended",
    )
    stopped = [trial(number, "Suspended", spec={"suspend": True}) for number in (2, 3)]
    decision = decide_sweep(sweep_job(record(1, metric=0.9), suspend=True), children[0], *stopped)
    assert (changes(decision), said(decision, ConditionType.SUSPENDED)) == (
        {},
        ("True", "Suspended", "every trial is suspended or has ended; set suspend to false to resume"),
    )


def test_resuming_the_job_resumes_its_trials() -> None:
    suspended = condition(ConditionType.SUSPENDED, "True", ConditionReason.SUSPENDED)
    job = sweep_job(conditions=(suspended,), fields={"suspend_time": NOW, "start_time": NOW})
    decision = decide_sweep(job, trial(1, "Suspended", spec={"suspend": True}), trial(2))
    assert changes(decision) == {"tune-1": {"suspend": False}}
    assert said(decision, ConditionType.SUSPENDED) == ("False", "Resumed", "the job goes on")


def test_trials_that_run_take_over_changes() -> None:
    job = sweep_job(runPolicy=POLICY, pods={"all": {"serviceAccountName": "new"}})
    decision = decide_sweep(job, trial(1), trial(2, "Succeeded", 0.5))
    assert changes(decision) == {
        "tune-1": {"runPolicy": POLICY, "pods": {"all": {"serviceAccountName": "new"}}}
    }


# Of each trial that runs, whether it waits; and whether the job waits.
WAITS: dict[str, tuple[tuple[bool, ...], bool]] = {
    "none runs": ((), False),
    "all wait": ((True, True), True),
    "one trains": ((True, False), False),
}


@pytest.mark.parametrize(("waits", "is_waiting"), WAITS.values(), ids=WAITS)
def test_the_deadline_excludes_the_time_in_which_all_trials_wait(
    waits: tuple[bool, ...], *, is_waiting: bool
) -> None:
    children = [trial(number, "Queued") for number in range(1, len(waits) + 1)]
    for child, waits_now in zip(children, waits, strict=True):
        child["status"] |= {"waitingSince": "2026-08-01T12:00:00Z"} if waits_now else {}
    job = sweep_job(fields={"start_time": NOW}, runPolicy={"activeDeadlineSeconds": 60})
    decision = decide_sweep(job, trial(4, "Succeeded", 0.5), *children, at=61)
    assert (decision.status.waiting_since is not None) == is_waiting
    assert (failure_of(decision) is None) == is_waiting


def test_the_deadline_stops_the_trials() -> None:
    job = sweep_job(fields={"start_time": NOW}, runPolicy={"activeDeadlineSeconds": 60})
    assert decide_sweep(job, trial(1), at=59).status.phase != "Failed"
    decision = decide_sweep(job, trial(1), at=60)
    failure = failure_of(decision)
    assert failure
    assert (failure[1], changes(decision)) == ("DeadlineExceeded", {"tune-1": {"suspend": True}})


# Seconds since the end of the job, and the FineTuneJobs that are deleted.
ENDS: dict[str, tuple[float, list[str]]] = {"before": (59, []), "after": (60, ["tune-1", "tune-2"])}


@pytest.mark.parametrize(("seconds", "names"), ENDS.values(), ids=ENDS)
def test_the_trials_are_deleted_when_the_ttl_is_over(seconds: float, names: list[str]) -> None:
    completion: datetime = later(0)
    job = sweep_job(
        conditions=(FAILED,),
        fields={"completion_time": completion},
        runPolicy={"ttlSecondsAfterFinished": 60},
    )
    suspended = {"suspend": True, "runPolicy": {"ttlSecondsAfterFinished": 60}}
    children = (trial(1, "Succeeded", 0.5), trial(2, "Suspended", spec=suspended))
    decision = decide_sweep(job, *children, at=seconds)
    assert (deleted(decision), changes(decision)) == (names, {})
    assert {item.kind for item in decision.delete} <= {"FineTuneJob"}
