"""The delay before the next attempt when restarts that do not count, and so are not limited in number, leave no progress."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from finetune_crds.base import Json
from finetune_operator.finetunejob.children import job_condition
from finetune_operator.finetunejob.draft.draft import Draft

_FIRST_SECONDS = 10
_MAX_SECONDS = 300
_MAX_DOUBLINGS = 5
# An attempt that ran this long counts as progress, with or without a checkpoint.
_PROGRESS_SECONDS = 300


@dataclass(frozen=True)
class Attempt:
    """The progress of an attempt that does not count.

    Attributes:
        seconds: how long it ran.
        step: step of the newest checkpoint.
        step_before: step of the newest checkpoint at the failure before.
    """

    seconds: float
    step: int | None = None
    step_before: int | None = None

    @property
    def has_progressed(self) -> bool:
        """Whether the next attempt may start at once."""
        newer = self.step is not None and (self.step_before is None or self.step > self.step_before)
        return newer or self.seconds >= _PROGRESS_SECONDS


def idle_restarts(before: int, attempt: Attempt) -> int:
    """Restarts in a row without progress, this one included."""
    return 0 if attempt.has_progressed else before + 1


def wait_seconds(idle: int) -> int:
    """Seconds before the restart: 0, then 10, 20, 40 and so on up to 300."""
    return min(_FIRST_SECONDS * 2 ** min(idle - 1, _MAX_DOUBLINGS), _MAX_SECONDS) if idle else 0


def run_seconds(child: Json, now: datetime) -> float:
    """How long a failed Job ran; 0 when its start time is unknown."""
    status, failed = child.get("status", {}), job_condition(child, "Failed") or {}
    began = _parse_time(status.get("startTime") or child["metadata"].get("creationTimestamp"))
    ended = _parse_time(failed.get("lastTransitionTime")) or now
    return max((ended - began).total_seconds(), 0.0) if began else 0.0


def _parse_time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def record_delay(draft: Draft, attempt: Attempt) -> None:
    """Record when the next attempt may start."""
    idle = idle_restarts(draft.status.idle_restarts or 0, attempt)
    at = draft.now + timedelta(seconds=wait_seconds(idle)) if idle else None
    draft.update(idle_restarts=idle or None, restart_time=at)


def may_start(draft: Draft) -> bool:
    """Whether the delay of the current attempt is over; until then the job is requeued."""
    at = draft.status.restart_time
    remaining_seconds = (at - draft.now).total_seconds() if at else 0.0
    if remaining_seconds > 0:
        draft.requeue_after(remaining_seconds)
        return False
    draft.update(restart_time=None)
    return True
