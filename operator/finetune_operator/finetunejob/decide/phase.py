"""The phase of a FineTuneJob, derived from its conditions alone."""

from __future__ import annotations

from collections.abc import Sequence

from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_crds.status_parts import Phase

# The phase by the reason of Prepared, while Prepared is not true; Preparing for other reasons.
_WHILE_PREPARING: dict[str, Phase] = {
    ConditionReason.WAITING_FOR_PREPARATION.value: "Pending",
    ConditionReason.POD_TEMPLATE_INVALID.value: "Pending",
    ConditionReason.SPARK_OPERATOR_MISSING.value: "Pending",
    ConditionReason.SPARK_OPERATOR_FORBIDDEN.value: "Pending",
    ConditionReason.QUEUED.value: "Queued",
    ConditionReason.QUEUE_INADMISSIBLE.value: "Pending",
}
# The phase by the reason of Trained, while Trained is not true; Pending for other reasons.
_WHILE_TRAINING: dict[str, Phase] = {
    ConditionReason.TRAINING.value: "Training",
    ConditionReason.STARTING.value: "Starting",
    ConditionReason.RESTARTING.value: "Starting",
    ConditionReason.QUEUED.value: "Queued",
    ConditionReason.QUEUE_INADMISSIBLE.value: "Pending",
}


def phase(conditions: Sequence[Condition]) -> Phase:
    """Derive the phase from the conditions; the end of a job takes precedence."""
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
        return _phase_after_training(by_type.get(ConditionType.EVALUATED))
    if holds(ConditionType.PREPARED):
        trained = by_type.get(ConditionType.TRAINED)
        return _WHILE_TRAINING.get(trained.reason, "Pending") if trained else "Pending"
    prepared = by_type.get(ConditionType.PREPARED)
    return _WHILE_PREPARING.get(prepared.reason, "Preparing") if prepared else "Pending"


def _phase_after_training(evaluated: Condition | None) -> Phase:
    if evaluated is None or evaluated.status == "True":
        return "Registering"
    return "Queued" if evaluated.reason == ConditionReason.QUEUED else "Evaluating"
