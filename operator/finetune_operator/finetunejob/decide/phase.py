"""The phase of a FineTuneJob, derived from its conditions alone."""

from __future__ import annotations

from collections.abc import Sequence

from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_crds.status import Phase

_WHILE_PREPARING: dict[str, Phase] = {
    ConditionReason.WAITING_FOR_PREPARATION.value: "Pending",
    ConditionReason.POD_TEMPLATE_INVALID.value: "Pending",
    ConditionReason.SPARK_OPERATOR_MISSING.value: "Pending",
    ConditionReason.SPARK_OPERATOR_FORBIDDEN.value: "Pending",
    ConditionReason.QUEUED.value: "Pending",
    ConditionReason.QUEUE_INADMISSIBLE.value: "Pending",
}
_WHILE_TRAINING: dict[str, Phase] = {
    ConditionReason.TRAINING.value: "Training",
    ConditionReason.STARTING.value: "Starting",
    ConditionReason.RESTARTING.value: "Starting",
    ConditionReason.QUEUED.value: "Pending",
    ConditionReason.QUEUE_INADMISSIBLE.value: "Pending",
}


def phase(conditions: Sequence[Condition]) -> Phase:
    """The phase that the conditions amount to; the end of a job outweighs everything before it."""
    by_type = {item.type: item for item in conditions}

    def holds(kind: ConditionType) -> bool:
        return kind in by_type and by_type[kind].status == "True"

    if holds(ConditionType.FAILED):
        return "Failed"
    if holds(ConditionType.SUCCEEDED):
        return "Succeeded"
    if holds(ConditionType.SUSPENDED):
        return "Suspended"
    if holds(ConditionType.TRAINED):
        evaluates = ConditionType.EVALUATED in by_type and not holds(ConditionType.EVALUATED)
        return "Evaluating" if evaluates else "Registering"
    if holds(ConditionType.PREPARED):
        trained = by_type.get(ConditionType.TRAINED)
        return _WHILE_TRAINING.get(trained.reason, "Pending") if trained else "Pending"
    prepared = by_type.get(ConditionType.PREPARED)
    return _WHILE_PREPARING.get(prepared.reason, "Preparing") if prepared else "Pending"
