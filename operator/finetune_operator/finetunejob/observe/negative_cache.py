"""A negative cache: a job's question that was refused is asked again only after a delay, which doubles with each refusal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

Answer = TypeVar("Answer")

_FIRST_SECONDS = 1.0
_MAX_JOBS = 4096


class _Refusal(NamedTuple, Generic[Answer]):
    """An answer, the delay in seconds before the question is asked again, and the end of the delay."""

    answer: Answer
    delay: float
    due: float


@dataclass
class NegativeCache(Generic[Answer]):
    """The last refusal of each FineTuneJob, by its uid.

    Attributes:
        clock: monotonic seconds.
        max_delay_seconds: upper limit of the delay, which starts at one second.
    """

    clock: Callable[[], float]
    max_delay_seconds: float
    _refusals: dict[str, _Refusal[Answer]] = field(default_factory=dict)

    def last_answer(self, uid: str) -> Answer | None:
        """The last refusal; None without one."""
        refusal = self._refusals.get(uid)
        return refusal.answer if refusal else None

    def seconds_left(self, uid: str) -> float:
        """Seconds until the question may be asked again; 0 if it may be asked now."""
        refusal = self._refusals.get(uid)
        return max(refusal.due - self.clock(), 0.0) if refusal else 0.0

    def record(self, uid: str, answer: Answer) -> float:
        """Record a refusal, and return the seconds until the question is asked again."""
        before = self._refusals.pop(uid, None)
        # NB: jobs that are deleted while they wait may leave their refusal behind, so the number of refusals is limited.
        # Without its refusal, a job only asks earlier.
        if len(self._refusals) >= _MAX_JOBS:
            self._refusals.clear()
        delay = min(before.delay * 2, self.max_delay_seconds) if before else _FIRST_SECONDS
        self._refusals[uid] = _Refusal(answer, delay, self.clock() + delay)
        return delay

    def forget(self, uid: str) -> None:
        """Discard the last refusal, so that delays start again: the question changed, or was answered."""
        self._refusals.pop(uid, None)
