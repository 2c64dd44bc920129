"""Whether the MLflow run of a job is pending."""

from __future__ import annotations

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.model import EnsureRun

_RUN_PENDING = "preparation starts when the MLflow run exists"
_UNREAD = "preparation waits for an answer of MLflow"


def wait_for_run(draft: Draft, *, needs_server: bool = False) -> bool:
    """Whether a preparation waits, and report it: one that starts now would not know the id of training's run.

    A run whose creation has failed holds no preparation up, and neither does a server that cannot be reached.

    Args:
        needs_server: whether the preparation is given the address of MLflow too, which only MLflow's answer has.
    """
    is_unread = _is_unread(draft) and (needs_server or draft.status.run_id is None)
    if not is_unread and not _is_run_pending(draft):
        return False
    message = _UNREAD if is_unread else _RUN_PENDING
    draft.set(ConditionType.PREPARED, False, ConditionReason.PREPARING, message)
    return True


def _is_run_pending(draft: Draft) -> bool:
    """Whether a run is about to be created, or looked for again."""
    tracked = draft.condition(ConditionType.TRACKED)
    if tracked and tracked.reason == ConditionReason.RUN_NOT_FOUND:
        return True
    creates = any(isinstance(action, EnsureRun) for action in draft.actions)
    return creates and (tracked is None or tracked.status == "True")


def _is_unread(draft: Draft) -> bool:
    """Whether nothing is known yet of the job's MLflow server."""
    has_server = bool(draft.settings.servers(draft.spec.tracking)[0])
    return has_server and draft.observed.mlflow is None
