"""spec.rollbackTo: move the alias to the version that it names, without gates, and hold the alias there while the field is set.

A rollback needs no approvals, unless the platform team requires them and no record says that the version had the alias.
"""

from __future__ import annotations

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.promotion_status import Move, RollbackStatus
from finetune_operator.modelpromotion.decide.approval import forget_waits
from finetune_operator.modelpromotion.decide.approvers import describe_request, may_roll_back
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.modelpromotion.decide.move import begin, record
from finetune_operator.modelpromotion.decide.regression import forget_watch
from finetune_operator.modelpromotion.versions import target_version
from finetune_operator.policy.result import Continue, Outcome, Stop


def roll_back(draft: Draft) -> Outcome:
    """Roll back if spec.rollbackTo is set, and end the pass, unless drift must be handled first: then `hold` ends the pass.

    For a new promotion, this first records where the alias is: the policies after this one compare the alias with that record.
    """
    if draft.status.watch_start_time is None:
        draft.watch_from_now()
    rollback_to = draft.spec.rollback_to
    if rollback_to is None:
        draft.update(rollback=None)
        return Continue
    forget_waits(draft)
    forget_watch(draft)
    target = target_version(draft.spec, draft.status)
    if target is None:
        message = (
            "spec.rollbackTo has type Previous, and no previous version is known: set rollbackTo: {type: Version, version: N} "
            "to one of your versions"
        )
        return _reject(draft, message)
    draft.update(rollback=RollbackStatus(requested=rollback_to.text, version=target))
    is_there = draft.holder == target
    if not is_there and (wrong := _explain_unusable(draft, target)):
        return _reject(draft, f"{wrong}: set spec.rollbackTo to another version")
    if not may_roll_back(draft, target):
        # A move to the target by somebody else is drift until then.
        draft.stop(ConditionReason.AWAITING_APPROVAL, _describe_wait(draft, target))
        return Continue
    if is_there:
        _record_arrival(draft, target)
        draft.set(ConditionType.PROMOTED, True, ConditionReason.ROLLED_BACK, _describe_hold(draft, target))
        draft.unset(ConditionType.DRIFTED)
        return Stop
    # After the rollback, a move by somebody else is for `drift.handle_drift`.
    was_made = draft.status.promoted == target
    message, by = _describe_hold(draft, target), draft.promotion.editor
    return Continue if was_made else begin(draft, target, "RolledBack", message, by=by)


def _record_arrival(draft: Draft, target: str) -> None:
    """Record that the alias is at the target, even if another client moved it there; forget that the target failed, or which candidate Adopt withheld."""
    previous_version = draft.status.promoted
    if previous_version != target:
        moved = Move(
            from_version=previous_version,
            to_version=target,
            reason="RolledBack",
            message=f"{_describe_hold(draft, target)}, where somebody else had moved it",
            by=draft.promotion.editor,
            time=draft.now,
        )
        record(draft, moved)
        draft.update(previous=previous_version or draft.status.previous)
    draft.update(promoted=target)
    withheld = draft.status.withheld
    # A person chose the target: that it failed before counts no longer.
    if withheld and (withheld.reason == "Adopted" or withheld.version == target):
        draft.remember(withheld=None)


def hold(draft: Draft) -> Outcome:
    """End the pass while spec.rollbackTo is set, regardless of the source."""
    return Continue if draft.spec.rollback_to is None else Stop


def _explain_unusable(draft: Draft, target: str) -> str | None:
    """Explain why the alias cannot point at the version; None if no reason is known."""
    if draft.observed.lacks(target):
        return f"{draft.spec.model} has no version {target}"
    registered = draft.observed.versions.get(target)
    return (
        f"version {target} of {draft.spec.model} is not ready"
        if registered and not registered.ready
        else None
    )


def _describe_hold(draft: Draft, target: str) -> str:
    return f"{draft.spec.alias} is held at version {target} by spec.rollbackTo"


def _describe_wait(draft: Draft, target: str) -> str:
    return (
        f"the rollback to version {target} waits for approval, because status.registry does not record that it had alias {draft.spec.alias}: "
        f"{describe_request(draft, target, draft.observed.needed_approvals)}"
    )


def _reject(draft: Draft, message: str) -> Outcome:
    draft.stop(ConditionReason.NOTHING_TO_ROLL_BACK_TO, message)
    return Stop
