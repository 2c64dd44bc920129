"""Approval and soak: the wait between passing the gates and moving the alias. Both clocks start together."""

from __future__ import annotations

from datetime import datetime, timedelta

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.modelpromotion import Approval
from finetune_crds.promotion_status import ApprovalStatus, SoakStatus
from finetune_operator.modelpromotion.decide.digests import digest
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.policy.result import Continue, Outcome, Stop
from finetune_operator.text import format_time


def await_approval(draft: Draft) -> Outcome:
    """Start the soak. If the spec has an approval, each pass then ends here until the candidate is approved."""
    approval = draft.spec.approval
    version = draft.status.candidate or ""
    _start_soak(draft, version)
    if approval is None:
        draft.update(approval=None)
        draft.unset(ConditionType.APPROVED)
        return Continue
    state = _current_approval(draft, version)
    is_old = _is_from_before_start(draft, approval)
    if approval.version == version and not is_old:
        return _approve(draft, state)
    # An approval that was withdrawn counts no longer.
    draft.update(approval=state.model_copy(update={"approval_time": None}))
    # `soak` sets the condition once the version is approved. One that is set already is about an earlier candidate or approval.
    draft.unset(ConditionType.SOAKED)
    if _is_late(state, draft.now):
        return _time_out(draft, state)
    if state.expiration_time:
        draft.requeue_after((state.expiration_time - draft.now).total_seconds())
    if is_old and approval.version == version:
        request = (
            "the approval in the spec is from before the promotion started over, so remove spec.approval.version, and set it to "
            f"{version} again"
        )
    else:
        mismatch = f"; approval.version is {approval.version}" if approval.version else ""
        request = f"set spec.approval.version to {version}{mismatch}"
    until = f", until {format_time(state.expiration_time)}" if state.expiration_time else ""
    message = f"version {version} passed its gates and waits for approval{until}: {request}"
    draft.set(ConditionType.APPROVED, False, ConditionReason.AWAITING_APPROVAL, message)
    draft.stop(ConditionReason.AWAITING_APPROVAL, message)
    return Stop


def expire_approval(draft: Draft) -> None:
    """Let the approval in the spec count no longer: it is about a version of the same number in another registry."""
    approval = draft.spec.approval
    draft.remember(old_approval=_digest_approval(approval) if approval and approval.version else None)


def _is_from_before_start(draft: Draft, approval: Approval) -> bool:
    """Whether the approval is the one that `expire_approval` recorded; the record ends as soon as the spec has another approval."""
    recorded = draft.status.journal.old_approval if draft.status.journal else None
    if recorded is None:
        return False
    if recorded == _digest_approval(approval):
        return True
    draft.remember(old_approval=None)
    return False


def _digest_approval(approval: Approval) -> str:
    """Digest of what a person sets to approve a version."""
    return digest([approval.version, approval.by])


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


def _approve(draft: Draft, state: ApprovalStatus) -> Outcome:
    """Accept the approval, unless it was given after the time limit."""
    # NB: the operator may have been down when the approval was given, so the time of the edit decides.
    approved_at = min(draft.promotion.edited or draft.now, draft.now)
    if state.approval_time is None and _is_late(state, approved_at):
        draft.update(approval=state)
        return _time_out(draft, state)
    draft.update(approval=state.model_copy(update={"approval_time": state.approval_time or draft.now}))
    by = draft.spec.approval.by if draft.spec.approval else None
    who = f" by {by}" if by else ""
    draft.set(
        ConditionType.APPROVED, True, ConditionReason.APPROVED, f"version {state.version} was approved{who}"
    )
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
