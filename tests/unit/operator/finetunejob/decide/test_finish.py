"""The end of a job, and what is left to do after it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from finetune_crds.conditions import SUMMARY, Condition, ConditionReason, ConditionType
from finetune_crds.status import DataStatus, FineTuneJobStatus, MlflowStatus
from finetune_operator.errors import Problem
from finetune_operator.finetunejob.decision import FinishRun
from finetune_operator.finetunejob.model import Mlflow, Observed
from fixtures.operator_in_memory.decisions import (
    ACCEPTED,
    FAILED,
    NOW,
    PREPARED,
    SETTINGS,
    SOURCE,
    SUCCEEDED,
    TRAINED,
    TRAINING,
    applied,
    child,
    conclude,
    condition,
    deleted,
    ended,
    ftj,
    later,
    observed,
    pod,
    running,
    said,
    status,
    tracked,
)

Json = dict[str, Any]
RUN = MlflowStatus(experiment_id="e1", run_id="r1")
AWAY = Mlflow(problem=Problem(ConditionReason.MLFLOW_UNREACHABLE, "away"))


def over(*conditions: Condition, **fields: Any) -> FineTuneJobStatus:
    options: Json = {"attempt": 1, "restarts": 0, "start_time": NOW, "completion_time": NOW}
    return status(ACCEPTED, PREPARED, *conditions, **(options | fields))


DONE, FELL = over(TRAINED, SUCCEEDED), over(TRAINING, FAILED)

WORLDS: dict[str, Observed] = {
    "nothing is left": observed(),
    "a child vanished": observed(pods=[ended("tune-train-1", 0, 0)]),
    "a child fails": observed(child("tune-train-1", "Failed"), pods=[ended("tune-train-1", 0, 1)]),
    "a child is complete": observed(child("tune-train-1", "Complete")),
    "MLflow lost the run": observed(mlflow=Mlflow()),
    "MLflow is away": observed(mlflow=AWAY),
    "pods still stop": observed(pods=[pod("tune-train-1", 0)]),
}


@pytest.mark.parametrize("before", [DONE, FELL], ids=["succeeded", "failed"])
@pytest.mark.parametrize("observation", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("parts", [{}, {"suspend": True}, {"data": SOURCE}], ids=["", "suspend", "source"])
def test_the_end_is_the_end_whatever_is_seen(
    before: FineTuneJobStatus, observation: Observed, parts: Json
) -> None:
    decision = conclude(ftj(before, **parts), observation, at=later(9999), settings=SETTINGS)
    assert applied(decision) == []
    assert [item for item in decision.status.conditions if item.type not in SUMMARY] == before.conditions
    assert (decision.status.attempt, decision.status.completion_time) == (1, NOW)
    assert decision.status.phase == ("Succeeded" if before is DONE else "Failed")


def test_a_child_at_work_after_the_end_is_stopped() -> None:
    stopping = child("tune-train-2", deletionTimestamp=NOW.isoformat())
    observation = observed(child("tune-train-1"), stopping, child("tune-prep", "Complete"))
    assert deleted(conclude(ftj(FELL), observation)) == ["tune-train-1"]


CLOSED = condition(ConditionType.TRACKED, "True", ConditionReason.RUN_FINISHED)
CLOSING: dict[str, tuple[FineTuneJobStatus, Mlflow | None, list[FinishRun], str | None]] = {
    "a run of a job that succeeded": (
        over(TRAINED, SUCCEEDED, mlflow=RUN),
        tracked(),
        [FinishRun("r1", "FINISHED")],
        None,
    ),
    "a run of a job that failed": (
        over(FAILED, mlflow=RUN),
        tracked(),
        [FinishRun("r1", "FAILED")],
        None,
    ),
    "a run of a job that trained nothing": (
        over(condition(ConditionType.SUCCEEDED, "True", ConditionReason.DATA_UNCHANGED), mlflow=RUN),
        tracked(),
        [FinishRun("r1", "KILLED")],
        None,
    ),
    "a run that ended otherwise": (
        over(FAILED, mlflow=RUN),
        tracked(state="FINISHED"),
        [FinishRun("r1", "FAILED")],
        None,
    ),
    "a run that is closed": (
        over(SUCCEEDED, mlflow=RUN),
        tracked(state="FINISHED"),
        [],
        "MLflow run r1 is FINISHED",
    ),
    "a run that no longer exists": (
        over(SUCCEEDED, mlflow=RUN),
        Mlflow(),
        [],
        "MLflow run r1 no longer exists",
    ),
    "a run that cannot be reached": (over(SUCCEEDED, mlflow=RUN), AWAY, [], None),
    "a run that was closed before": (over(SUCCEEDED, CLOSED, mlflow=RUN), None, [], "said before"),
    "no run": (over(FAILED), None, [], None),
}


@pytest.mark.parametrize(("before", "mlflow", "actions", "message"), CLOSING.values(), ids=CLOSING)
def test_the_run_is_closed(
    before: FineTuneJobStatus, mlflow: Mlflow | None, actions: list[FinishRun], message: str | None
) -> None:
    decision = conclude(ftj(before), observed(mlflow=mlflow), settings=SETTINGS)
    assert list(decision.actions) == actions
    reported = said(decision, ConditionType.TRACKED)
    assert (reported and reported[1:]) == (message and (ConditionReason.RUN_FINISHED, message))


UNCHANGED: dict[str, tuple[str | None, FineTuneJobStatus, bool]] = {
    "the data of the last job": ("d1", status(ACCEPTED, PREPARED, data=DataStatus(digest="d1")), True),
    "other data": ("d1", status(ACCEPTED, PREPARED, data=DataStatus(digest="d2")), False),
    "data without a digest": ("d1", status(ACCEPTED, PREPARED, data=DataStatus()), False),
    "no data": ("d1", status(ACCEPTED, PREPARED), False),
    "no schedule": (None, status(ACCEPTED, PREPARED, data=DataStatus(digest="d1")), False),
    "a training that has begun": ("d1", running(data=DataStatus(digest="d1")), False),
}


@pytest.mark.parametrize(("trained_data", "before", "ends"), UNCHANGED.values(), ids=UNCHANGED)
def test_a_job_of_a_schedule_trains_nothing_on_the_same_data(
    trained_data: str | None, before: FineTuneJobStatus, ends: bool
) -> None:
    job = replace(ftj(before, data=SOURCE), trained_data=trained_data)
    decision = conclude(job, observed(mlflow=tracked()), at=later(5))
    message = (
        "nothing was trained: the data has digest d1, as that of the last job of the schedule that succeeded"
    )
    expected = ("True", "DataUnchanged", message)
    assert said(decision, ConditionType.SUCCEEDED) == (expected if ends else None)
    assert (decision.status.phase == "Succeeded", applied(decision) == []) == (ends, ends)
    assert decision.status.completion_time == (later(5) if ends else None)


def test_what_cannot_be_closed_waits_for_the_next_resync() -> None:
    decision = conclude(ftj(over(SUCCEEDED, mlflow=RUN)), observed(mlflow=AWAY), settings=SETTINGS)
    assert decision.requeue_seconds is None


TTL: Json = {"runPolicy": {"ttlSecondsAfterFinished": 60}}
LEFT = observed(child("tune-prep", "Complete"), child("tune-train-1", "Complete"))
SWEPT = "the child resources were deleted 60 s after the job finished: runPolicy.ttlSecondsAfterFinished"


def test_children_stay_for_their_time() -> None:
    decision = conclude(ftj(DONE, **TTL), LEFT, at=later(59))
    assert (deleted(decision), decision.deletes_all, decision.requeue_seconds) == ([], False, 1)


def test_children_go_after_their_time_and_once() -> None:
    decision = conclude(ftj(DONE, **TTL), LEFT, at=later(60))
    assert (deleted(decision), decision.deletes_all) == (["tune-prep", "tune-train-1"], True)
    assert said(decision, ConditionType.PODS_HEALTHY) == ("Unknown", ConditionReason.NO_PODS, SWEPT)
    again = conclude(ftj(decision.status, **TTL), observed(), at=later(90))
    assert (deleted(again), again.deletes_all, again.requeue_seconds) == ([], False, None)
    assert again.status == decision.status


def test_a_service_is_swept_also_where_no_child_job_is_left() -> None:
    decision = conclude(ftj(FELL, **TTL), observed(), at=later(60))
    assert (deleted(decision), decision.deletes_all) == ([], True)


def test_without_a_time_children_stay_for_ever() -> None:
    decision = conclude(ftj(DONE), LEFT, at=later(10**9))
    assert (deleted(decision), decision.deletes_all, decision.requeue_seconds) == ([], False, None)
