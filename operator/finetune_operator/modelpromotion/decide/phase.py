"""The phase of a ModelPromotion, derived from its conditions alone."""

from __future__ import annotations

from collections.abc import Sequence

from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_crds.promotion_status import PromotionPhase

_WHILE_NOT_PROMOTED: dict[str, PromotionPhase] = {
    ConditionReason.INVALID_SPEC: "Failed",
    ConditionReason.MLFLOW_NOT_CONFIGURED: "Pending",
    ConditionReason.CONFLICT: "Conflict",
    ConditionReason.JOB_FAILED: "Failed",
    ConditionReason.NOTHING_TO_ROLL_BACK_TO: "Failed",
    ConditionReason.GATE_FAILED: "Refused",
    ConditionReason.APPROVAL_TIMED_OUT: "Refused",
    ConditionReason.WITHDRAWN: "Refused",
    ConditionReason.GATE_INCONCLUSIVE: "Evaluating",
    ConditionReason.AWAITING_APPROVAL: "AwaitingApproval",
    ConditionReason.SOAKING: "Soaking",
    ConditionReason.PROMOTING: "Promoting",
    ConditionReason.MOVE_DELAYED: "Promoting",
    ConditionReason.MOVE_REFUSED: "Promoting",
    ConditionReason.REGISTRY_CHANGED: "Drifted",
    ConditionReason.ALIAS_MOVED: "Drifted",
    ConditionReason.ALIAS_REMOVED: "Drifted",
}
_WHILE_NOT_SERVED: dict[str, PromotionPhase] = {
    ConditionReason.ENDPOINT_FAILED: "Failed",
    ConditionReason.CANARY_FAILED: "Failed",
    ConditionReason.CONFLICT: "Conflict",
}


def phase(conditions: Sequence[Condition]) -> PromotionPhase:
    """The phase that the conditions amount to."""
    by_type = {item.type: item for item in conditions}
    accepted, suspended = by_type.get(ConditionType.ACCEPTED), by_type.get(ConditionType.SUSPENDED)
    if accepted and accepted.status == "False":
        return _WHILE_NOT_PROMOTED.get(accepted.reason, "Failed")
    if suspended and suspended.status == "True":
        return "Suspended"
    promoted = by_type.get(ConditionType.PROMOTED)
    if promoted is None or promoted.status != "True":
        return _WHILE_NOT_PROMOTED.get(promoted.reason, "Pending") if promoted else "Pending"
    served = by_type.get(ConditionType.SERVED)
    if served and served.status != "True":
        return _WHILE_NOT_SERVED.get(served.reason, "RollingOut")
    return "RolledBack" if promoted.reason == ConditionReason.ROLLED_BACK else "Promoted"
