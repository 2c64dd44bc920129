"""A work queue: no duplicate keys, at most one worker for each key, fair to namespaces, news before routine, delays and backoff."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from finetune_operator.controller.lane import Lane, get_namespace

_FIRST_BACKOFF_SECONDS = 0.5
_MAX_BACKOFF_SECONDS = 30.0
# Keeps the power finite; fewer doublings already exceed the maximum backoff.
_MAX_DOUBLINGS = 10
# Of so many keys in a row that workers take, one is routine if both kinds wait: news must not stop the progress of all other resources.
_ROUTINE_TURN = 4


class _Delay(NamedTuple):
    """When a key is added, and whether that is routine."""

    end: float
    is_routine: bool


@dataclass
class WorkQueue:
    """Keys to be handled.

    A key that is added while a worker handles it is handled once more afterwards: no event is missed, and two workers
    never handle the same key at once.

    A key is added because of news, such as a pod that failed, or as a matter of routine, such as the progress of a training. Workers take
    news first. With thousands of running jobs and a slow API server, the restart of a job would otherwise wait for all their progress.

    Namespaces take turns, among those with news and among those with routine, and while keys of other namespaces wait, one namespace
    occupies no more than half of the workers, rounded up. 500 new jobs of one team would otherwise delay the job of another.

    Attributes:
        workers: how many workers take keys.
        is_open: whether the queue accepts keys. The queue of a replica that stands by does not.
    """

    clock: Callable[[], float]
    workers: int = 1
    is_open: bool = True
    _news: Lane = field(default_factory=Lane)
    _routine: Lane = field(default_factory=Lane)
    _queued: dict[str, bool] = field(default_factory=dict)
    """By queued key: whether it is routine."""
    _busy: set[str] = field(default_factory=set)
    _occupied_workers: dict[str, int] = field(default_factory=dict)
    """By namespace with busy keys: how many workers handle its keys."""
    _namespaces_at_limit: set[str] = field(default_factory=set)
    """Those that occupy at least half of the workers."""
    _readded: dict[str, bool] = field(default_factory=dict)
    """By busy key that was added again: whether that is routine."""
    _delayed: list[tuple[float, str]] = field(default_factory=list)
    """A heap of (time, key). An entry counts only if `_due` has the same time for the key."""
    _due: dict[str, _Delay] = field(default_factory=dict)
    """By key: its earliest delay."""
    _failures: dict[str, int] = field(default_factory=dict)
    """By key: failures since the last success."""
    _added_at: dict[str, float] = field(default_factory=dict)
    """By queued key: when it was queued."""
    _taken: int = 0
    """The number of keys that workers have taken."""
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _key_done: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, key: str, *, is_routine: bool = False) -> None:
        """Handle a key as soon as a worker is free; if it is routine, after the keys with news."""
        if not self.is_open:
            return
        if key in self._busy:
            self._readded[key] = is_routine and self._readded.get(key, True)
        elif key not in self._queued or (self._queued[key] and not is_routine):
            if key in self._queued:
                self._routine.remove(key)
            self._queued[key] = is_routine
            (self._routine if is_routine else self._news).append(key)
            self._added_at.setdefault(key, self.clock())
            self._wake.set()

    def add_after(self, key: str, seconds: float, *, is_routine: bool = False) -> None:
        """Handle a key after a delay.

        If a key has several delays, the delay that ends first applies, and is routine only if all of them are.
        """
        if not self.is_open:
            return
        end, earliest = self.clock() + seconds, self._due.get(key)
        if earliest is None or end < earliest.end:
            self._due[key] = _Delay(end, is_routine and (earliest is None or earliest.is_routine))
            heapq.heappush(self._delayed, (end, key))
            self._wake.set()
        elif not is_routine:
            self._due[key] = earliest._replace(is_routine=False)

    def retry(self, key: str, *, at_least_seconds: float = 0.0) -> float:
        """Handle a key again after a delay that grows with each failure, and return the delay in seconds.

        Args:
            at_least_seconds: the minimum delay, which a server asks for.
        """
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        doublings = min(failures - 1, _MAX_DOUBLINGS)
        delay = min(_FIRST_BACKOFF_SECONDS * float(2**doublings), _MAX_BACKOFF_SECONDS)
        delay *= random.uniform(0.75, 1.25)  # noqa: S311
        # NB: randomized too, so that keys that failed together are not retried together.
        delay = max(delay, at_least_seconds * random.uniform(1.0, 1.25))  # noqa: S311
        self.add_after(key, delay)
        return delay

    def forget(self, key: str) -> None:
        """Reset the backoff of a key that was handled without failure."""
        self._failures.pop(key, None)

    def drop(self, key: str) -> None:
        """Cancel the delays and reset the backoff of a key whose object no longer exists."""
        self._failures.pop(key, None)
        self._due.pop(key, None)

    def close(self) -> None:
        """Accept no more keys, and drop those that wait. Workers complete the keys that they have taken."""
        self.is_open = False
        for waiting in (
            self._news,
            self._routine,
            self._queued,
            self._readded,
            self._delayed,
            self._due,
            self._added_at,
        ):
            waiting.clear()

    async def wait_until_idle(self) -> None:
        """Wait until no worker handles a key. Close the queue first."""
        while self._busy:
            self._key_done.clear()
            await self._key_done.wait()

    def __len__(self) -> int:
        return len(self._queued)

    def oldest_age_seconds(self) -> float:
        """The longest wait of a key for a worker, in seconds; 0 if no key waits. A scrape of the metrics calls this in another thread."""
        # NB: a Python loop over the dict would fail if the event loop added a key meanwhile; a single call in C does not.
        added_at = tuple(self._added_at.values())
        return self.clock() - min(added_at) if added_at else 0.0

    async def take(self) -> str:
        """Wait for a key, mark it as being handled, and return it; call `done` afterwards."""
        while True:
            self._move_due()
            if self._queued:
                key = self._pop()
                self._added_at.pop(key, None)
                # The pass that begins now decides anew when the next one is due.
                self._due.pop(key, None)
                self._occupy(key)
                return key
            self._wake.clear()
            timeout = max(self._delayed[0][0] - self.clock(), 0) if self._delayed else None
            try:
                await asyncio.wait_for(self._wake.wait(), timeout)
            except TimeoutError:
                continue

    def done(self, key: str) -> None:
        """Mark a key as no longer being handled."""
        self._release(key)
        self._key_done.set()
        if key in self._readded:
            self.add(key, is_routine=self._readded.pop(key))

    def _pop(self) -> str:
        """Remove the key that is to be handled next, and return it."""
        self._taken += 1
        is_routine_turn = self._taken % _ROUTINE_TURN == 0
        lanes = (self._routine, self._news) if is_routine_turn else (self._news, self._routine)
        for excluded_namespaces in (self._namespaces_at_limit, ()):
            for lane in lanes:
                key = lane.pop(excluded_namespaces)
                if key is not None:
                    del self._queued[key]
                    return key
        raise RuntimeError("a queued key is in neither lane")

    def _occupy(self, key: str) -> None:
        """Count the worker that begins to handle a key."""
        self._busy.add(key)
        namespace = get_namespace(key)
        occupied = self._occupied_workers[namespace] = self._occupied_workers.get(namespace, 0) + 1
        if 2 * occupied >= self.workers:
            self._namespaces_at_limit.add(namespace)

    def _release(self, key: str) -> None:
        """Count the worker of a key no longer."""
        self._busy.remove(key)
        namespace = get_namespace(key)
        occupied = self._occupied_workers[namespace] = self._occupied_workers[namespace] - 1
        if 2 * occupied < self.workers:
            self._namespaces_at_limit.discard(namespace)
        if not occupied:
            del self._occupied_workers[namespace]

    def _move_due(self) -> None:
        """Queue the keys whose delay has ended."""
        now = self.clock()
        while self._delayed and self._delayed[0][0] <= now:
            end, key = heapq.heappop(self._delayed)
            delay = self._due.get(key)
            if delay and delay.end == end:
                del self._due[key]
                self.add(key, is_routine=delay.is_routine)


@dataclass(frozen=True)
class Queues:
    """A queue for each kind of resource, so that a slow registry does not delay training."""

    finetunejobs: WorkQueue
    promotions: WorkQueue
    schedules: WorkQueue

    @property
    def by_kind(self) -> dict[str, WorkQueue]:
        """The queues, by the kind of their resources."""
        return {
            "FineTuneJob": self.finetunejobs,
            "ModelPromotion": self.promotions,
            "FineTuneSchedule": self.schedules,
        }

    def of(self, kind: str) -> WorkQueue:
        """The queue of a kind."""
        return self.by_kind[kind]

    def open(self) -> None:
        """Let all queues accept keys."""
        for queue in self.by_kind.values():
            queue.is_open = True

    def close(self) -> None:
        """Let no queue accept keys, and drop those that wait."""
        for queue in self.by_kind.values():
            queue.close()

    @property
    def is_open(self) -> bool:
        """Whether the queues accept keys."""
        return self.finetunejobs.is_open

    async def wait_until_idle(self) -> None:
        """Wait until no worker handles a key of any queue. Close the queues first."""
        for queue in self.by_kind.values():
            await queue.wait_until_idle()

    def oldest_age_seconds(self) -> float:
        """The longest wait of a key of any queue for a worker, in seconds."""
        return max(queue.oldest_age_seconds() for queue in self.by_kind.values())


async def work(queue: WorkQueue, handle: Callable[[str], Awaitable[None]]) -> None:
    """Handle keys until cancelled. `handle` must catch its own errors."""
    while True:
        key = await queue.take()
        try:
            await handle(key)
        finally:
            queue.done(key)
