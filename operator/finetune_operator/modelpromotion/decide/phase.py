"""The phase of a ModelPromotion, derived from its conditions alone."""

from __future__ import annotations

from collections.abc import Sequence

from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_crds.promotion_status import PromotionPhase

# The phase by the reason of Accepted or Promoted, if that condition is not True. Blocked: the promotion, or something that it names,
# must change. If a server or its administrator must act (MlflowNotConfigured, MoveRefused), the operator retries, and the phase is not
# Blocked.
_PHASES: dict[str, PromotionPhase] = {
    ConditionReason.MLFLOW_NOT_CONFIGURED: "Pending",
    ConditionReason.GATE_INCONCLUSIVE: "Pending",
    ConditionReason.GATE_RUNNING: "Pending",
    ConditionReason.GATE_NOT_STARTED: "Pending",
    ConditionReason.AWAITING_WINDOW: "Pending",
    ConditionReason.BREACHED: "Pending",
    ConditionReason.AWAITING_APPROVAL: "AwaitingApproval",
    ConditionReason.SOAKING: "Soaking",
    ConditionReason.PROMOTING: "Promoting",
    ConditionReason.CANARY: "Promoting",
    ConditionReason.MOVE_DELAYED: "Promoting",
    ConditionReason.MOVE_REFUSED: "Promoting",
    ConditionReason.GATE_FAILED: "Refused",
    ConditionReason.APPROVAL_TIMED_OUT: "Refused",
    ConditionReason.WITHDRAWN: "Refused",
    ConditionReason.REGRESSED: "Refused",
    ConditionReason.INVALID_SPEC: "Blocked",
    ConditionReason.CONFLICT: "Blocked",
    ConditionReason.JOB_FAILED: "Blocked",
    ConditionReason.COPY_FAILED: "Blocked",
    ConditionReason.NOTHING_TO_ROLL_BACK_TO: "Blocked",
    ConditionReason.REGISTRY_CHANGED: "Blocked",
    ConditionReason.ALIAS_MOVED: "Blocked",
    ConditionReason.ALIAS_REMOVED: "Blocked",
}
# Reasons for which Served is not True and the phase is Blocked. For all other reasons the operator retries, although some of them need
# a person too, for example to grant a permission (DatabricksForbidden).
_BLOCKED_ENDPOINT = (
    ConditionReason.ENDPOINT_FAILED,
    ConditionReason.CANARY_FAILED,
    ConditionReason.CONFLICT,
)


def phase(conditions: Sequence[Condition]) -> PromotionPhase:
    """The phase that follows from the conditions."""
    by_type = {item.type: item for item in conditions}
    accepted, suspended = by_type.get(ConditionType.ACCEPTED), by_type.get(ConditionType.SUSPENDED)
    if accepted and accepted.status == "False":
        return _PHASES.get(accepted.reason, "Blocked")
    if suspended and suspended.status == "True":
        return "Suspended"
    promoted, served = by_type.get(ConditionType.PROMOTED), by_type.get(ConditionType.SERVED)
    if (
        promoted
        and promoted.reason == ConditionReason.CANARY
        and served
        and served.reason in _BLOCKED_ENDPOINT
    ):
        # The canary cannot proceed.
        return "Blocked"
    if promoted is None or promoted.status != "True":
        return _PHASES.get(promoted.reason, "Pending") if promoted else "Pending"
    if served and served.status != "True":
        return "Blocked" if served.reason in _BLOCKED_ENDPOINT else "Promoting"
    return "Promoted"
