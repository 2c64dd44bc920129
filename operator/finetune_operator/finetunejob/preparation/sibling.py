"""A trial uses the table that another trial of its sweep has prepared, without a preparation of its own.

A preparation of its own would start Spark only to find that table, or, if the sources have changed since, would write other rows, with
which the losses of the trials could not be compared.
"""

from __future__ import annotations

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import DataStatus
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.sweep import trial_state
from finetune_operator.owners import find_finetunejob


def use_prepared_table(draft: Draft) -> bool:
    """Record the table of the trial that holds the Lease of this preparation, and return whether it has one."""
    holder = _find_holder(draft)
    prepared = trial_state.find_condition(holder, ConditionType.PREPARED) if holder else None
    data = trial_state.read_part(holder, "data") if holder else None
    if holder is None or data is None or prepared is None or prepared["status"] != "True":
        return False
    name = holder["metadata"]["name"]
    table = DataStatus.model_validate(data)
    draft.update(data=table.model_copy(update={"written_by": table.written_by or name}))
    message = f"trial {name} of the same sweep has prepared the data: {prepared['message']}"
    draft.set(ConditionType.PREPARED, True, ConditionReason(prepared["reason"]), message)
    return True


def _find_holder(draft: Draft) -> Json | None:
    """The FineTuneJob that holds the Lease, if it belongs to the same sweep as this one."""
    lease_state = draft.observed.lease
    if draft.ftj.sweep is None or lease_state is None or lease_state.holder is None:
        return None
    return lease_state.holder if find_finetunejob(lease_state.holder) == draft.ftj.sweep else None
