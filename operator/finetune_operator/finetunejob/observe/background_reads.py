"""Reads of servers outside the cluster, made beside the passes: a pass gets the last answer, and waits only briefly for a new one."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.settings import Settings

Answer = TypeVar("Answer")

_PATIENCE_SECONDS = 0.25
# NB: a pass that comes a little early, as passes at a poll interval do, asks again.
_INTERVAL_SHARE = 0.8

log = logging.getLogger(__name__)


@dataclass
class ReadPace:
    """What all background reads share: when a pass stops waiting for a server, and how many reads run at a time.

    Attributes:
        clock: monotonic seconds.
        wake: queues a pass over the job with this key; called when an answer comes that no pass has waited for.
        max_reads: reads that run at a time. Each may keep a thread until the deadline of its requests.
        patience_seconds: how long a pass waits for an answer. A server that answers at once is read in the pass that asks it.
    """

    clock: Callable[[], float]
    wake: Callable[[str], None]
    max_reads: int
    patience_seconds: float = _PATIENCE_SECONDS
    _late_reads: Counter[Hashable] = field(default_factory=Counter)
    """By server: how many reads run that a pass has stopped waiting for."""

    def __post_init__(self) -> None:
        self.turns = asyncio.Semaphore(self.max_reads)

    @classmethod
    def of(cls, settings: Settings, clock: Callable[[], float], wake: Callable[[str], None]) -> ReadPace:
        """The pace of an installation. NB: half of the threads stay free for writes."""
        return cls(clock, wake, settings.workers)

    async def wait(self, server: Hashable, read: asyncio.Task[None]) -> bool:
        """Wait for a read; whether it ended. A pass does not wait for a server that lets another read wait."""
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


def max_age_seconds(settings: Settings) -> float:
    """How long the answer of a server counts that is read once in a poll interval."""
    return settings.poll_seconds * _INTERVAL_SHARE


class _KnownAnswer(NamedTuple, Generic[Answer]):
    """An answer, to which question, and when it was asked."""

    at: float
    question: Hashable
    answer: Answer


class _Read(NamedTuple):
    """A read that runs, and its question."""

    question: Hashable
    task: asyncio.Task[None]


@dataclass
class BackgroundReads(Generic[Answer]):
    """The last answers about FineTuneJobs, by uid, and the reads that run.

    Attributes:
        max_age_seconds: how long an answer counts, from when it was asked for.
    """

    pace: ReadPace
    max_age_seconds: float
    _answers: dict[str, _KnownAnswer[Answer]] = field(default_factory=dict)
    _reads: dict[str, _Read] = field(default_factory=dict)

    async def read(
        self,
        ftj: FineTuneJob,
        server: Hashable,
        question: Hashable,
        ask: Callable[[], Coroutine[object, object, Answer]],
    ) -> Answer | None:
        """The last answer to a question about a job; None where none is known yet.

        Args:
            server: who is asked; what lets one read of it wait is not waited for by another.
            question: an answer to another question does not count.
            ask: reads the answer.

        Raises:
            Exception: what `ask` raises while the pass waits.
        """
        last_answer = self._answers.get(ftj.uid)
        if (
            last_answer
            and last_answer.question == question
            and self.pace.clock() - last_answer.at < self.max_age_seconds
        ):
            return last_answer.answer
        running = self._reads.get(ftj.uid)
        if running is None or running.question != question:
            read = self._begin(ftj, question, ask)
            if await self.pace.wait(server, read):
                read.result()
            else:
                read.add_done_callback(lambda ended: self._end_late(ftj, ended))
        last_answer = self._answers.get(ftj.uid)
        return last_answer.answer if last_answer and last_answer.question == question else None

    def forget(self, ftj: FineTuneJob) -> None:
        """Discard the last answer, and that of a read which runs: the server was written to, or the job was deleted."""
        self._answers.pop(ftj.uid, None)
        self._reads.pop(ftj.uid, None)

    def _begin(
        self, ftj: FineTuneJob, question: Hashable, ask: Callable[[], Coroutine[object, object, Answer]]
    ) -> asyncio.Task[None]:
        read = asyncio.create_task(self._follow(ftj.uid, question, ask))
        self._reads[ftj.uid] = _Read(question, read)
        return read

    async def _follow(
        self, uid: str, question: Hashable, ask: Callable[[], Coroutine[object, object, Answer]]
    ) -> None:
        """Keep the answer to a question, unless it was forgotten or replaced by another question meanwhile."""
        began, this_read = self.pace.clock(), asyncio.current_task()
        try:
            async with self.pace.turns:
                answer = await ask()
        finally:
            running = self._reads.get(uid)
            is_current = running is not None and running.task is this_read
            if is_current:
                del self._reads[uid]
        if is_current:
            self._answers[uid] = _KnownAnswer(began, question, answer)

    def _end_late(self, ftj: FineTuneJob, read: asyncio.Task[None]) -> None:
        """Have a job looked at, now that the answer is there. NB: after an error the next pass asks again."""
        if read.cancelled():
            return
        error = read.exception()
        if error is None:
            self.pace.wake(ftj.key)
        else:
            log.warning("%s: %s", ftj.key, error)
