"""What a write that failed means: a passing problem delays the move, any other refuses it."""

from __future__ import annotations

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_crds.promotion_status import ModelPromotionStatus
from finetune_operator.errors import Problem
from finetune_operator.modelpromotion.decide.failed_action import record_failed_action
from finetune_operator.modelpromotion.model import PromotionDecision, StartJob
from finetune_operator.registry.base import MoveAlias
from finetune_operator.registry.writer import VersionNotReady
from unit.operator.modelpromotion.decide.rollout import NOW, promotion

MOVED = {
    "no answer": (ConditionReason.MLFLOW_UNREACHABLE, ConditionReason.MOVE_DELAYED),
    "no answer of Databricks": (
        ConditionReason.DATABRICKS_UNREACHABLE,
        ConditionReason.MOVE_DELAYED,
    ),
    "an error of MLflow's own": (ConditionReason.MLFLOW_ERROR, ConditionReason.MOVE_DELAYED),
    "what MLflow never takes": (ConditionReason.MLFLOW_REFUSED, ConditionReason.MOVE_REFUSED),
    "no permission": (ConditionReason.MLFLOW_FORBIDDEN, ConditionReason.MOVE_REFUSED),
    "no permission in Databricks": (
        ConditionReason.DATABRICKS_FORBIDDEN,
        ConditionReason.MOVE_REFUSED,
    ),
    "no permission for its Lease": (ConditionReason.MOVE_REFUSED, ConditionReason.MOVE_REFUSED),
    "a version that is not there": (
        VersionNotReady("m", "3", "is not READY").problem.reason,
        ConditionReason.MOVE_REFUSED,
    ),
}


@pytest.mark.parametrize(("reason", "message"), MOVED.values(), ids=MOVED)
def test_a_move_that_failed(reason: ConditionReason, message: ConditionReason) -> None:
    decision = PromotionDecision(status=ModelPromotionStatus(), actions=(MoveAlias("1", "2"),))
    problem = Problem(reason, "here is why")
    status = record_failed_action(
        promotion(decision.status), decision, decision.actions[0], problem, now=NOW
    ).status
    expected = (message, "alias champion of main.llm.support cannot be moved: here is why")
    assert {str(item.type): (item.status, item.reason, item.message) for item in status.conditions} == {
        "Promoted": ("False", *expected),
        "Ready": ("False", *expected),
        "Reconciling": ("True", *expected),
    }
    assert status.phase == "Promoting"


def test_a_job_that_could_not_be_created_leaves_the_gates_unclear() -> None:
    decision = PromotionDecision(
        status=ModelPromotionStatus(candidate="2"), actions=(StartJob({"metadata": {}}, None),)
    )
    problem = Problem(ConditionReason.MLFLOW_UNREACHABLE, "here is why")
    status = record_failed_action(
        promotion(decision.status), decision, decision.actions[0], problem, now=NOW
    ).status
    expected = (ConditionReason.GATE_NOT_STARTED, "version 2 cannot be judged yet: here is why")
    assert {str(item.type): (item.status, item.reason, item.message) for item in status.conditions} == {
        "GatesPassed": ("Unknown", *expected),
        "Promoted": ("False", *expected),
        "Ready": ("False", *expected),
        "Reconciling": ("True", *expected),
    }
    assert status.phase == "Pending"
