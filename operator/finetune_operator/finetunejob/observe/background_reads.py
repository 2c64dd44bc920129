"""Background reads of servers: a pass gets the last response, and waits only briefly for a new response."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.observe.request_limits import RequestLimits
from finetune_operator.settings import Settings

Answer = TypeVar("Answer")
Ask = Callable[[], Coroutine[object, object, Answer]]

# How long a pass waits for a new response.
_PATIENCE_SECONDS = 0.25
# Poll intervals until the server is asked again. NB: less than 1, since passes at the poll interval may come a little early.
_FRESH_SHARE = 0.8
# Poll intervals for which a response is used while a newer response is read.
_MAX_INTERVALS = 3.0
# How long a complete answer is used while a newer answer is read. A pass over a job that does not change comes after a minute at the latest.
# NB: with a shorter time, each of these passes would have no answer at first, and the new answer would cause a second pass.
_COMPLETE_SECONDS = 90.0
# If more outcomes are stored, all are discarded.
_MAX_OUTCOMES = 8192
# With more jobs than this rate allows, each job is read less often: of 2,000 jobs, each every 20 s.
_READS_PER_SECOND = 100.0


class Wake(Protocol):
    """Queues a pass over the job with this key."""

    def __call__(self, key: str, /, *, is_routine: bool) -> None:
        """Queue a pass; a routine pass comes after those with news."""


class MaxAge(NamedTuple):
    """How old a response may be, in seconds since its request.

    Attributes:
        fresh: age up to which the server is not asked again.
        usable: age up to which the response is used while a newer response is read. Policies fail a job if something is missing, and must
            not do so because of an old answer.
    """

    fresh: float
    usable: float

    @classmethod
    def of_polled(cls, settings: Settings) -> MaxAge:
        """The limits for a server that is read once per poll interval."""
        return cls(settings.poll_seconds * _FRESH_SHARE, settings.poll_seconds * _MAX_INTERVALS)

    @classmethod
    def of_shared(cls, settings: Settings) -> MaxAge:
        """The limits for answers that jobs share. None is fresh here, because SharedAnswers decides when the server is asked again."""
        return cls(0.0, settings.poll_seconds * _MAX_INTERVALS)


@dataclass
class ReadPace:
    """Limits that all background reads share: how long a pass waits, and how many threads the reads use.

    Attributes:
        clock: monotonic seconds.
        wake: called at the end of a read that no pass waits for.
        threads: the limits for reads in threads. A read may use its thread until the deadline of its requests.
        patience_seconds: how long a pass waits for an answer, so that a fast response is used in the same pass.
    """

    clock: Callable[[], float]
    wake: Wake
    threads: RequestLimits
    patience_seconds: float = _PATIENCE_SECONDS
    _late_reads: Counter[Hashable] = field(default_factory=Counter)
    """By server: the number of running reads and writes that no pass waits for any more."""

    @classmethod
    def of(cls, settings: Settings, clock: Callable[[], float], wake: Wake) -> ReadPace:
        """The pace for an installation. NB: the process has three threads per worker, and reads get one of them."""
        return cls(clock, wake, RequestLimits.of_threads(settings.workers))

    async def has_ended_soon(self, server: Hashable, read: asyncio.Task[Any]) -> bool:
        """Wait for a read or a write, and return whether it ended in time. Does not wait if another one of the server is already late."""
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
    """A question, when it was asked, and the answer or the error.

    Attributes:
        is_unseen: whether no pass has received the outcome yet. The next pass receives it at any age: if the outcome were too old for
            the pass that it woke, this pass would ask again, and a slow server would cause endless passes.
        is_news: whether the outcome differs from the one before.
        is_repeated: whether the outcome before was of the same question.
        seen_version: the resource version of the job when a pass last received the outcome; empty if no pass has.
    """

    asked_at: float
    question: Hashable
    answer: Answer | None = None
    error: BaseException | None = None
    is_unseen: bool = True
    is_news: bool = True
    is_repeated: bool = False
    seen_version: str = ""


class _Read(NamedTuple):
    """A running read and its question."""

    question: Hashable
    task: asyncio.Task[None]


def _is_never_complete(_question: Hashable, _answer: object) -> bool:
    """The default of `is_complete`."""
    return False


@dataclass
class BackgroundReads(Generic[Answer]):
    """The last outcomes and the running reads of FineTuneJobs, by uid.

    Attributes:
        takes_turns: whether a read counts against `pace.threads` from start to end. False if `ask` uses no thread, or observes the
            limits itself, as for jobs that share an answer: they wait for a single read, which takes one turn.
        is_complete: whether nothing is missing in the answer to a question. A policy may fail a job if something is missing, and must not
            do so because of an old answer, so only a complete answer is used for longer than `max_age.usable`.
    """

    pace: ReadPace
    max_age: MaxAge
    takes_turns: bool = True
    is_complete: Callable[[Hashable, Answer], bool] = _is_never_complete
    _outcomes: dict[str, _Outcome[Answer]] = field(default_factory=dict)
    _reads: dict[str, _Read] = field(default_factory=dict)

    async def read(
        self,
        ftj: FineTuneJob,
        server: Hashable,
        question: Hashable,
        ask: Ask[Answer],
    ) -> Answer | None:
        """The last answer to a question about a job; None if there is none yet, or it is too old.

        A fresh answer is returned at once. Otherwise, a read begins, and the pass waits for it briefly. If the read is late, the pass gets
        the older answer, and the end of the read queues another pass.

        Args:
            server: the server that is asked. While one read of it is late, passes do not wait for its other reads.
            question: the request. The response to another request is not used.
            ask: reads the answer.

        Raises:
            Exception: the error of `ask` in the last read; it is raised only once.
        """
        outcome = self._find(ftj, question, self.max_age.fresh * self._stretch)
        if outcome is not None:
            return self._take(ftj, outcome)
        running = self._reads.get(ftj.uid)
        # If this question is already being read, an earlier pass has waited for the answer, so this pass does not.
        if running is None or running.question != question:
            read = self._begin(ftj, server, question, ask)
            if not await self.pace.has_ended_soon(server, read):
                read.add_done_callback(lambda ended: self._wake(ftj, ended))
        outcome = self._find(ftj, question, self.max_age.usable * self._stretch)
        if outcome is None:
            outcome = self._find_complete(ftj, question)
        if outcome is None:
            # The answer of the running read is news, even if it equals the answer that is too old.
            self._outcomes.pop(ftj.uid, None)
            return None
        return self._take(ftj, outcome)

    def forget(self, ftj: FineTuneJob, *, cancel: bool = False) -> None:
        """Discard the last response and the response of a running read: the server was written to, or the job was deleted.

        Args:
            cancel: cancel the running read. NB: not for a read in a thread, which would continue outside the limit.
        """
        self._outcomes.pop(ftj.uid, None)
        read = self._reads.pop(ftj.uid, None)
        if read and cancel:
            read.task.cancel()

    @property
    def _stretch(self) -> float:
        """The factor by which answers may be older, if there are more jobs than the rate allows to read within `max_age.fresh`."""
        max_fresh_answers = _READS_PER_SECOND * self.max_age.fresh
        return max(len(self._outcomes) / max_fresh_answers, 1.0) if max_fresh_answers else 1.0

    def _find(self, ftj: FineTuneJob, question: Hashable, max_age: float) -> _Outcome[Answer] | None:
        """The outcome of this question, if no pass has received it yet, or if it is not older than `max_age`."""
        outcome = self._outcomes.get(ftj.uid)
        if outcome is None or outcome.question != question:
            return None
        is_young = self.pace.clock() - outcome.asked_at < max_age
        return outcome if outcome.is_unseen or is_young else None

    def _find_complete(self, ftj: FineTuneJob, question: Hashable) -> _Outcome[Answer] | None:
        """The outcome of this question if it is complete, not very old, and the job is as it was when a pass last received the outcome."""
        outcome = self._find(ftj, question, _COMPLETE_SECONDS)
        if outcome is None or outcome.answer is None or outcome.seen_version != ftj.version:
            return None
        return outcome if self.is_complete(question, outcome.answer) else None

    def _take(self, ftj: FineTuneJob, outcome: _Outcome[Answer]) -> Answer | None:
        """Mark an outcome as received, and return its answer or raise its error."""
        outcome.is_unseen = False
        outcome.seen_version = ftj.version
        if outcome.error:
            del self._outcomes[ftj.uid]
            raise outcome.error
        return outcome.answer

    def _begin(
        self,
        ftj: FineTuneJob,
        server: Hashable,
        question: Hashable,
        ask: Ask[Answer],
    ) -> asyncio.Task[None]:
        """Start a read in the background."""
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
        ask: Ask[Answer],
    ) -> None:
        """Store the outcome of a read, unless the read was forgotten, or a read of another question has replaced it."""
        try:
            outcome.answer = await ask()
        except Exception as error:  # noqa: BLE001 - raised in the pass that receives it
            outcome.error = error
        running = self._reads.get(ftj.uid)
        was_discarded = running is None or running.task is not asyncio.current_task()
        if was_discarded:
            return
        del self._reads[ftj.uid]
        # NB: a pass that began before its job was deleted leaves an answer that nobody removes, so the number of answers is limited.
        if len(self._outcomes) >= _MAX_OUTCOMES:
            self._outcomes.clear()
        before = self._outcomes.get(ftj.uid)
        outcome.is_news = (
            before is None
            or before.is_unseen
            or outcome.error is not None
            or (before.question, before.answer) != (outcome.question, outcome.answer)
        )
        outcome.is_repeated = before is not None and before.question == outcome.question
        self._outcomes[ftj.uid] = outcome

    async def _ask_in_turn(
        self,
        namespace: str,
        server: Hashable,
        outcome: _Outcome[Answer],
        ask: Ask[Answer],
    ) -> Answer:
        async with self.pace.threads.turn(namespace, server):
            # The wait for a turn does not make the answer older.
            outcome.asked_at = self.pace.clock()
            return await ask()

    def _wake(self, ftj: FineTuneJob, read: asyncio.Task[None]) -> None:
        """Queue a pass over a job whose answer has arrived, unless an earlier pass has received the same answer."""
        outcome = None if read.cancelled() else self._outcomes.get(ftj.uid)
        if outcome and outcome.is_news:
            self.pace.wake(ftj.key, is_routine=outcome.is_repeated)
