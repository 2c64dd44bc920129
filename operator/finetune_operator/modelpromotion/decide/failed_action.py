"""What a write that failed means for the status of a promotion."""

from __future__ import annotations

import dataclasses
from datetime import datetime

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.errors import Problem
from finetune_operator.modelpromotion.decide.ready import restated
from finetune_operator.modelpromotion.model import Promotion, PromotionAction, PromotionDecision
from finetune_operator.registry.base import MoveAlias

# Problems that pass without a change by people.
_PASSING = (
    ConditionReason.MLFLOW_UNREACHABLE,
    ConditionReason.DATABRICKS_UNREACHABLE,
    ConditionReason.MLFLOW_ERROR,
)


def failed_action(
    promotion: Promotion,
    decision: PromotionDecision,
    action: PromotionAction,
    problem: Problem,
    *,
    now: datetime,
) -> PromotionDecision:
    """The decision, whose status now says which write failed and why."""
    spec, status = promotion.spec, decision.status
    if isinstance(action, MoveAlias):
        what = f"alias {spec.alias} of {spec.model}" if spec else "the alias"
        kind = ConditionType.PROMOTED
        reason = ConditionReason.MOVE_DELAYED if problem.reason in _PASSING else ConditionReason.MOVE_REFUSED
        message = f"{what} cannot be moved: {problem.message}"
    else:
        kind, reason, message = ConditionType.SERVED, problem.reason, problem.message
    status = restated(promotion, status, kind, reason, message, now=now)
    return dataclasses.replace(decision, status=status)
