"""The status of a promotion after a failed write."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from typing import NamedTuple

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


class _Report(NamedTuple):
    """The conditions that a failed write changes, all for one reason."""

    conditions: dict[ConditionType, bool | None]
    reason: ConditionReason
    message: str


def record_failed_action(
    promotion: Promotion,
    decision: PromotionDecision,
    action: PromotionAction,
    problem: Problem,
    *,
    now: datetime,
) -> PromotionDecision:
    """Return the decision with a status that names the failed write and the reason."""
    status = decision.status
    if isinstance(action, ClaimAlias) or (isinstance(action, CloseRun) and action.component == names.COPY):
        # The next pass reports that the registry does not answer. The status says already how a copy ended.
        return decision
    if sets_only_tags(action):
        return dataclasses.replace(decision, status=_record_refused_tags(promotion, status, problem, now))
    report = _describe_failure(promotion, status, action, problem)
    for kind, holds in report.conditions.items():
        status = with_condition(
            status, kind, holds, report.reason, report.message, now=now, generation=promotion.generation
        )
    return dataclasses.replace(decision, status=summarize_status(promotion, status, now))


def _describe_failure(
    promotion: Promotion, status: ModelPromotionStatus, action: PromotionAction, problem: Problem
) -> _Report:
    match action:
        case MoveAlias():
            return _describe_refused_move(promotion, problem)
        case StartJob(component=names.COPY):
            return _describe_missing_copy(status, problem)
        case StartJob() | CloseRun():
            message = f"version {status.candidate} cannot be judged yet: {problem.message}"
            conditions = {ConditionType.GATES_PASSED: None, ConditionType.PROMOTED: False}
            return _Report(conditions, ConditionReason.GATE_NOT_STARTED, message)
        case _:
            return _Report({ConditionType.SERVED: False}, problem.reason, problem.message)


def _describe_refused_move(promotion: Promotion, problem: Problem) -> _Report:
    spec, is_transient = promotion.spec, problem.reason in _TRANSIENT_REASONS
    what = f"alias {spec.alias} of {spec.model}" if spec else "the alias"
    reason = ConditionReason.MOVE_DELAYED if is_transient else ConditionReason.MOVE_REFUSED
    return _Report({ConditionType.PROMOTED: False}, reason, f"{what} cannot be moved: {problem.message}")


def _describe_missing_copy(status: ModelPromotionStatus, problem: Problem) -> _Report:
    copied = status.copied
    what = f"version {copied.source_version} of {copied.model} at {copied.uri}" if copied else "the version"
    return _Report(
        {ConditionType.SOURCE_READY: False, ConditionType.PROMOTED: False},
        ConditionReason.COPY_NOT_STARTED,
        f"{what} cannot be copied yet: {problem.message}",
    )


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
