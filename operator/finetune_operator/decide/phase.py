"""The one word for where a job stands, derived from its conditions alone."""

from __future__ import annotations

from collections.abc import Sequence

from finetune_crds.conditions import Condition, Reason, Type
from finetune_crds.status import Phase

_WHILE_TRAINING: dict[str, Phase] = {
    Reason.TRAINING.value: "Training",
    Reason.STARTING.value: "Starting",
    Reason.RESTARTING.value: "Starting",
}


def phase(conditions: Sequence[Condition]) -> Phase:
    """The phase that the conditions amount to; the end of a job outweighs everything before it."""
    by_type = {item.type: item for item in conditions}

    def holds(kind: Type) -> bool:
        return kind in by_type and by_type[kind].status == "True"

    if holds(Type.FAILED):
        return "Failed"
    if holds(Type.SUCCEEDED):
        return "Succeeded"
    if holds(Type.SUSPENDED):
        return "Suspended"
    if holds(Type.TRAINED):
        return "Registering"
    if holds(Type.PREPARED):
        trained = by_type.get(Type.TRAINED)
        return _WHILE_TRAINING.get(trained.reason, "Pending") if trained else "Pending"
    return "Preparing" if Type.PREPARED in by_type else "Pending"
