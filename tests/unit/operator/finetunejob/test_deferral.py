"""Which statuses may wait for the next pass."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.base import Json
from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_crds.status import FineTuneJobStatus, JobUids, MlflowStatus, Nodes
from finetune_operator.finetunejob.decision import ActionResult, Decision, EnsureRun
from finetune_operator.finetunejob.deferral import find_delay
from fixtures.operator_in_memory.decisions import ACCEPTED, NOW, PREPARED, TRAINED, condition, status

JOB: Json = {"kind": "Job", "metadata": {"name": "tune-train-1"}}
SERVICE: Json = {"kind": "Service", "metadata": {"name": "tune"}}
RUN = MlflowStatus(experiment_id="e1", run_id="r1")


def starting(message: str, **fields: Any) -> FineTuneJobStatus:
    start = condition(ConditionType.TRAINED, "False", ConditionReason.STARTING, message)
    return status(ACCEPTED, PREPARED, start, **({"mlflow": RUN, "phase": "Starting"} | fields))


BEFORE = starting("training waits for MLflow")
STARTED: Json = {"attempt": 1, "restarts": 0, "start_time": NOW, "nodes": Nodes(desired=4)}
AFTER = starting("attempt 1: 4 pods are starting", **STARTED)
RESTARTING = condition(ConditionType.TRAINED, "False", ConditionReason.RESTARTING)


def with_conditions(*conditions: Condition) -> FineTuneJobStatus:
    return AFTER.model_copy(update={"conditions": list(conditions)})


# The decision, and whether its status may wait.
CASES: dict[str, tuple[Decision, bool]] = {
    "the pass that creates the Job": (Decision(AFTER, apply=(SERVICE, JOB)), True),
    "a pass that creates no Job": (Decision(AFTER, apply=(SERVICE,)), False),
    "another phase": (Decision(AFTER.model_copy(update={"phase": "Training"}), apply=(JOB,)), False),
    "another reason": (Decision(with_conditions(ACCEPTED, PREPARED, RESTARTING), apply=(JOB,)), False),
    "a new condition": (Decision(with_conditions(*AFTER.conditions, TRAINED), apply=(JOB,)), False),
    "the run of MLflow": (
        Decision(starting("x", mlflow=RUN.model_copy(update={"run_id": "r2"})), apply=(JOB,)),
        False,
    ),
    "the uid of a Job": (Decision(starting("x", jobs=JobUids(train="uid")), apply=(JOB,)), False),
    "a write to MLflow": (Decision(AFTER, apply=(JOB,), actions=(EnsureRun("e", "r", {}),)), False),
    "a finalizer": (Decision(AFTER, apply=(JOB,), finalizer=True), False),
}


@pytest.mark.parametrize(("decision", "expected"), CASES.values(), ids=CASES)
def test_only_what_the_next_pass_derives_from_the_job_may_wait(decision: Decision, *, expected: bool) -> None:
    assert find_delay(BEFORE, decision, ()) == (1.0 if expected else None)


RUN_ACTION = EnsureRun("e", "r", {})
FIRST = status(ACCEPTED, PREPARED, condition(ConditionType.TRAINED, "False", ConditionReason.STARTING))
OVER_QUOTA = condition(ConditionType.PODS_ADMITTED, "False", ConditionReason.QUOTA_EXCEEDED)
STALLED = condition(ConditionType.STALLED, "True", ConditionReason.POD_TEMPLATE_INVALID)
FIRST_DECISION = Decision(FIRST, actions=(RUN_ACTION,))
# The status before, the decision, the seconds for which the run has been pending, and the seconds that the status may wait.
FIRST_STATUSES: dict[str, tuple[FineTuneJobStatus, Decision, float | None, float | None]] = {
    "the run is being created": (status(), FIRST_DECISION, 2.0, 3.0),
    "for too long": (status(), FIRST_DECISION, 5.0, None),
    "the run exists": (status(), FIRST_DECISION, None, None),
    "not the first status": (FIRST, FIRST_DECISION, 2.0, None),
    "pods beyond a quota": (
        status(),
        Decision(status(ACCEPTED, OVER_QUOTA), actions=(RUN_ACTION,)),
        2.0,
        None,
    ),
    "a spec that must change": (
        status(),
        Decision(status(ACCEPTED, STALLED), actions=(RUN_ACTION,)),
        2.0,
        None,
    ),
    "children": (status(), Decision(FIRST, actions=(RUN_ACTION,), apply=(SERVICE,)), 2.0, None),
    "a finalizer": (status(), Decision(FIRST, actions=(RUN_ACTION,), finalizer=True), 2.0, None),
}


@pytest.mark.parametrize(
    ("before", "decision", "pending_seconds", "expected"), FIRST_STATUSES.values(), ids=FIRST_STATUSES
)
def test_the_first_status_of_a_job_without_a_problem_may_wait_for_the_run(
    before: FineTuneJobStatus, decision: Decision, pending_seconds: float | None, expected: float | None
) -> None:
    result = ActionResult(RUN_ACTION, pending_seconds=pending_seconds)
    assert find_delay(before, decision, (result,)) == expected
