"""The status of a promotion after a failed write."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import datetime

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.promotion_status import ModelPromotionStatus
from finetune_operator import names
from finetune_operator.errors import UNREACHABLE, Problem
from finetune_operator.modelpromotion.decide.draft import truncate
from finetune_operator.modelpromotion.decide.ready import summarize_status
from finetune_operator.modelpromotion.decide.version_tags import TAGS_REFUSED
from finetune_operator.modelpromotion.model import (
    ClaimAlias,
    CloseRun,
    Promotion,
    PromotionAction,
    PromotionDecision,
    StartJob,
    sets_only_tags,
)
from finetune_operator.policy.status import find_condition, read_state, with_condition
from finetune_operator.registry.base import MoveAlias

# Problems that usually end without intervention.
_TRANSIENT_REASONS = (*UNREACHABLE, ConditionReason.MLFLOW_ERROR)


def record_failed_action(
    promotion: Promotion,
    decision: PromotionDecision,
    action: PromotionAction,
    problem: Problem,
    *,
    now: datetime,
) -> PromotionDecision:
    """Return the decision with a status that names the failed write and the reason."""
    spec, status = promotion.spec, decision.status
    if isinstance(action, ClaimAlias):
        # The registry does not answer: the next pass reports that.
        return decision
    if sets_only_tags(action):
        return dataclasses.replace(decision, status=_record_refused_tags(promotion, status, problem, now))
    if isinstance(action, MoveAlias):
        what = f"alias {spec.alias} of {spec.model}" if spec else "the alias"
        kind = ConditionType.PROMOTED
        reason = (
            ConditionReason.MOVE_DELAYED
            if problem.reason in _TRANSIENT_REASONS
            else ConditionReason.MOVE_REFUSED
        )
        message = f"{what} cannot be moved: {problem.message}"
    elif isinstance(action, CloseRun) and action.component == names.COPY:
        # The status already says how the copy ended, and the next pass tries again.
        return decision
    elif isinstance(action, StartJob) and action.component == names.COPY:
        return dataclasses.replace(decision, status=_record_copy_problem(promotion, status, problem, now))
    elif isinstance(action, StartJob | CloseRun):
        return dataclasses.replace(decision, status=_record_gate_problem(promotion, status, problem, now))
    else:
        kind, reason, message = ConditionType.SERVED, problem.reason, problem.message
    status = with_condition(status, kind, False, reason, message, now=now, generation=promotion.generation)
    return dataclasses.replace(decision, status=summarize_status(promotion, status, now))


def _record_refused_tags(
    promotion: Promotion, status: ModelPromotionStatus, problem: Problem, now: datetime
) -> ModelPromotionStatus:
    """The status of a promotion whose alias is in place, and whose version could not be tagged."""
    condition = find_condition(status, ConditionType.PROMOTED)
    if condition is None:
        return status
    stated, _, _ = condition.message.partition(TAGS_REFUSED)
    message = truncate(f"{stated}{TAGS_REFUSED}{problem.message}")
    status = with_condition(
        status,
        ConditionType.PROMOTED,
        read_state(condition.status),
        condition.reason,
        message,
        now=now,
        generation=promotion.generation,
    )
    return summarize_status(promotion, status, now)


def _record_copy_problem(
    promotion: Promotion, status: ModelPromotionStatus, problem: Problem, now: datetime
) -> ModelPromotionStatus:
    """The status of a promotion whose Job for a copy could not be created."""
    copied = status.copied
    what = f"version {copied.source_version} of {copied.model} at {copied.uri}" if copied else "the version"
    message = f"{what} cannot be copied yet: {problem.message}"
    return _set_false(
        promotion,
        status,
        (ConditionType.SOURCE_READY, ConditionType.PROMOTED),
        reason=ConditionReason.COPY_NOT_STARTED,
        message=message,
        now=now,
    )


def _record_gate_problem(
    promotion: Promotion, status: ModelPromotionStatus, problem: Problem, now: datetime
) -> ModelPromotionStatus:
    """The status of a promotion whose gate cannot be judged, since its Job could not be created, or its MLflow run could not be closed."""
    message = f"version {status.candidate} cannot be judged yet: {problem.message}"
    reason = ConditionReason.GATE_NOT_STARTED
    status = with_condition(
        status,
        ConditionType.GATES_PASSED,
        None,
        reason,
        message,
        now=now,
        generation=promotion.generation,
    )
    return _set_false(promotion, status, (ConditionType.PROMOTED,), reason=reason, message=message, now=now)


def _set_false(
    promotion: Promotion,
    status: ModelPromotionStatus,
    kinds: Sequence[ConditionType],
    *,
    reason: ConditionReason,
    message: str,
    now: datetime,
) -> ModelPromotionStatus:
    """The status with these conditions False for one reason."""
    for kind in kinds:
        status = with_condition(
            status, kind, False, reason, message, now=now, generation=promotion.generation
        )
    return summarize_status(promotion, status, now)
