"""The move of the alias: journalled in the status, executed, and recorded in the history.

The first pass only writes the journal into the status. The next pass decides again and, if the result is the same, requests
the write; a later pass finds the alias moved and writes the history. Whichever pass is interrupted, the status has the previous
version, and every write is in the journal before it is made.
"""

from __future__ import annotations

from datetime import timedelta

from finetune_crds.conditions import ConditionReason, ConditionType
from finetune_crds.promotion_status import Move, MoveReason
from finetune_operator.modelpromotion.decide.draft import Draft, truncate
from finetune_operator.modelpromotion.decide.regression import begin_watch
from finetune_operator.modelpromotion.decide.version_tags import build_tags
from finetune_operator.modelpromotion.version_records import record_move
from finetune_operator.policy.result import Continue, Outcome, Stop
from finetune_operator.registry.ownership import SETTLE_SECONDS

MAX_HISTORY = 20
# Reasons of moves from a version that failed, or that a person did not want.
_FAILURE_REASONS = ("Withdrawn", "Regressed", "RolledBack")
# Longer than the time limits of requests to the registry.
_LATE_WRITE_TIMEOUT = timedelta(minutes=10)


def finish_move(draft: Draft) -> Outcome:
    """Remove the move from the journal, and record it in the history if it was, or may have been, made. Never ends the pass."""
    move = draft.status.move
    if draft.observed.model is None:
        # Whether the move was made is unknown, so it stays in the journal.
        draft.update(current=None)
        return Continue
    # `begin` writes the move into the journal again if the policies still want it.
    draft.begun = move
    draft.update(current=draft.holder)
    draft.remember(move=None)
    if move is not None and draft.holder != move.from_version:
        draft.begun = None
        if draft.holder == move.to_version:
            complete(draft, move)
        else:
            # NB: either the move was made and then overwritten, or it was never made. Both look the same, so the move is recorded.
            overtaken = truncate(f"{move.message}; somebody else moved the alias to {draft.holder} since")
            record(draft, move.model_copy(update={"message": overtaken, "reason": "Overtaken"}))
    return Continue


def complete(draft: Draft, move: Move) -> None:
    """Record in the history that a move was made, and record where the alias is now."""
    unchanged_previous = draft.status.previous
    previous = {
        "Promoted": move.from_version,
        "Reverted": move.from_version,
        # A rollback overrides drift, so `from_version` may be one that another client had set.
        "RolledBack": draft.status.promoted,
        "Adopted": move.from_version,
        "Repaired": unchanged_previous,
        "Withdrawn": _find_predecessor(draft.status.history, move.to_version),
        "Regressed": _find_predecessor(draft.status.history, move.to_version),
    }[move.reason]
    record(draft, move)
    # `version_tags.tag_version` removes this entry if the version has its tags.
    draft.remember(untagged=move.to_version)
    # A withdrawal without a predecessor forgets the previous version, which may be a version that failed.
    if previous is None and move.reason not in ("Withdrawn", "Regressed"):
        previous = unchanged_previous
    draft.update(promoted=move.to_version, previous=previous)
    draft.set(ConditionType.PROMOTED, True, ConditionReason(move.reason), move.message)
    begin_watch(draft, move)


def _find_predecessor(history: list[Move], version: str | None) -> str | None:
    """The last version that lost the alias to `version` and was never withdrawn or rolled back. The history is newest first."""
    failed = {item.from_version for item in history if item.reason in _FAILURE_REASONS}
    gain_reasons = ("Promoted", "Reverted", "Adopted")
    predecessors = (
        item.from_version for item in history if item.to_version == version and item.reason in gain_reasons
    )
    return next((before for before in predecessors if before not in failed), None)


def record_abandoned(draft: Draft) -> None:
    """Record as abandoned a move that was in the journal and is no longer wanted.

    NB: its write may have been sent without getting a response, and may still take effect.
    """
    if draft.begun is not None and draft.status.move != draft.begun:
        draft.remember(abandoned=draft.begun.model_copy(update={"time": draft.now}))


def has_arrived_late(draft: Draft) -> bool:
    """Whether an abandoned move took effect after all: the alias moved as this move would move it, soon after the move was abandoned."""
    move = draft.status.abandoned
    if move is None:
        return False
    is_its_effect = draft.status.promoted == move.from_version and draft.holder == move.to_version
    return is_its_effect and draft.now - move.time < _LATE_WRITE_TIMEOUT


def record(draft: Draft, move: Move) -> None:
    """Add a move to the history, newest first, and record what it decides about its versions."""
    draft.status = record_move(draft.status, move)
    draft.update(history=[move, *draft.status.history][:MAX_HISTORY])


def begin(
    draft: Draft,
    to: str | None,
    reason: MoveReason,
    message: str,
    *,
    by: str,
    gates: str | None = None,
    approved: bool | None = None,
) -> Outcome:
    """Begin a move of the alias: write the journal in this pass, and the alias in the next. Always returns Stop.

    Args:
        to: the version that gets the alias; None to remove the alias.
        by: who caused the move.
        gates: digest of the gates that the version passed; None for a move without gates.
        approved: whether a person approved the move; None if no approval was needed.
    """
    journaled = draft.begun
    requested = (draft.holder, to, reason)
    if journaled is None or (journaled.from_version, journaled.to_version, journaled.reason) != requested:
        # Only write the journal. The next pass finds this move there.
        move = Move(
            from_version=draft.holder,
            to_version=to,
            reason=reason,
            message=truncate(message),
            by=by,
            time=draft.now,
            gates=gates,
            approved=approved,
        )
        draft.remember(move=move)
        draft.stop(ConditionReason.PROMOTING, _describe_move(draft, to))
        draft.requeue_after(0)
        return Stop
    draft.remember(move=journaled)
    if draft.observed.ownership.is_pending:
        # Another installation may be taking the alias too.
        announce(draft, _describe_move(draft, to))
        draft.requeue_after(SETTLE_SECONDS)
        return Stop
    # NB: the source alias is compared again just before the write; only moves of reason Promoted have a source alias.
    source = draft.spec.source.alias if reason == "Promoted" else None
    announce(draft, _describe_move(draft, to))
    draft.actions.append(draft.move_alias(to, source, build_tags(draft, journaled)))
    return Stop


def _describe_move(draft: Draft, to: str | None) -> str:
    if to is None:
        return f"removing alias {draft.spec.alias} from version {draft.holder}"
    origin = f" from version {draft.holder}" if draft.holder else ""
    return f"moving alias {draft.spec.alias}{origin} to version {to}"


def announce(draft: Draft, message: str) -> None:
    """Report that the alias is being moved. A reported failure of the move stays until the move succeeds.

    NB: otherwise, each pass would first report that it moves the alias, and then the same failure again, and so write the status twice.
    """
    promoted = draft.condition(ConditionType.PROMOTED)
    if promoted is None or promoted.reason not in (
        ConditionReason.MOVE_DELAYED,
        ConditionReason.MOVE_REFUSED,
    ):
        draft.stop(ConditionReason.PROMOTING, message)
