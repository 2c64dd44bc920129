"""Approval and soak: the wait between passing the gates and moving the alias. Both clocks start together."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.promotion_status import ApprovalStatus, SoakStatus
from finetune_operator.modelpromotion.decide.approvers import (
    count_needed,
    describe_approvers,
    describe_request,
    find_approvers,
)
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.policy.result import Continue, Outcome, Stop
from finetune_operator.text import format_time


def await_approval(draft: Draft) -> Outcome:
    """Start the soak. If the candidate needs approvals, each pass then ends here until it has them."""
    version = draft.status.candidate or ""
    _start_soak(draft, version)
    needed = count_needed(draft)
    if not needed:
        draft.update(approval=None)
        draft.unset(ConditionType.APPROVED)
        return Continue
    state = _current_approval(draft, version)
    names = find_approvers(draft, version)
    if len(names) >= needed:
        return _approve(draft, state, names)
    # An approval that was withdrawn counts no longer.
    draft.update(approval=state.model_copy(update={"approval_time": None}))
    # `soak` sets the condition once the version is approved. One that is set already is about an earlier candidate or approval.
    draft.unset(ConditionType.SOAKED)
    if _is_late(state, draft.now):
        return _time_out(draft, state)
    if state.expiration_time:
        draft.requeue_after((state.expiration_time - draft.now).total_seconds())
    until = f", until {format_time(state.expiration_time)}" if state.expiration_time else ""
    request = describe_request(draft, version, needed)
    message = f"version {version} passed its gates and waits for approval{until}: {request}"
    draft.set(ConditionType.APPROVED, False, ConditionReason.AWAITING_APPROVAL, message)
    draft.stop(ConditionReason.AWAITING_APPROVAL, message)
    return Stop


def _current_approval(draft: Draft, version: str) -> ApprovalStatus:
    """The state of this version's approval; the wait starts in the first pass that asks to approve the version."""
    status = draft.status.approval
    if status is None or status.version != version:
        status = ApprovalStatus(version=version, request_time=draft.now)
    timeout = draft.spec.approval.timeout_seconds if draft.spec.approval else None
    expires = status.request_time + timedelta(seconds=timeout) if timeout else None
    return status.model_copy(update={"expiration_time": expires})


def _is_late(state: ApprovalStatus, now: datetime) -> bool:
    return state.expiration_time is not None and now >= state.expiration_time


def _approve(draft: Draft, state: ApprovalStatus, names: Sequence[str]) -> Outcome:
    """Accept the approvals, unless the last of them was given after the time limit."""
    # NB: the operator may have been down when the approval was given, so the time of the edit decides.
    approved_at = min(draft.promotion.edited or draft.now, draft.now)
    if state.approval_time is None and _is_late(state, approved_at):
        draft.update(approval=state)
        return _time_out(draft, state)
    draft.update(approval=state.model_copy(update={"approval_time": state.approval_time or draft.now}))
    message = f"version {state.version} was approved by {describe_approvers(names)}"
    draft.set(ConditionType.APPROVED, True, ConditionReason.APPROVED, message)
    return Continue


def _time_out(draft: Draft, state: ApprovalStatus) -> Outcome:
    message = (
        f"version {state.version} was not approved before {format_time(state.expiration_time)}: raise "
        "spec.approval.timeoutSeconds, or promote another version"
    )
    draft.set(ConditionType.APPROVED, False, ConditionReason.APPROVAL_TIMED_OUT, message)
    draft.stop(ConditionReason.APPROVAL_TIMED_OUT, message)
    return Stop


def soak(draft: Draft) -> Outcome:
    """Each pass ends here until the soak, which `await_approval` started, is over. Without spec.soakSeconds, there is no soak."""
    state = draft.status.soak
    if state is None:
        draft.unset(ConditionType.SOAKED)
        return Continue
    approval = draft.spec.approval
    if approval and approval.bypass_soak and draft.holds(ConditionType.APPROVED):
        draft.set(
            ConditionType.SOAKED,
            True,
            ConditionReason.SOAK_BYPASSED,
            "the approval skips the rest of the soak",
        )
        return Continue
    remaining_seconds = (state.end_time - draft.now).total_seconds()
    if remaining_seconds > 0:
        message = f"version {state.version} passed its gates and soaks until {format_time(state.end_time)}"
        draft.set(ConditionType.SOAKED, False, ConditionReason.SOAKING, message)
        draft.stop(ConditionReason.SOAKING, message)
        draft.requeue_after(remaining_seconds)
        return Stop
    message = f"version {state.version} soaked for {draft.spec.soak_seconds} s"
    draft.set(ConditionType.SOAKED, True, ConditionReason.SOAKED, message)
    return Continue


def _start_soak(draft: Draft, version: str) -> None:
    """Start the soak of this version or, if it has started, update its end: spec.soakSeconds may change meanwhile."""
    seconds = draft.spec.soak_seconds
    if not seconds:
        draft.update(soak=None)
        return
    status = draft.status.soak
    since = status.start_time if status and status.version == version else draft.now
    draft.update(
        soak=SoakStatus(version=version, start_time=since, end_time=since + timedelta(seconds=seconds))
    )


def forget_waits(draft: Draft) -> None:
    """Clear approval and soak: no candidate waits, and the next one starts its own clocks."""
    draft.update(approval=None, soak=None)
    draft.unset(ConditionType.APPROVED, ConditionType.SOAKED)
