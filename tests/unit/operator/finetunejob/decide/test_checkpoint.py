"""The newest checkpoint, and what keeps the next from being written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_crds.contract import TAG_CHECKPOINT_ERROR, TerminationMessage
from finetune_operator.controller import events
from finetune_operator.errors import Problem
from finetune_operator.finetunejob.model import Mlflow
from fixtures.operator_in_memory.decisions import (
    UID,
    child,
    conclude,
    condition,
    ended,
    ftj,
    observed,
    pod,
    running,
    said,
    tracked,
)

Json = dict[str, Any]
JOB = "tune-train-1"
FULL = "the checkpoint of step 20 could not be written: no space is left; the next is tried at step 30"
FOLDER = "/c/team-tune-0f1e2d3c"
STORED = condition(ConditionType.CHECKPOINT_STORED, "True", ConditionReason.CHECKPOINT_STORED)
BROKEN = condition(ConditionType.CHECKPOINT_STORED, "False", ConditionReason.CHECKPOINT_FAILED, FULL)
AWAY = Mlflow(problem=Problem(ConditionReason.MLFLOW_UNREACHABLE, "away"))


@dataclass
class Case:
    """What the run and a pod say, what the condition said before, and what it and the checkpoint are to be."""

    mlflow: Mlflow | None
    expected: tuple[str, str, str] | None
    step: int | None = None
    before: Condition | None = None
    told: int | None = None
    spec: Json | None = None


def complete(step: int) -> tuple[str, str, str]:
    return "True", ConditionReason.CHECKPOINT_STORED, f"the checkpoint of step {step} is complete"


FAILING = ("False", ConditionReason.CHECKPOINT_FAILED, FULL)
CASES: dict[str, Case] = {
    "none yet": Case(tracked(), None),
    "the first": Case(tracked(checkpoint_step=10), complete(10), step=10),
    "a newer one": Case(tracked(checkpoint_step=20), complete(20), step=20, before=STORED),
    "one that failed": Case(
        tracked(checkpoint_step=10, tags={TAG_CHECKPOINT_ERROR: FULL}), FAILING, step=10, before=STORED
    ),
    "the first failed": Case(tracked(tags={TAG_CHECKPOINT_ERROR: FULL}), FAILING),
    "one that was made up for": Case(
        tracked(checkpoint_step=30, tags={TAG_CHECKPOINT_ERROR: ""}), complete(30), step=30, before=BROKEN
    ),
    "MLflow is away": Case(AWAY, FAILING, before=BROKEN),
    "MLflow is away, and a pod told of one": Case(AWAY, complete(40), step=40, told=40),
    "MLflow is away, all was well, and a pod told of one": Case(
        AWAY, complete(40), step=40, before=STORED, told=40
    ),
    "MLflow is away, one had failed, and a pod told of one": Case(
        AWAY, FAILING, step=40, before=BROKEN, told=40
    ),
    "no checkpoints are wanted": Case(tracked(checkpoint_step=10), None, spec={}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_condition(case: Case) -> None:
    status = running()
    status = status.model_copy(
        update={"conditions": [*status.conditions, *([case.before] if case.before else [])]}
    )
    message = TerminationMessage(checkpoint_step=case.told)
    pods = [pod(JOB)] if case.told is None else [ended(JOB, 0, 75, message)]
    spec = {"checkpoint": {"uri": "/c"}} if case.spec is None else case.spec
    decision = conclude(ftj(status, **spec), observed(child(JOB), pods=pods, mlflow=case.mlflow))
    assert said(decision, ConditionType.CHECKPOINT_STORED) == case.expected
    checkpoint = decision.status.checkpoint
    expected = None if case.step is None else (case.step, f"{FOLDER}/step-{case.step:08d}")
    assert (checkpoint and (checkpoint.step, checkpoint.uri)) == expected


def test_a_failure_is_a_warning_and_making_up_for_it_is_not() -> None:
    about = events.EventTarget("FineTuneJob", "tune", "team", UID)
    kinds = [
        events.build_event(about, events.Change(None, reported), STORED.last_transition_time)["type"]
        for reported in (BROKEN, STORED)
    ]
    assert kinds == ["Warning", "Normal"]
