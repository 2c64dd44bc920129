"""The one word for where a promotion stands, derived from its conditions alone."""

from __future__ import annotations

from collections.abc import Sequence

from finetune_crds.conditions import Condition, Reason, Type
from finetune_crds.promotion_status import PromotionPhase

_WHILE_NOT_PROMOTED: dict[str, PromotionPhase] = {
    Reason.INVALID_SPEC: "Failed",
    Reason.CONFLICT: "Conflict",
    Reason.JOB_FAILED: "Failed",
    Reason.NOTHING_TO_ROLL_BACK_TO: "Failed",
    Reason.GATE_FAILED: "Refused",
    Reason.APPROVAL_TIMED_OUT: "Refused",
    Reason.WITHDRAWN: "Refused",
    Reason.GATE_INCONCLUSIVE: "Evaluating",
    Reason.AWAITING_APPROVAL: "AwaitingApproval",
    Reason.SOAKING: "Soaking",
    Reason.PROMOTING: "Promoting",
    Reason.MOVE_DELAYED: "Promoting",
    Reason.MOVE_REFUSED: "Failed",
    Reason.ALIAS_MOVED: "Drifted",
    Reason.ALIAS_REMOVED: "Drifted",
}
_WHILE_NOT_SERVED: dict[str, PromotionPhase] = {
    Reason.ENDPOINT_FAILED: "Failed",
    Reason.CANARY_FAILED: "Failed",
    Reason.CONFLICT: "Conflict",
    Reason.DATABRICKS_ERROR: "Failed",
    Reason.CREDENTIALS_MISSING: "Failed",
    Reason.CREDENTIALS_UNREADABLE: "Failed",
    Reason.DATABRICKS_FORBIDDEN: "Failed",
    Reason.DATABRICKS_NOT_CONFIGURED: "Failed",
}


def phase(conditions: Sequence[Condition]) -> PromotionPhase:
    """The phase that the conditions amount to."""
    by_type = {item.type: item for item in conditions}
    accepted, suspended = by_type.get(Type.ACCEPTED), by_type.get(Type.SUSPENDED)
    if accepted and accepted.status == "False":
        return _WHILE_NOT_PROMOTED.get(accepted.reason, "Failed")
    if suspended and suspended.status == "True":
        return "Suspended"
    promoted = by_type.get(Type.PROMOTED)
    if promoted is None or promoted.status != "True":
        return _WHILE_NOT_PROMOTED.get(promoted.reason, "Pending") if promoted else "Pending"
    served = by_type.get(Type.SERVED)
    if served and served.status != "True":
        return _WHILE_NOT_SERVED.get(served.reason, "RollingOut")
    return "RolledBack" if promoted.reason == Reason.ROLLED_BACK else "Promoted"
