"""Policies for the alias, after drift and rollback: withdraw a failed version, settle at the candidate, revert to it, or promote it."""

from __future__ import annotations

from functools import partial

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.promotion_status import REGRESSED, MoveReason, VersionRecord, Withheld
from finetune_operator.modelpromotion.decide.approval import forget_waits
from finetune_operator.modelpromotion.decide.approvers import count_needed, describe_approvers, find_approvers
from finetune_operator.modelpromotion.decide.digests import gates_digest, terms_digest
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.modelpromotion.decide.drift import promotion_actor
from finetune_operator.modelpromotion.decide.gate_jobs import find_measurement
from finetune_operator.modelpromotion.decide.gates import judge
from finetune_operator.modelpromotion.decide.move import begin
from finetune_operator.modelpromotion.decide.regression import await_recovery
from finetune_operator.modelpromotion.decide.windows import await_window
from finetune_operator.modelpromotion.versions import is_older
from finetune_operator.policy.result import Continue, Outcome, Stop

# The message of a move for one of these reasons does not explain why the alias stays at the candidate.
_OUTDATED_REASONS: tuple[MoveReason, ...] = ("RolledBack", "Overtaken", "VersionDeleted")


def withdraw(draft: Draft) -> Outcome:
    """Take the alias from a version that failed, and do not promote a version that failed or was skipped."""
    _forget_outdated(draft)
    withheld, status = draft.status.withheld, draft.status
    if withheld and withheld.reason != "Adopted" and status.promoted == withheld.version:
        return _take_back(draft, withheld)
    if withheld and status.candidate in (None, withheld.version):
        message, reason = withheld.message, ConditionReason(withheld.reason)
    else:
        record = status.find_record(status.candidate)
        if record is None or status.promoted == record.version or not record.is_withheld:
            return Continue
        reason = _find_reason(record)
        message = _describe_withheld(draft, record.version, reason)
        _forget_other_verdicts(draft)
    forget_waits(draft)
    if reason == ConditionReason.ADOPTED:
        draft.set(ConditionType.PROMOTED, True, reason, message)
    else:
        draft.stop(reason, message)
    return Stop


def _find_reason(record: VersionRecord) -> ConditionReason:
    """Why a version is not promoted that failed or was skipped."""
    if not record.bad:
        return ConditionReason.ADOPTED
    return ConditionReason.REGRESSED if record.bad == REGRESSED else ConditionReason.WITHDRAWN


def _describe_withheld(draft: Draft, version: str, reason: ConditionReason) -> str:
    """Explain why a version is not promoted that failed or was skipped before another candidate."""
    if reason == ConditionReason.ADOPTED:
        return (
            f"version {version} is skipped, because somebody else moved alias {draft.spec.alias} to version {draft.status.promoted} "
            "instead, and spec.onDrift is Adopt"
        )
    if reason == ConditionReason.REGRESSED:
        return f"version {version} regressed after its move before: promote another version, or set spec.rollbackTo to it"
    return f"version {version} failed at its endpoint before: change spec.gates or spec.serving to try it again, or set spec.rollbackTo to it"


def _forget_outdated(draft: Draft) -> None:
    """Forget the failures under other requirements, and the withheld version that neither has the alias nor is the candidate."""
    digest = terms_digest(draft.spec)
    for record in draft.status.registry.versions if draft.status.registry else []:
        if record.bad not in (None, REGRESSED, digest):
            draft.record_version(record.version, bad=None)
    withheld = draft.status.withheld
    if withheld is None:
        return
    has_other_candidate = (
        draft.status.candidate not in (None, withheld.version) and draft.status.promoted != withheld.version
    )
    have_terms_changed = withheld.reason == "Withdrawn" and withheld.digest != digest
    if has_other_candidate or have_terms_changed:
        draft.remember(withheld=None)


