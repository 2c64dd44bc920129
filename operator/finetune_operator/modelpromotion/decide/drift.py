"""Drift: another client of the registry moved or removed the alias."""

from __future__ import annotations

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.promotion_status import Move, Withheld
from finetune_operator.modelpromotion.decide.digests import terms_digest
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.modelpromotion.decide.move import begin, complete, has_arrived_late, record
from finetune_operator.policy.result import Continue, Outcome, Stop

SOMEBODY = "somebody else, in the registry"


def handle_drift(draft: Draft) -> Outcome:
    """Compare the alias with its target: repair, warn or adopt. Ends the pass unless the alias is at its target or may stay elsewhere."""
    promoted = draft.status.promoted
    if promoted and draft.observed.lacks(promoted):
        _record_lost_version(draft, promoted)
    if draft.status.promoted == draft.holder:
        draft.unset(ConditionType.DRIFTED)
        return Continue
    abandoned = draft.status.abandoned
    if abandoned is not None and has_arrived_late(draft):
        if draft.status.promoted is not None:
            return _repair(draft, f"a move to version {draft.holder} took effect after it was abandoned")
        # Accept the move: its version met every requirement when the move was recorded, and there is no version to move back to.
        complete(draft, abandoned)
        draft.remember(abandoned=None)
        draft.unset(ConditionType.DRIFTED)
        return Continue
    if draft.spec.on_drift == "Warn":
        return _warn(draft)
    if (draft.spec.on_drift == "Adopt" and draft.spec.rollback_to is None) or _replaces_lost_version(draft):
        return _adopt(draft)
    _, what = _describe_drift(draft)
    return _report_without_target(draft, what) if draft.status.promoted is None else _repair(draft, what)


def _replaces_lost_version(draft: Draft) -> bool:
    """Whether, after the promoted version was deleted, the alias was set to a version that had it before."""
    holder = draft.status.find_record(draft.holder)
    return draft.lost is not None and holder is not None and holder.held is True


def _record_lost_version(draft: Draft, version: str) -> None:
    """Record that the promoted version was deleted, and the alias with it: there is no version to move back to."""
    message = f"version {version} was deleted, and with it alias {draft.spec.alias}"
    lost = Move(from_version=version, reason="VersionDeleted", message=message, by=SOMEBODY, time=draft.now)
    record(draft, lost)
    draft.update(promoted=None)


def _describe_drift(draft: Draft) -> tuple[ConditionReason, str]:
    alias, promoted, holder = draft.spec.alias, draft.status.promoted, draft.holder
    if holder is None:
        return ConditionReason.ALIAS_REMOVED, f"somebody else removed alias {alias} from version {promoted}"
    if promoted is None:
        return ConditionReason.ALIAS_MOVED, f"somebody else pointed alias {alias} at version {holder}"
    return (
        ConditionReason.ALIAS_MOVED,
        f"somebody else moved alias {alias} from version {promoted} to version {holder}",
    )


def _report_without_target(draft: Draft, what: str) -> Outcome:
    """Only report the drift: there is no version to move the alias back to, and a repair never removes an alias."""
    keep = f"set spec.rollbackTo to {{type: Version, version: {draft.holder}}} or spec.onDrift to Adopt"
    if _does_rollback_wait(draft):
        keep = "approve the rollback"
    message = f"{what}, and no earlier version is recorded: to keep the alias there, {keep}; otherwise remove the alias"
    return _report(draft, ConditionReason.ALIAS_MOVED, message)


def _warn(draft: Draft) -> Outcome:
    reason, what = _describe_drift(draft)
    alias, promoted, holder = draft.spec.alias, draft.status.promoted, draft.holder
    undo = f"remove alias {alias}" if promoted is None else f"set alias {alias} to version {promoted}"
    keep = (
        f"; to keep the alias there, set spec.rollbackTo to {{type: Version, version: {holder}}}"
        if holder
        else ""
    )
    alternatives = f"{keep}; or set spec.onDrift to Repair or Adopt"
    if _does_rollback_wait(draft):
        alternatives = ", approve the rollback, or set spec.onDrift to Repair"
    return _report(draft, reason, f"{what}: to undo this, {undo}{alternatives}")


def _does_rollback_wait(draft: Draft) -> bool:
    """Whether spec.rollbackTo waits for approvals. NB: a rollback that was made holds the alias at its version."""
    rollback = draft.status.rollback
    return rollback is not None and rollback.version != draft.status.promoted


def _report(draft: Draft, reason: ConditionReason, message: str) -> Outcome:
    """Report drift that stays. A rollback that waits for approvals has said so already."""
    draft.set(ConditionType.DRIFTED, True, reason, message)
    if not _does_rollback_wait(draft):
        draft.stop(reason, message)
    return Stop


def _adopt(draft: Draft) -> Outcome:
    """Keep the alias where it is: because of spec.onDrift, or because the version there replaces a deleted version.

    With onDrift Adopt, the current candidate is withheld, since it would move the alias back at once.
    """
    _, what = _describe_drift(draft)
    spec, status, holder = draft.spec, draft.status, draft.holder
    if spec.on_drift == "Adopt":
        message = f"{what}, and spec.onDrift is Adopt"
    else:
        message = f"{what}; the alias stays there, because version {draft.lost} was deleted and version {holder} had the alias before"
    record(
        draft,
        Move(
            from_version=status.promoted,
            to_version=holder,
            reason="Adopted",
            message=message,
            by=SOMEBODY,
            time=draft.now,
        ),
    )
    draft.update(promoted=holder, previous=status.promoted)
    draft.unset(ConditionType.DRIFTED)
    draft.set(ConditionType.PROMOTED, True, ConditionReason.ADOPTED, message)
    # The version that was adopted is no longer withheld.
    if status.withheld and status.withheld.version == holder:
        draft.remember(withheld=None)
    # A candidate that the source names only since this pass is not skipped.
    previous_candidate = draft.promotion.status.candidate
    if (
        spec.on_drift == "Adopt"
        and status.candidate not in (None, holder)
        and status.candidate == previous_candidate
    ):
        skipped_candidate = Withheld(
            version=status.candidate,
            reason="Adopted",
            digest=terms_digest(spec),
            message=f"{message}: version {status.candidate} is skipped until the source names another version",
        )
        draft.remember(withheld=skipped_candidate)
        draft.record_version(skipped_candidate.version, skipped=True)
    return Continue


def _repair(draft: Draft, what: str) -> Outcome:
    reason, _ = _describe_drift(draft)
    draft.set(ConditionType.DRIFTED, True, reason, f"{what}: the operator moves the alias back")
    return begin(
        draft,
        draft.status.promoted,
        "Repaired",
        f"{what}: the operator moved the alias back",
        by=promotion_actor(draft),
    )


def promotion_actor(draft: Draft) -> str:
    """The actor of a move that no user requested: the promotion itself."""
    return f"ModelPromotion {draft.promotion.key}"
