"""Whether a preparation must wait for the MLflow run of its job."""

from __future__ import annotations

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.finetunejob.decision import EnsureRun
from finetune_operator.finetunejob.draft.draft import Draft

_RUN_PENDING = "preparation starts when the MLflow run exists"
_UNREAD = "preparation waits for an answer of MLflow"


def wait_for_run(draft: Draft, *, needs_server: bool = False) -> bool:
    """Report that a preparation waits for the MLflow run, whose id its pods need, and return whether the preparation waits.

    It does not wait if the creation of the run has failed, or if the server cannot be reached.

    Args:
        needs_server: whether the preparation also requires the address of the server, which is known only after a read of MLflow.
    """
    is_unread = _is_unread(draft) and (needs_server or draft.status.run_id is None)
    if not is_unread and not _is_run_pending(draft):
        return False
    message = _UNREAD if is_unread else _RUN_PENDING
    draft.set(ConditionType.PREPARED, False, ConditionReason.PREPARING, message)
    return True


def _is_run_pending(draft: Draft) -> bool:
    """Whether a run may still appear: one that was not found, or one that this pass requests and that no earlier pass failed to create."""
    tracked = draft.condition(ConditionType.TRACKED)
    if tracked and tracked.reason == ConditionReason.RUN_NOT_FOUND:
        return True
    is_being_created = any(isinstance(action, EnsureRun) for action in draft.actions)
    has_failed_before = tracked is not None and tracked.status != "True"
    return is_being_created and not has_failed_before


def _is_unread(draft: Draft) -> bool:
    """Whether the job's MLflow server has not been read yet."""
    server, _ = draft.settings.servers(draft.spec.tracking)
    return bool(server) and draft.observed.mlflow is None
