"""Policies for the alias, after drift and rollback: withdraw a failed version, settle at the candidate, revert to it, or promote it."""

from __future__ import annotations

from functools import partial

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.promotion_status import Move, MoveReason, Withheld
from finetune_operator.modelpromotion.decide.approval import forget_waits
from finetune_operator.modelpromotion.decide.digests import gates_digest, terms_digest
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.modelpromotion.decide.drift import promotion_actor
from finetune_operator.modelpromotion.decide.gate_jobs import find_measurement
from finetune_operator.modelpromotion.decide.gates import judge
from finetune_operator.modelpromotion.decide.move import begin
from finetune_operator.policy.result import Continue, Outcome, Stop

# A version that lost the alias for one of these reasons is judged again. NB: another version may get the number of a deleted version.
_LOSS_REASONS: tuple[MoveReason, ...] = ("Withdrawn", "RolledBack", "VersionDeleted")
# The message of a move for one of these reasons does not explain why the alias stays at the candidate.
_OUTDATED_REASONS: tuple[MoveReason, ...] = ("RolledBack", "Overtaken", "VersionDeleted")


def withdraw(draft: Draft) -> Outcome:
    """Take the alias from a version whose endpoint failed, and do not promote a withheld version."""
    withheld = draft.status.withheld
    if withheld is None:
        return Continue
    if _has_expired(draft, withheld):
        draft.remember(withheld=None)
        return Continue
    has_alias = draft.status.promoted == withheld.version
    if withheld.reason == "Withdrawn" and has_alias:
        return _take_back(draft, withheld)
    if draft.status.candidate not in (None, withheld.version):
        # The source names another version, which is not withheld.
        return Continue
    forget_waits(draft)
    if withheld.reason == "Adopted":
        draft.set(ConditionType.PROMOTED, True, ConditionReason.ADOPTED, withheld.message)
    else:
        draft.stop(ConditionReason.WITHDRAWN, withheld.message)
    return Stop


def _has_expired(draft: Draft, withheld: Withheld) -> bool:
    """Whether the source names another version and the alias has left the withheld one, or the requirements changed after a withdrawal."""
    has_other_candidate = (
        draft.status.candidate not in (None, withheld.version) and draft.status.promoted != withheld.version
    )
    have_terms_changed = withheld.reason == "Withdrawn" and withheld.digest != terms_digest(draft.spec)
    return has_other_candidate or have_terms_changed


def _take_back(draft: Draft, withheld: Withheld) -> Outcome:
    """Move the alias from a withdrawn version to the previous version. Stop if the previous one was deleted; without one, remove the alias."""
    back = withheld.back or draft.status.previous
    if back is not None and draft.observed.versions.get(back) is None:
        message = f"{withheld.message}; version {back}, which had the alias before, no longer exists"
        draft.stop(ConditionReason.WITHDRAWN, message)
        return Stop
    return begin(draft, back, "Withdrawn", withheld.message, by=promotion_actor(draft))


def settle(draft: Draft) -> Outcome:
    """Stop if the alias already points at the candidate."""
    if draft.status.candidate != draft.status.promoted:
        return Continue
    forget_waits(draft)
    if draft.status.gates and draft.status.gates.version != draft.holder:
        # These verdicts are about another version, which was not promoted.
        draft.update(gates=None)
        draft.unset(ConditionType.GATES_PASSED)
    last = next(iter(draft.status.history), None)
    if last is None or last.to_version != draft.holder or last.reason in _OUTDATED_REASONS:
        message = f"alias {draft.spec.alias} is at version {draft.holder}, the candidate"
        draft.set(ConditionType.PROMOTED, True, ConditionReason.IN_PLACE, message)
    else:
        draft.set(ConditionType.PROMOTED, True, ConditionReason(last.reason), last.message)
    return Stop


def revert(draft: Draft) -> Outcome:
    """After a git revert: move the alias back, without a wait, to spec.source.version if this version had it with the same gates."""
    version = draft.spec.source.version
    digest = gates_digest(draft.spec.gates)
    earlier_move = _find_earlier_move(draft, digest)
    if version is None or earlier_move is None or not _still_passes(draft, version):
        return Continue
    forget_waits(draft)
    message = f"version {version} passed the same gates and had the alias on {earlier_move.time:%Y-%m-%d}"
    draft.set(ConditionType.GATES_PASSED, True, ConditionReason.PASSED_BEFORE, message)
    text = f"spec.source.version moved the alias back to version {version}, which had it before with the same gates"
    return begin(
        draft,
        version,
        "Reverted",
        text,
        by=draft.promotion.editor,
        gates=digest,
        approved=earlier_move.approved,
    )


def _find_earlier_move(draft: Draft, digest: str) -> Move | None:
    """The last move that promoted the source's version with the same gates; None if there is none or the version must be judged again."""
    for move in draft.status.history:
        if move.from_version == draft.spec.source.version and move.reason in _LOSS_REASONS:
            return None
        if _is_promotion_with(draft, move, digest):
            return move
    return None


def _still_passes(draft: Draft, version: str) -> bool:
    """Whether the version passes all gates but comparisons; its tags may have changed since it was promoted. Jobs do not run again."""
    candidate = draft.observed.versions.get(version)
    gates = [gate for gate in draft.spec.gates if not gate.comparison]
    return candidate is not None and all(
        item.verdict == "Passed"
        for item in judge(gates, candidate, None, measure=partial(find_measurement, draft))
    )


def _is_promotion_with(draft: Draft, move: Move, digest: str) -> bool:
    """Whether this move promoted the source's version with the gates of this digest, and with an approval if the spec requires one.

    A move before the operator started to watch the alias does not count.
    """
    watch_start = draft.status.watch_start_time
    is_watched = watch_start is not None and move.time >= watch_start
    is_approved = move.approved or draft.spec.approval is None
    has_passed = move.reason in ("Promoted", "Reverted") and move.gates == digest and is_approved
    return has_passed and is_watched and move.to_version == draft.spec.source.version


def promote(draft: Draft) -> Outcome:
    """Move the alias to the candidate, which meets every requirement."""
    version = draft.status.candidate or ""
    judged = draft.status.gates
    passed = f", which passed {judged.summary} gates" if judged and judged.verdicts else ""
    approval = draft.spec.approval
    by = (approval.by or draft.promotion.editor) if approval else promotion_actor(draft)
    message = f"{draft.spec.alias} is version {version}{passed}{f', approved by {by}' if approval else ''}"
    digest = gates_digest(draft.spec.gates)
    approved = True if approval else None
    return begin(draft, version, "Promoted", message, by=by, gates=digest, approved=approved)
