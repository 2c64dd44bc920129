"""What a write that failed means: what goes by itself is a delay, and what needs somebody is a refusal."""

from __future__ import annotations

import pytest

from finetune_crds.conditions import Reason, Type
from finetune_crds.promotion_status import ModelPromotionStatus
from finetune_operator.decide.promotion.undone import undone
from finetune_operator.model import MlflowProblem
from finetune_operator.promotion.model import MoveAlias, PromotionDecision
from finetune_operator.registry.writer import VersionNotReady
from unit.decide.promotion.rollout import NOW, promotion

MOVED = {
    "no answer": (Reason.MLFLOW_UNREACHABLE, Reason.MOVE_DELAYED, "Promoting"),
    "no answer of Databricks": (Reason.DATABRICKS_UNREACHABLE, Reason.MOVE_DELAYED, "Promoting"),
    "an error of MLflow's own": (Reason.MLFLOW_ERROR, Reason.MOVE_DELAYED, "Promoting"),
    "what MLflow never takes": (Reason.MLFLOW_REFUSED, Reason.MOVE_REFUSED, "Failed"),
    "no permission": (Reason.MLFLOW_FORBIDDEN, Reason.MOVE_REFUSED, "Failed"),
    "no permission in Databricks": (Reason.DATABRICKS_FORBIDDEN, Reason.MOVE_REFUSED, "Failed"),
    "no permission for its Lease": (Reason.LEASE_REFUSED, Reason.MOVE_REFUSED, "Failed"),
    "a version that is not there": (
        VersionNotReady("m", "3", "is not READY").problem.reason,
        Reason.MOVE_REFUSED,
        "Failed",
    ),
}


@pytest.mark.parametrize(("reason", "said", "phase"), MOVED.values(), ids=MOVED)
def test_a_move_that_failed(reason: Reason, said: Reason, phase: str) -> None:
    decision = PromotionDecision(status=ModelPromotionStatus(), actions=(MoveAlias("1", "2"),))
    problem = MlflowProblem(reason, "here is why")
    status = undone(promotion(decision.status), decision, decision.actions[0], problem, now=NOW).status
    assert [(item.type, item.status, item.reason, item.message) for item in status.conditions] == [
        (Type.PROMOTED, "False", said, "alias champion of main.llm.support cannot be moved: here is why")
    ]
    assert status.phase == phase
