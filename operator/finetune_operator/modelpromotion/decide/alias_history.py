"""Questions about the history of the alias: how a version got it, and whether the version may get it again."""

from __future__ import annotations

from collections.abc import Sequence

from finetune_crds.serving import Route
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.modelpromotion.versions import main_version

# Reasons of moves whose version skips the canary, because it was served before.
_REASONS_WITHOUT_CANARY = ("RolledBack", "Withdrawn", "Regressed", "Repaired")
# Reasons of moves that only return the alias to a version.
_RETURN_REASONS = ("Withdrawn", "Regressed", "Repaired", "Overtaken")
# Reasons of moves that undo a move by somebody else, or that came too late because somebody else had moved the alias: they do not show
# which versions this promotion chose.
_DRIFT_REASONS = ("Repaired", "Overtaken")


def skips_canary(draft: Draft, version: str) -> bool:
    """Whether the version skips the canary: it was served before, and the version that is served now must be replaced."""
    last = next(iter(draft.status.history), None)  # the newest move comes first
    returned = last is not None and last.to_version == version and last.reason in _REASONS_WITHOUT_CANARY
    return returned or _replaces_bad_version(draft, version)


def _replaces_bad_version(draft: Draft, version: str) -> bool:
    """Whether the version got the alias back because its successor was bad: by spec.rollbackTo, or a git revert."""
    if draft.spec.rollback_to is not None:
        return True
    history = draft.status.history
    # NB: a move that only returns the alias to the version does not change why the version had the alias before.
    gains = (move for move in history if move.to_version == version and move.reason not in _RETURN_REASONS)
    gain = next(gains, None)
    if gain is None:
        return False
    if gain.reason != "Reverted":
        return gain.reason == "RolledBack"
    # NB: a revert of a revert, for example 3 -> 4 Promoted, 4 -> 3 Reverted, 3 -> 4 Reverted, moves the alias forward again, to the version
    # that was promoted last. Such a move replaces no bad version, and the version may never have completed its canary.
    reverted_pair = (version, gain.from_version)
    promoted = (
        move.to_version for move in history if move.reason == "Promoted" and move.to_version in reverted_pair
    )
    last_promoted = next(promoted, None)
    return last_promoted != version


def find_fallback(draft: Draft, version: str, saved: Sequence[Route]) -> str | None:
    """The version that gets the alias after a failure; None if the alias must stay.

    This is the version that the endpoint is restored to, if that version had the alias; otherwise it is `status.previous`. NB:
    `status.previous` is only the second choice: the version after it may have come during its canary, so it may never have proved itself.

    Args:
        saved: the routes to restore.
    """
    if not _may_move_alias(draft, version, saved):
        return None
    main, previous = main_version(saved), draft.status.previous
    earlier = main if _had_alias(draft, main) else previous
    return None if earlier == version else earlier


def was_first(draft: Draft, version: str, saved: Sequence[Route]) -> bool:
    """Whether this promotion created the alias for the version, at an endpoint that already served another version.

    False while spec.rollbackTo holds the alias.

    Args:
        saved: the routes to restore.
    """
    if not _may_move_alias(draft, version, saved):
        return False
    moves = (move for move in draft.status.history if move.reason not in _DRIFT_REASONS)
    last = next(moves, None)
    if last is None or last.reason not in ("Promoted", "Reverted") or draft.status.previous is not None:
        return False
    return last.to_version == version and last.from_version is None


def _may_move_alias(draft: Draft, version: str, saved: Sequence[Route]) -> bool:
    """Whether a failure of the version may move the alias.

    It may not while spec.rollbackTo holds the alias, or if the endpoint served no other version before: then the cause may be
    spec.serving, for example the machine size, and not the version.
    """
    return draft.spec.rollback_to is None and main_version(saved) not in (None, version)


def _had_alias(draft: Draft, version: str | None) -> bool:
    """Whether the version had the alias, other than by drift, and did not lose it because it failed."""
    record = draft.status.find_record(version)
    return (record is not None and record.held is True) or version == draft.status.previous
