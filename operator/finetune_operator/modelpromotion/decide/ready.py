"""The summary conditions of a ModelPromotion.

Ready: the alias points at a version that passed its gates, and the endpoint serves it. A candidate that is judged, waits or was
refused does not change that, since the alias stays. Reconciling: the promotion is in progress, or waits for something that may
still happen. Stalled: it cannot make progress until its spec or its source changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime

from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_crds.modelpromotion import ModelPromotionSpec
from finetune_crds.promotion_status import ModelPromotionStatus, MoveReason, PromotionPhase
from finetune_operator.modelpromotion.decide.phase import phase
from finetune_operator.modelpromotion.model import Promotion
from finetune_operator.policy.ready import Readiness, summarize

# Moves to a version that passed its gates, or that a person chose.
_APPROVED_REASONS: tuple[MoveReason, ...] = (
    "Promoted",
    "Reverted",
    "RolledBack",
    "Withdrawn",
    "Regressed",
    "Adopted",
)


def summarize_status(
    promotion: Promotion, status: ModelPromotionStatus, now: datetime
) -> ModelPromotionStatus:
    """The status with the fields that are derived from it: `passed`, the phase, the summary conditions and their generation."""
    status = status.model_copy(update={"passed": _passed_version(status)})
    new_phase = phase(status.conditions)
    readiness = _assess_readiness(promotion, status, new_phase)
    return summarize(status, readiness, new_phase, now=now, generation=promotion.generation)


def _assess_readiness(
    promotion: Promotion, status: ModelPromotionStatus, new_phase: PromotionPhase
) -> Readiness:
    """The content of the summary conditions.

    Args:
        promotion: the resource at the start of the pass.
        status: the new status, complete except for the phase and the summary. It has at least one condition.
        new_phase: the phase of the new status.
    """
    by_type = {item.type: item for item in status.conditions}
    explanation = next(_explanations(by_type))
    is_ready = _is_at_passed_version(promotion, status, new_phase)
    served = by_type.get(ConditionType.SERVED)
    if is_ready and served and served.status != "True":
        explanation, is_ready = served, False
    message = explanation.message
    if is_ready and (explanation.type != ConditionType.PROMOTED or explanation.status != "True"):
        message = f"{_describe_alias(promotion, status)}; {message}"
    also = _progress_conditions(new_phase, explanation, is_ready=is_ready)
    return Readiness(is_ready, also, explanation.reason, message)


def _progress_conditions(
    new_phase: PromotionPhase, explanation: Condition, *, is_ready: bool
) -> tuple[ConditionType, ...]:
    """Reconciling or Stalled; empty if the promotion is at rest."""
    if _are_others_outdated(explanation):
        return (ConditionType.RECONCILING,)
    if new_phase in ("Refused", "Suspended") and is_ready:
        return ()
    if new_phase == "Promoted" and explanation.status == "True":
        return ()
    if new_phase in ("Refused", "Blocked"):
        return (ConditionType.STALLED,)
    return (ConditionType.RECONCILING,)


def _are_others_outdated(explanation: Condition) -> bool:
    """Whether the other conditions may be outdated, because the registry does not answer or the operator failed."""
    if explanation.type == ConditionType.REGISTRY_READY:
        return explanation.status != "True" and explanation.reason != ConditionReason.REGISTRY_CHANGED
    return explanation.type == ConditionType.ACCEPTED and explanation.status == "Unknown"


def _describe_alias(promotion: Promotion, status: ModelPromotionStatus) -> str:
    alias = promotion.spec.alias if promotion.spec else "the alias"
    return (
        f"{alias} is at version {status.current}, which passed its gates or was chosen by a person"
        if status.current
        else f"{alias} is removed"
    )


def _explanations(by_type: Mapping[str, Condition]) -> Iterator[Condition]:
    """The conditions that may explain the state of the promotion, the best first: what prevents progress, and then what is achieved."""
    accepted, suspended = by_type.get(ConditionType.ACCEPTED), by_type.get(ConditionType.SUSPENDED)
    if accepted and accepted.status != "True":
        yield accepted
    if suspended and suspended.status == "True":
        yield suspended
    for kind in (ConditionType.REGISTRY_READY, ConditionType.PROMOTED, ConditionType.SERVED):
        if kind in by_type and by_type[kind].status != "True":
            yield by_type[kind]
    for kind in (ConditionType.PROMOTED, ConditionType.REGISTRY_READY, ConditionType.ACCEPTED):
        if kind in by_type:
            yield by_type[kind]
    yield from by_type.values()


def _is_at_passed_version(
    promotion: Promotion, status: ModelPromotionStatus, new_phase: PromotionPhase
) -> bool:
    """Whether the alias points at a version that passed its gates, or that a person chose."""
    if _has_registry_changed(status):
        return False
    if new_phase == "Promoted":
        return True
    if new_phase == "Blocked" or promotion.spec is None:
        return False
    return _is_settled(promotion.spec, status) and status.passed == status.promoted


def _has_registry_changed(status: ModelPromotionStatus) -> bool:
    """Whether the last read of the registry showed that it is another registry."""
    by_type = {item.type: item for item in status.conditions}
    registry, promoted = by_type.get(ConditionType.REGISTRY_READY), by_type.get(ConditionType.PROMOTED)
    if registry is None or registry.status == "True":
        return False
    # NB: while the registry does not answer, only Promoted still reports that the registry had changed.
    reasons = {item.reason for item in (registry, promoted) if item}
    return ConditionReason.REGISTRY_CHANGED in reasons


def _is_settled(spec: ModelPromotionSpec, status: ModelPromotionStatus) -> bool:
    """Whether the alias is where this promotion put it, and no rollback or withdrawal is due."""
    if status.current is None or status.current != status.promoted:
        return False
    if spec.rollback_to is not None:
        target = status.rollback
        if target is None or target.requested != spec.rollback_to.text:
            return False
        return target.version == status.current
    withheld = status.withheld
    is_withdrawal_due = (
        withheld is not None and withheld.reason != "Adopted" and withheld.version == status.current
    )
    return not is_withdrawal_due


def _passed_version(status: ModelPromotionStatus) -> str | None:
    """The version that the alias should point at, if it passed its gates or a person chose it; otherwise None.

    NB: the history has no move to a version that had the alias from the start, and old moves are dropped. So the earlier value of
    `passed` applies as long as the alias stays at the version.
    """
    promoted = any(
        item.type == ConditionType.PROMOTED and item.status == "True" for item in status.conditions
    )
    approved_versions = (move.to_version for move in status.history if move.reason in _APPROVED_REASONS)
    has_passed = promoted or status.promoted in approved_versions or status.passed == status.promoted
    return status.promoted if has_passed else None
