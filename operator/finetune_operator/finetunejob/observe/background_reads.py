"""Reads of servers in the background: a pass gets the last answer, and waits only briefly for a new one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.observe.read_limits import ReadLimits
from finetune_operator.settings import Settings

Answer = TypeVar("Answer")

_PATIENCE_SECONDS = 0.25
# NB: a pass that comes a little early, as passes at a poll interval do, asks again.
_FRESH_SHARE = 0.8
# Of the poll interval: how old an answer may be that counts while a newer one is read.
_MAX_INTERVALS = 3.0
_MAX_JOBS = 8192


class MaxAge(NamedTuple):
    """How long an answer counts, from when it was asked for, in seconds.

    Attributes:
        fresh: until then nothing is asked.
        usable: until then it counts while a newer one is read. Policies fail a job for what is missing, and must not do so for
            an answer of long ago.
    """

    fresh: float
    usable: float

    @classmethod
    def of_polled(cls, settings: Settings) -> MaxAge:
        """Of a server that is read once in a poll interval."""
        return cls(settings.poll_seconds * _FRESH_SHARE, settings.poll_seconds * _MAX_INTERVALS)

    @classmethod
    def of_shared(cls, settings: Settings) -> MaxAge:
        """Of answers that jobs share, which know themselves when they are asked for again."""
        return cls(0.0, settings.poll_seconds * _MAX_INTERVALS)


@dataclass
class ReadPace:
    """What all background reads have in common: when a pass stops waiting, and how many threads they hold.

    Attributes:
        clock: monotonic seconds.
        wake: queues a pass over the job with this key; called when a read ends that no pass waited for.
        threads: the limits of reads in threads. Each may keep its thread until the deadline of its requests.
        patience_seconds: how long a pass waits for an answer. A server that answers at once is read in the pass that asks it.
    """

    clock: Callable[[], float]
    wake: Callable[[str], None]
    threads: ReadLimits
    patience_seconds: float = _PATIENCE_SECONDS
    _late_reads: Counter[Hashable] = field(default_factory=Counter)
    """By server: how many reads run that a pass has stopped waiting for."""

    @classmethod
    def of(cls, settings: Settings, clock: Callable[[], float], wake: Callable[[str], None]) -> ReadPace:
        """The pace of an installation. NB: half of the threads stay free for writes."""
        return cls(clock, wake, ReadLimits.of_threads(settings.workers))

    async def has_ended_soon(self, server: Hashable, read: asyncio.Task[None]) -> bool:
        """Whether a read ends while a pass waits for it. A pass does not wait for a server that lets another read wait."""
        if not self._late_reads[server]:
            await asyncio.wait({read}, timeout=self.patience_seconds)
        if read.done():
            return True
        self._late_reads[server] += 1
        read.add_done_callback(lambda _read: self._forget_late_read(server))
        return False

    def _forget_late_read(self, server: Hashable) -> None:
        self._late_reads[server] -= 1
        if not self._late_reads[server]:
            del self._late_reads[server]


@dataclass
class _Outcome(Generic[Answer]):
    """An answer or an error, to which question, and when it was asked.

    Attributes:
        is_unseen: no pass has got it yet. It counts for the next one, however old it is: the pass that it woke would otherwise
            ask again at once, and a slow server would have a job reconciled without end.
    """

    asked_at: float
    question: Hashable
    answer: Answer | None = None
    error: BaseException | None = None
    is_unseen: bool = True


class _Read(NamedTuple):
    """A read that runs, and its question."""

    question: Hashable
    task: asyncio.Task[None]


@dataclass
class BackgroundReads(Generic[Answer]):
    """The outcomes of the last reads about FineTuneJobs, by uid, and the reads that run.

    Attributes:
        takes_turns: whether a read holds a thread from its begin to its end. False where `ask` counts itself: jobs that share an
            answer wait for one read, and a connection is no thread.
    """

    pace: ReadPace
    max_age: MaxAge
    takes_turns: bool = True
    _outcomes: dict[str, _Outcome[Answer]] = field(default_factory=dict)
    _reads: dict[str, _Read] = field(default_factory=dict)

    async def read(
        self,
        ftj: FineTuneJob,
        server: Hashable,
        question: Hashable,
        ask: Callable[[], Coroutine[object, object, Answer]],
    ) -> Answer | None:
        """The last answer to a question about a job; None where none is known yet, or the last one is too old.

        Args:
            server: who is asked; what lets one read of it wait is not waited for by another.
            question: an answer to another question does not count.
            ask: reads the answer.

        Raises:
            Exception: what `ask` raised in the last read, once.
        """
        outcome = self._find(ftj, question, self.max_age.fresh)
        if outcome is not None:
            return self._take(ftj.uid, outcome)
        running = self._reads.get(ftj.uid)
        if running is None or running.question != question:
            read = self._begin(ftj, server, question, ask)
            if not await self.pace.has_ended_soon(server, read):
                read.add_done_callback(lambda ended: self._wake(ftj, ended))
        outcome = self._find(ftj, question, self.max_age.usable)
        return None if outcome is None else self._take(ftj.uid, outcome)

    def forget(self, ftj: FineTuneJob, *, cancel: bool = False) -> None:
        """Discard the last answer, and that of a read which runs: the server was written to, or the job was deleted.

        Args:
            cancel: end the read. NB: not one in a thread, which would go on without a turn.
        """
        self._outcomes.pop(ftj.uid, None)
        read = self._reads.pop(ftj.uid, None)
        if read and cancel:
            read.task.cancel()

    def _find(self, ftj: FineTuneJob, question: Hashable, max_age: float) -> _Outcome[Answer] | None:
        outcome = self._outcomes.get(ftj.uid)
        if outcome is None or outcome.question != question:
            return None
        return outcome if outcome.is_unseen or self.pace.clock() - outcome.asked_at < max_age else None

    def _take(self, uid: str, outcome: _Outcome[Answer]) -> Answer | None:
        outcome.is_unseen = False
        if outcome.error:
            del self._outcomes[uid]
            raise outcome.error
        return outcome.answer

    def _begin(
        self,
        ftj: FineTuneJob,
        server: Hashable,
        question: Hashable,
        ask: Callable[[], Coroutine[object, object, Answer]],
    ) -> asyncio.Task[None]:
        outcome = _Outcome[Answer](self.pace.clock(), question)
        if self.takes_turns:
            ask = partial(self._ask_in_turn, ftj.namespace, server, outcome, ask)
        read = asyncio.create_task(self._follow(ftj, outcome, ask))
        self._reads[ftj.uid] = _Read(question, read)
        return read

    async def _follow(
        self,
        ftj: FineTuneJob,
        outcome: _Outcome[Answer],
        ask: Callable[[], Coroutine[object, object, Answer]],
    ) -> None:
        """Keep what a read brings, unless it was forgotten or replaced by another question meanwhile."""
        try:
            outcome.answer = await ask()
        except Exception as error:  # noqa: BLE001 - raised in the pass that takes it
            outcome.error = error
        running = self._reads.get(ftj.uid)
        if running is None or running.task is not asyncio.current_task():
            return
        del self._reads[ftj.uid]
        # NB: a pass that began before its job was deleted leaves its answer behind.
        if len(self._outcomes) >= _MAX_JOBS:
            self._outcomes.clear()
        self._outcomes[ftj.uid] = outcome

    async def _ask_in_turn(
        self,
        namespace: str,
        server: Hashable,
        outcome: _Outcome[Answer],
        ask: Callable[[], Coroutine[object, object, Answer]],
    ) -> Answer:
        async with self.pace.threads.turn(namespace, server):
            outcome.asked_at = self.pace.clock()
            return await ask()

    def _wake(self, ftj: FineTuneJob, read: asyncio.Task[None]) -> None:
        """Have a job looked at, now that its answer is there."""
        if not read.cancelled() and ftj.uid in self._outcomes:
            self.pace.wake(ftj.key)
