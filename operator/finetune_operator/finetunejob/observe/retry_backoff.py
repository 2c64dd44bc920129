"""Questions that were answered with a refusal, and when each is asked again: later and later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

Answer = TypeVar("Answer")

_FIRST_SECONDS = 1.0
_MOST_JOBS = 4096


class _Held(NamedTuple, Generic[Answer]):
    """An answer, the delay before the question is asked again, and when that is over."""

    answer: Answer
    delay: float
    due: float


@dataclass
class Retries(Generic[Answer]):
    """The last refusal of each FineTuneJob, by its uid.

    Attributes:
        clock: monotonic seconds.
        last_seconds: what the delay doubles up to, from a second.
    """

    clock: Callable[[], float]
    last_seconds: float
    _held: dict[str, _Held[Answer]] = field(default_factory=dict)

    def held(self, uid: str) -> Answer | None:
        """What was noted last."""
        known = self._held.get(uid)
        return known.answer if known else None

    def left(self, uid: str) -> float:
        """Seconds until the question is asked again; 0 where it is now."""
        known = self._held.get(uid)
        return max(known.due - self.clock(), 0.0) if known else 0.0

    def note(self, uid: str, answer: Answer) -> float:
        """Remember a refusal; the seconds until the question is asked again."""
        before = self._held.pop(uid, None)
        # NB: jobs that go away while they wait leave theirs behind.
        if len(self._held) >= _MOST_JOBS:
            self._held.clear()
        delay = min(before.delay * 2, self.last_seconds) if before else _FIRST_SECONDS
        self._held[uid] = _Held(answer, delay, self.clock() + delay)
        return delay

    def forget(self, uid: str) -> None:
        """Start with the first delay again: the question is another one, or was answered."""
        self._held.pop(uid, None)
