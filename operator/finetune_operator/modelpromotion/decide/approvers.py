"""The people who approved a version in spec.approvals, and how many of them the version needs."""

from __future__ import annotations

from collections.abc import Sequence

from finetune_crds.approvals import ApprovalEntry
from finetune_crds.base import join_names
from finetune_operator.modelpromotion.decide.digests import digest
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.policy.result import Continue, Outcome

# `Move.by` and `VersionRecord.approved_by` have the names.
_MAX_NAMES_CHARS = 512


def forget_removed_approvals(draft: Draft) -> Outcome:
    """Forget the expired approvals that are no longer in the spec, so that they count when a person adds them again. Never ends the pass."""
    expired = _list_expired(draft)
    remaining = [item for item in map(_digest_entry, draft.spec.approvals) if item in expired]
    draft.remember(old_approvals=remaining or None)
    return Continue


def expire_approvals(draft: Draft) -> None:
    """Let the approvals in the spec count no longer: they are about versions of the same numbers in another registry."""
    draft.remember(old_approvals=[_digest_entry(entry) for entry in draft.spec.approvals] or None)


def count_needed(draft: Draft) -> int:
    """The number of people who must approve the candidate: by spec.approval, or by the platform team's file; 0 without both."""
    return max(draft.observed.needed_approvals, 0 if draft.spec.approval is None else 1)


def find_approvers(draft: Draft, version: str) -> list[str]:
    """The names of the people whose approval of the version counts."""
    expired = _list_expired(draft)
    return [
        entry.by
        for entry in draft.spec.approvals
        if entry.version == version and _digest_entry(entry) not in expired
    ]


def describe_approvers(names: Sequence[str]) -> str:
    """Join names for a sentence; empty without names. If there are too many for the status, the last are only counted."""
    for count in range(len(names), 0, -1):
        remainder = [f"{len(names) - count} more"] if count < len(names) else []
        text = join_names([*names[:count], *remainder])
        if len(text) <= _MAX_NAMES_CHARS:
            return text
    return ""


def may_roll_back(draft: Draft, version: str) -> bool:
    """Whether spec.rollbackTo may move the alias to the version without waiting for approvals.

    Where the platform team requires approvals, the version must have had the alias or its approvals before. A rollback would
    otherwise be a way around them. NB: the record of a version that failed at its endpoint or after its move ends.
    """
    needed = draft.observed.needed_approvals
    if not needed or version in (draft.status.promoted, draft.status.previous):
        return True
    record = draft.status.find_record(version)
    if record is not None and (record.held or record.approved_by is not None):
        return True
    return len(find_approvers(draft, version)) >= needed


def describe_request(draft: Draft, version: str, needed: int) -> str:
    """How many approvals the version has, and what a person adds to the spec."""
    names, addition = find_approvers(draft, version), f"{{version: {version}, by: NAME}} to spec.approvals"
    if names:
        request = f"{len(names)} of {needed}, by {describe_approvers(names)}; another person adds {addition}"
    else:
        request = f"0 of {needed}; add {addition}" if needed > 1 else f"add {addition}"
    uncounted = [entry for entry in draft.spec.approvals if entry.by not in names]
    expired = [entry.by for entry in uncounted if entry.version == version]
    if expired:
        request += (
            f"; remove the approval of {describe_approvers(expired)} before it is added again, because it is from before the promotion "
            "started over"
        )
    elif uncounted:
        versions = sorted({entry.version for entry in uncounted}, key=int)
        request += f"; spec.approvals names version {join_names(versions)}"
    return request


def _list_expired(draft: Draft) -> list[str]:
    journal = draft.status.journal
    return (journal.old_approvals or []) if journal else []


def _digest_entry(entry: ApprovalEntry) -> str:
    return digest([entry.version, entry.by])
