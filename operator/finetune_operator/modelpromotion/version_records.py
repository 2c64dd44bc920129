"""What a promotion decided about versions, in status.registry.versions. Each move of the alias changes it.

The history has only the last moves, in the order of clocks; these records are complete, and do not depend on clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finetune_crds.promotion_status import (
    ModelPromotionStatus,
    Move,
    RegistryIdentity,
    VersionRecord,
)

# The version that the alias leaves by such a move had the alias before, and may have had it before this promotion.
_REASONS_FROM_HOLDER = ("Promoted", "Reverted", "Adopted")
# A version that loses the alias by such a move must be judged again.
_LOSS_REASONS = ("Withdrawn", "Regressed", "RolledBack", "VersionDeleted")
# A version that loses the alias by such a move failed: it is no version to fall back to.
_FAILURE_REASONS = ("Withdrawn", "Regressed")
_UNJUDGED: dict[str, Any] = {"gates": None, "approved_by": None}


def has_decision(record: VersionRecord) -> bool:
    """Whether a record has more than the identity of its version."""
    return any(
        value is not None
        for value in (record.held, record.gates, record.approved_by, record.bad, record.skipped)
    )


def update_record(status: ModelPromotionStatus, version: str, **fields: Any) -> ModelPromotionStatus:
    """Return the status with these fields of the record of a version, which is created if it does not exist."""
    registry = status.registry or RegistryIdentity(has_decisions=True)
    record = status.find_record(version) or VersionRecord(version=version)
    other_records = [item for item in registry.versions if item.version != version]
    versions = sorted([*other_records, record.model_copy(update=fields)], key=lambda item: int(item.version))
    return status.model_copy(update={"registry": registry.model_copy(update={"versions": versions})})


def record_move(status: ModelPromotionStatus, move: Move) -> ModelPromotionStatus:
    """Return the status with the decisions that follow from a move."""
    before, after = move.from_version, move.to_version
    if move.reason == "VersionDeleted":
        status = _set_lost(status, before)
    elif (move.reason, after) != ("Repaired", None):
        # A repair that removes the alias does not set it again.
        status = _set_lost(status, None)
    if before is not None and move.reason in _REASONS_FROM_HOLDER:
        status = update_record(status, before, held=True)
    if before is not None and move.reason in _LOSS_REASONS:
        lost = {**_UNJUDGED, "held": None} if move.reason in _FAILURE_REASONS else _UNJUDGED
        status = update_record(status, before, **lost)
    if after is None or move.reason in ("Repaired", "Overtaken"):
        return status
    gained: dict[str, Any] = {"held": True}
    if move.reason == "Promoted":
        gained |= {"gates": move.gates, "approved_by": move.by if move.approved else None}
    if move.reason in ("Promoted", "Reverted", "RolledBack"):
        # The promotion chose a version again: what a hand chose before is over.
        status = _clear(status, "skipped")
    if move.reason in ("RolledBack", "Adopted"):
        # A person chose the version.
        gained |= {"bad": None, "skipped": None}
    return update_record(status, after, **gained)


def forget_moves(status: ModelPromotionStatus) -> ModelPromotionStatus:
    """Return the status without the decisions that moves led to: the alias was not managed by this promotion since."""
    return _clear(_set_lost(status, None), "held", "gates", "approved_by")


def import_history(status: ModelPromotionStatus) -> ModelPromotionStatus:
    """Return a status of an earlier release with the records that its history and its journal lead to.

    A move before the promotion began to watch the alias does not say that a version passed, or was lost.
    """
    if status.registry is None or status.registry.has_decisions:
        return status
    registry = status.registry.model_copy(update={"has_decisions": True})
    imported = status.model_copy(update={"registry": registry})
    for move in reversed(status.history):
        is_watched = status.watch_start_time is not None and move.time >= status.watch_start_time
        imported = record_move(imported, move)
        if not is_watched:
            imported = _clear(_set_lost(imported, None), "gates", "approved_by")
    withheld = status.withheld
    if withheld:
        decision = {"skipped": True} if withheld.reason == "Adopted" else {"bad": withheld.digest}
        imported = update_record(imported, withheld.version, **decision)
    return imported


def _clear(status: ModelPromotionStatus, *fields: str) -> ModelPromotionStatus:
    """Return the status without these fields of all records."""
    if status.registry is None:
        return status
    cleared = dict.fromkeys(fields)
    versions: Sequence[VersionRecord] = [item.model_copy(update=cleared) for item in status.registry.versions]
    return status.model_copy(update={"registry": status.registry.model_copy(update={"versions": versions})})


def _set_lost(status: ModelPromotionStatus, version: str | None) -> ModelPromotionStatus:
    return status.model_copy(update={"journal": status.change_journal(lost=version)})
