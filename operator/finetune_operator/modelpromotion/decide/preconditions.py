"""Preconditions of the policies that follow: the registry answers, and the promotion is not suspended."""

from __future__ import annotations

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.policy.result import Continue, Outcome, Stop


def require_registry(draft: Draft) -> Outcome:
    """Stop while the registry cannot be read: the status is kept, and nothing is decided."""
    problem = draft.observed.problem
    if problem:
        draft.set(ConditionType.REGISTRY_READY, False, problem.reason, problem.message)
        draft.requeue_after(_retry_seconds(draft))
        return Stop
    return Continue


def _retry_seconds(draft: Draft) -> float:
    """Half of the outage so far, but at least the poll interval and at most the resync interval."""
    condition = draft.condition(ConditionType.REGISTRY_READY)
    outage_seconds = (draft.now - condition.last_transition_time).total_seconds() if condition else 0.0
    return max(draft.settings.poll_seconds, min(outage_seconds / 2, draft.settings.resync_seconds))


def suspend(draft: Draft) -> Outcome:
    """End the pass while the promotion is suspended. A move that is only in the journal is not made."""
    if draft.spec.suspend:
        message = "spec.suspend is true: the operator moves no alias and changes no endpoint"
        draft.set(ConditionType.SUSPENDED, True, ConditionReason.SUSPENDED, message)
        return Stop
    if draft.condition(ConditionType.SUSPENDED):
        draft.set(ConditionType.SUSPENDED, False, ConditionReason.RESUMED, "spec.suspend is false")
    return Continue
