"""What a write that failed means for the status of a promotion."""

from __future__ import annotations

import dataclasses
from datetime import datetime

from finetune_crds.conditions import Reason, Type
from finetune_operator.decide.draft import with_condition
from finetune_operator.decide.promotion.phase import phase
from finetune_operator.model import MlflowProblem
from finetune_operator.promotion.model import MoveAlias, Promotion, PromotionAction, PromotionDecision


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
        kind, reason = Type.PROMOTED, Reason.PROMOTING
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