def _take_back(draft: Draft, withheld: Withheld) -> Outcome:
    """Move the alias from a withdrawn version to the previous version. Stop if the previous one was deleted; without one, remove the alias."""
    back = withheld.back or draft.status.previous
    if back is not None and draft.observed.versions.get(back) is None:
        message = f"{withheld.message}; version {back}, which had the alias before, no longer exists"
        draft.stop(ConditionReason(withheld.reason), message)
        return Stop
    reason: MoveReason = "Regressed" if withheld.reason == "Regressed" else "Withdrawn"
    return begin(draft, back, reason, withheld.message, by=promotion_actor(draft))


def settle(draft: Draft) -> Outcome:
    """Stop if the alias already points at the candidate."""
    if draft.status.candidate != draft.status.promoted:
        return Continue
    forget_waits(draft)
    _forget_other_verdicts(draft)
    last = next(iter(draft.status.history), None)
    if last is None or last.to_version != draft.holder or last.reason in _OUTDATED_REASONS:
        message = f"alias {draft.spec.alias} is at version {draft.holder}, the candidate"
        draft.set(ConditionType.PROMOTED, True, ConditionReason.IN_PLACE, message)
    else:
        draft.set(ConditionType.PROMOTED, True, ConditionReason(last.reason), last.message)
    return Stop


def _forget_other_verdicts(draft: Draft) -> None:
    """Forget verdicts about a version that is not promoted, and that no longer is the candidate."""
    if draft.status.gates and draft.status.gates.version != draft.holder:
        draft.update(gates=None)
        draft.unset(ConditionType.GATES_PASSED)


def revert(draft: Draft) -> Outcome:
    """After a git revert: move the alias back to spec.source.version if this version had it with the same gates.

    Only a revert to a newer version waits, for a window and for the number of the version with the alias.
    """
    version = draft.spec.source.version
    digest = gates_digest(draft.spec.gates)
    record = draft.status.find_record(version)
    if version is None or record is None or record.gates != digest or not _still_passes(draft, version):
        return Continue
    if count_needed(draft) and record.approved_by is None:
        return Continue
    forget_waits(draft)
    approved_by = f", approved by {record.approved_by}" if record.approved_by else ""
    message = f"version {version} passed the same gates when it had the alias before{approved_by}"
    draft.set(ConditionType.GATES_PASSED, True, ConditionReason.PASSED_BEFORE, message)
    is_forward = not is_older(version, draft.status.promoted)
    if is_forward and (await_recovery(draft, "Reverted") is Stop or await_window(draft, "Reverted") is Stop):
        return Stop
    text = f"spec.source.version moved the alias back to version {version}, which had it before with the same gates"
    return begin(
        draft,
        version,
        "Reverted",
        text,
        by=draft.promotion.editor,
        gates=digest,
        approved=True if record.approved_by else None,
    )


def _still_passes(draft: Draft, version: str) -> bool:
    """Whether the version passes all gates but comparisons; its tags may have changed since it was promoted. Jobs do not run again."""
    candidate = draft.observed.versions.get(version)
    gates = [gate for gate in draft.spec.gates if not gate.comparison]
    return candidate is not None and all(
        item.verdict == "Passed"
        for item in judge(gates, candidate, None, measure=partial(find_measurement, draft))
    )


def promote(draft: Draft) -> Outcome:
    """Move the alias to the candidate, which meets every requirement."""
    version = draft.status.candidate or ""
    judged = draft.status.gates
    passed = f", which passed {judged.summary} gates" if judged and judged.verdicts else ""
    # NB: people may approve a version that needs no approval, and the history then has their names too.
    approvers = describe_approvers(find_approvers(draft, version))
    message = (
        f"{draft.spec.alias} is version {version}{passed}{f', approved by {approvers}' if approvers else ''}"
    )
    digest = gates_digest(draft.spec.gates)
    by = approvers or promotion_actor(draft)
    approved = True if approvers else None
    return begin(draft, version, "Promoted", message, by=by, gates=digest, approved=approved)
