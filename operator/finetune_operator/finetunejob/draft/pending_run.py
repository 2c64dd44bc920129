"""Whether the MLflow run of a job is pending."""

from __future__ import annotations

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.model import EnsureRun

RUN_PENDING = "preparation starts when the MLflow run exists"
"""What a preparation waits for while `is_run_pending`."""


def is_run_pending(draft: Draft) -> bool:
    """Whether a run is about to be created, or looked for: a preparation that starts now would not know the id of training's run.

    One whose creation has failed holds no preparation up, and neither does a server that cannot be reached.
    """
    if draft.status.run_id is None and is_unread(draft):
        return True
    tracked = draft.condition(ConditionType.TRACKED)
    if tracked and tracked.reason == ConditionReason.RUN_NOT_FOUND:
        return True
    creates = any(isinstance(action, EnsureRun) for action in draft.actions)
    return creates and (tracked is None or tracked.status == "True")


def is_unread(draft: Draft) -> bool:
    """Whether the job has an MLflow server that has not answered yet, and neither is known to be unreachable."""
    has_server = bool(draft.settings.servers(draft.spec.tracking)[0])
    return has_server and draft.observed.mlflow is None
