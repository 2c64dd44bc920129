"""A trial uses the table that an earlier trial of its sweep has prepared, without a preparation of its own.

A preparation of its own would start Spark only to find that table, or, if the sources have changed since, would write other rows, with
which the losses of the trials could not be compared.
"""

from __future__ import annotations

from collections.abc import Iterable

from finetune_crds.base import Json
from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.status import DataStatus
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.sweep import trial_state

# The parts of a spec that a preparation depends on. The trials of a sweep have the rest of it in common.
_PREPARED_FIELDS = ("data", "model", "objective")


def find_prepared_trial(trial: Json, siblings: Iterable[Json]) -> Json | None:
    """Return the first trial of a sweep that has prepared the same data; None if there is none, or if each trial prepares its own table.

    Args:
        trial: the trial that is about to prepare.
        siblings: the FineTuneJobs of its sweep.
    """
    prepare = (trial["spec"].get("data") or {}).get("prepare") or {}
    if prepare.get("reuse") == "Never":
        return None
    prepared = {
        condition["lastTransitionTime"]: sibling
        for sibling in siblings
        if _prepare_same_data(trial, sibling) and (condition := _find_prepared(sibling))
    }
    return prepared[min(prepared)] if prepared else None


def use_prepared_table(draft: Draft) -> bool:
    """Record the table of the earlier trial, and return whether there is one."""
    trial = draft.observed.prepared_trial
    prepared = _find_prepared(trial) if trial else None
    if trial is None or prepared is None:
        return False
    name = trial["metadata"]["name"]
    table = DataStatus.model_validate(trial_state.read_part(trial, "data"))
    draft.update(data=table.model_copy(update={"written_by": table.written_by or name}))
    message = f"trial {name} of the same sweep has prepared the data: {prepared['message']}"
    draft.set(ConditionType.PREPARED, True, ConditionReason(prepared["reason"]), message)
    return True


def _prepare_same_data(trial: Json, sibling: Json) -> bool:
    return all(trial["spec"].get(field) == sibling["spec"].get(field) for field in _PREPARED_FIELDS)


def _find_prepared(trial: Json) -> Json | None:
    """The condition Prepared of a trial with a table; None if it has none."""
    condition = trial_state.find_condition(trial, ConditionType.PREPARED)
    is_prepared = condition is not None and condition["status"] == "True"
    return condition if is_prepared and trial_state.read_part(trial, "data") else None
