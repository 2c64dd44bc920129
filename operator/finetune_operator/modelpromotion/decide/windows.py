"""Windows: outside of spec.windows, the alias moves to no candidate, and no canary begins. What stops harm does not wait for a window.

A rollback, a repair, a withdrawal, and a git revert to an older version do not wait. A move that began in a window finishes if that takes at
most ten minutes, and so does a rollout whose canary began in one, however long it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from finetune_crds.conditions import ConditionReason
from finetune_crds.promotion_status import MoveReason
from finetune_crds.windows import Window
from finetune_operator.modelpromotion.decide import trial
from finetune_operator.modelpromotion.decide.draft import Draft
from finetune_operator.policy.cron import Cron
from finetune_operator.policy.result import Continue, Outcome, Stop
from finetune_operator.text import format_time

# How long after its beginning a move may be made outside of a window.
_MOVE_TIMEOUT = timedelta(minutes=10)


class Opening(NamedTuple):
    """The next time at which a window opens."""

    window: str
    time: datetime


def await_window(draft: Draft, reason: MoveReason = "Promoted") -> Outcome:
    """Each pass ends here until a window is open, unless the move to the candidate for the reason, or its canary, has begun."""
    version = draft.status.candidate or ""
    if _has_just_begun(draft, version, reason) or trial.has_begun(draft, version):
        return Continue
    opening = find_opening(draft.spec.windows, draft.now)
    if opening is None:
        return Continue
    message = (
        f"version {version} meets every requirement; alias {draft.spec.alias} moves in the next window, {opening.window}, which opens at "
        f"{format_time(opening.time)}"
    )
    draft.stop(ConditionReason.AWAITING_WINDOW, message)
    draft.requeue_after((opening.time - draft.now).total_seconds())
    return Stop


def _has_just_begun(draft: Draft, version: str, reason: MoveReason) -> bool:
    """Whether the move has begun so recently that it may finish outside of a window.

    NB: a registry that refuses the move may allow it days later.
    """
    begun = draft.begun
    return begun is not None and draft.has_begun(version, reason) and draft.now - begun.time < _MOVE_TIMEOUT


def find_opening(windows: Sequence[Window], now: datetime) -> Opening | None:
    """The next opening of a window; None without windows, or while a window is open.

    Raises:
        CronError: a schedule or a time zone is not valid, which `accept` reports.
    """
    openings: list[Opening] = []
    for window in windows:
        cron = parse(window)
        if now < cron.find_last(now) + timedelta(seconds=window.duration_seconds):
            return None
        openings.append(Opening(window.name, cron.find_next(now)))
    return min(openings, key=lambda opening: opening.time, default=None)


def parse(window: Window) -> Cron:
    """Parse the times at which a window opens.

    Raises:
        CronError: the schedule or the time zone is not valid.
    """
    return Cron.parse(window.schedule, window.time_zone, window.path)
