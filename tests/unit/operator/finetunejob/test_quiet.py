"""Which jobs need no pass until one of their objects changes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import FineTuneJobStatus, MlflowStatus
from finetune_crds.status_parts import SparkApplicationStatus
from finetune_operator import names
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.quiet import is_quiet
from fixtures.operator_in_memory.decisions import (
    FAILED,
    SOURCE,
    SUCCEEDED,
    child,
    condition,
    ended,
    ftj,
    pod,
    running,
    status,
)

Json = dict[str, Any]
RUN = MlflowStatus(run_id="r1", experiment_id="7")
CLOSED = condition(ConditionType.TRACKED, "True", ConditionReason.RUN_FINISHED)
OVER = status(SUCCEEDED, CLOSED, mlflow=RUN)


def prepared_by_spark(state: str) -> FineTuneJob:
    """A job that failed while its preparation was in this state."""
    application = SparkApplicationStatus(attempt=1, failures=0, name="tune-prep-1", state=state)
    before = status(FAILED, spark_application=application)
    data = {**SOURCE, "prepare": {**SOURCE["prepare"], "spark": {"mode": "SparkApplication"}}}
    return ftj(before, data=data, model={"base": "/m"})


def changed(before: FineTuneJobStatus, **fields: Any) -> FineTuneJob:
    return dataclasses.replace(ftj(before), **fields)


CASES: dict[str, tuple[FineTuneJob, list[Json], list[Json], bool]] = {
    "it succeeded": (ftj(OVER), [child("tune-train-1", "Complete")], [ended("tune-train-1", 0, 0)], True),
    "it failed": (
        ftj(status(FAILED)),
        [child("tune-train-1", "Failed")],
        [ended("tune-train-1", 0, 1)],
        True,
    ),
    "nothing of it is left": (ftj(OVER), [], [], True),
    "its spec is unreadable": (changed(OVER, spec=None, invalid="spec: unknown"), [], [], True),
    "it trains": (ftj(running()), [child("tune-train-1")], [pod("tune-train-1")], False),
    "it has not begun": (ftj(), [], [], False),
    "its MLflow run is open": (ftj(status(SUCCEEDED, mlflow=RUN)), [], [], False),
    "a Job still runs": (ftj(OVER), [child("tune-train-1")], [], False),
    "a pod still runs": (ftj(OVER), [child("tune-train-1", "Failed")], [pod("tune-train-1")], False),
    "a Databricks run may exist": (changed(OVER, finalizers=(names.RUN_FINALIZER,)), [], [], False),
    "it is being deleted": (changed(OVER, deleting=True), [], [], False),
    "a SparkApplication runs": (prepared_by_spark("Running"), [], [], False),
    "a SparkApplication has ended": (prepared_by_spark("Failed"), [], [], True),
}


@pytest.mark.parametrize(("job", "jobs", "pods", "expected"), CASES.values(), ids=CASES)
def test_quiet(job: FineTuneJob, jobs: list[Json], pods: list[Json], expected: bool) -> None:
    assert is_quiet(job, jobs, pods) is expected
