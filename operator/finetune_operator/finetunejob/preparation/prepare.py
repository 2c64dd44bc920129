"""The preparation: it turns the source into splits of a known version, with the backend that the spec selects."""

from __future__ import annotations

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.preparation import backends, sibling
from finetune_operator.policy.result import Continue, Outcome


def prepare(draft: Draft) -> Outcome:
    """Create the splits. Until they exist, each pass ends here."""
    if draft.holds(ConditionType.PREPARED):
        backends.clean_up(draft)
        return Continue
    backend = backends.find_backend(draft.spec)
    if backend and sibling.use_prepared_table(draft):
        return Continue
    if backend:
        return backend.prepare(draft)
    if draft.spec.data is None:
        reason, message = ConditionReason.NO_DATA, "spec.data is not set: your command reads its own data"
    else:
        reason, message = ConditionReason.SPLITS_GIVEN, "spec.data.splits names existing splits"
    draft.set(ConditionType.PREPARED, True, reason, message)
    return Continue
