"""Whether the MLflow run of a job is pending."""

from __future__ import annotations

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.finetunejob.draft.draft import Draft
from finetune_operator.finetunejob.model import EnsureRun

_RUN_PENDING = "preparation starts when the MLflow run exists"
_UNREAD = "preparation starts when MLflow has answered, or is known to be unreachable"


def explain_wait(draft: Draft, *, needs_server: bool = False) -> str | None:
    """What a preparation waits for: one that starts now would not know the id of training's run; None where it may start.

    A run whose creation has failed holds no preparation up, and neither does a server that cannot be reached.

    Args:
        needs_server: whether the preparation is given the address of MLflow too, which only MLflow's answer has.
    """
    if _is_unread(draft) and (needs_server or draft.status.run_id is None):
        return _UNREAD
    return _RUN_PENDING if _is_run_pending(draft) else None


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
