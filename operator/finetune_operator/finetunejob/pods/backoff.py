"""The delay before a restart that runPolicy.maxRestarts does not limit, if the attempt before the restart made no progress."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from finetune_crds.base import Json
from finetune_operator.batch.state import job_condition
from finetune_operator.finetunejob.children import parse_time
from finetune_operator.finetunejob.draft.draft import Draft

_FIRST_SECONDS = 10
_MAX_SECONDS = 300
# More doublings exceed _MAX_SECONDS.
_MAX_DOUBLINGS = 5
# An attempt that ran this long was fruitful, with or without a checkpoint.
_PROGRESS_SECONDS = 300


@dataclass(frozen=True)
class Attempt:
    """The progress of an attempt since the previous failure.

    Attributes:
        seconds: how long it ran.
        step: step of the newest checkpoint.
        step_before: step of the newest checkpoint at the previous failure.
        reported_step: the highest step that the training has reported.
        reported_step_before: the highest step that had been reported at the previous failure.
    """

    seconds: float
    step: int | None = None
    step_before: int | None = None
    reported_step: int | None = None
    reported_step_before: int | None = None

    @property
    def is_fruitful(self) -> bool:
        """Whether the next attempt may start at once: this attempt stored a newer checkpoint, or ran for long enough."""
        return _is_later(self.step, self.step_before) or self.seconds >= _PROGRESS_SECONDS

    @property
    def has_progressed(self) -> bool:
        """Whether the job got further than at the previous failure; if no steps are reported, whether the attempt was fruitful."""
        if self.step is None and self.reported_step is None:
            return self.is_fruitful
        return _is_later(self.step, self.step_before) or _is_later(
            self.reported_step, self.reported_step_before
        )


def _is_later(step: int | None, step_before: int | None) -> bool:
    return step is not None and (step_before is None or step > step_before)


def idle_restarts(before: int, attempt: Attempt) -> int:
    """The number of consecutive restarts after attempts that were not fruitful, including the restart after this attempt."""
    return 0 if attempt.is_fruitful else before + 1


def wait_seconds(idle: int) -> int:
    """Seconds before a restart, by the number of `idle_restarts`: 0, then 10, 20, 40 and so on up to 300."""
    if not idle:
        return 0
    seconds: int = _FIRST_SECONDS * 2 ** min(idle - 1, _MAX_DOUBLINGS)
    return min(seconds, _MAX_SECONDS)


def run_seconds(job: Json, now: datetime) -> float:
    """Return how long a Job ran until it failed, or has run until now; 0 if its start time is unknown."""
    status, failed = job.get("status", {}), job_condition(job, "Failed") or {}
    began = parse_time(status.get("startTime") or job["metadata"].get("creationTimestamp"))
    ended = parse_time(failed.get("lastTransitionTime")) or now
    return max((ended - began).total_seconds(), 0.0) if began else 0.0


def record_delay(draft: Draft, attempt: Attempt) -> None:
    """Record when the next attempt may start and, if `attempt` has not progressed, since when there has been no progress."""
    idle = idle_restarts(draft.status.idle_restarts or 0, attempt)
    at = draft.now + timedelta(seconds=wait_seconds(idle)) if idle else None
    draft.update(idle_restarts=idle or None, restart_time=at)
    if not attempt.has_progressed and draft.status.no_progress_since is None:
        draft.update(no_progress_since=draft.now)


def find_idle_seconds(draft: Draft) -> float:
    """Return the seconds without progress since the first restart that runPolicy.maxRestarts does not limit; 0 after progress."""
    since = draft.status.no_progress_since
    return (draft.now - since).total_seconds() if since else 0.0


def may_start(draft: Draft) -> bool:
    """Whether the delay of the current attempt is over; until then the job is requeued."""
    at = draft.status.restart_time
    remaining_seconds = (at - draft.now).total_seconds() if at else 0.0
    if remaining_seconds > 0:
        draft.requeue_after(remaining_seconds)
        return False
    draft.update(restart_time=None)
    return True
