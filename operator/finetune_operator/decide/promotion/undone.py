"""What a write that failed means for the status of a promotion."""

from __future__ import annotations

import dataclasses
from datetime import datetime

from finetune_crds.conditions import Reason, Type
from finetune_operator.decide.promotion.phase import phase
from finetune_operator.decide.saying import with_condition
from finetune_operator.model import MlflowProblem
from finetune_operator.promotion.model import MoveAlias, Promotion, PromotionAction, PromotionDecision

# What goes by itself; anything else needs somebody to do something.
_PASSING = (Reason.MLFLOW_UNREACHABLE, Reason.DATABRICKS_UNREACHABLE, Reason.MLFLOW_ERROR)


def undone(
    promotion: Promotion,
    decision: PromotionDecision,
    action: PromotionAction,
    problem: MlflowProblem,
    *,
    now: datetime,
) -> PromotionDecision:
    """The decision, whose status now says which write failed and why."""
    spec, status = promotion.spec, decision.status
    if isinstance(action, MoveAlias):
        what = f"alias {spec.alias} of {spec.model}" if spec else "the alias"
        kind = Type.PROMOTED
        reason = Reason.MOVE_DELAYED if problem.reason in _PASSING else Reason.MOVE_REFUSED
        message = f"{what} cannot be moved: {problem.message}"
    else:
        kind, reason, message = Type.SERVED, problem.reason, problem.message
    conditions = with_condition(
        status.conditions,
        kind,
        False,
        reason,
        message,
        now=now.replace(microsecond=0),
        generation=promotion.generation,
    )
    said = status.model_copy(update={"conditions": conditions, "phase": phase(conditions)})
    return dataclasses.replace(decision, status=said)
