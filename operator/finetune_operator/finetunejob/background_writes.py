"""Background writes to MLflow and Databricks: a pass waits only briefly for a write, and a later pass gets the result.

A server that takes requests and does not answer holds each write until its timeout. A pass that waited for it would occupy a worker, and
a few such servers would keep all workers from the other jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field

from finetune_operator.finetunejob.decision import Action, ActionResult, EnsureRun
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.observe.background_reads import ReadPace
from finetune_operator.finetunejob.observe.request_limits import RequestLimits
from finetune_operator.settings import Settings

Act = Callable[[], Coroutine[object, object, ActionResult]]

# How long the result of a write is kept for the pass that the end of the write queues. What it says may change afterwards: somebody may delete
# a run that was created, or move an alias that was set. The action is then carried out again, which changes nothing if it is still done.
_RESULT_SECONDS = 60.0


@dataclass
class _Write:
    """A write whose result no pass has received.

    Attributes:
        question: what identifies the action, see `_identify`.
        began_at: when the write began, in monotonic seconds.
        ended_at: when it ended; None while it is in progress.
    """

    question: object
    began_at: float
    task: asyncio.Task[ActionResult]
    ended_at: float | None = None


@dataclass
class BackgroundWrites:
    """Carries out actions in tasks of their own, at most one at a time for each job.

    NB: one at a time, because actions of a job depend on each other: a run that is canceled while it is being submitted would go on.

    Attributes:
        pace: how long a pass waits.
        threads: the limits for writes in threads. A write may use its thread until the deadline of its requests.
    """

    pace: ReadPace
    threads: RequestLimits
    _writes: dict[str, _Write] = field(default_factory=dict)
    """By uid of the job."""

    @classmethod
    def of(cls, settings: Settings, pace: ReadPace) -> BackgroundWrites:
        """The writes of an installation. NB: they have their own threads, so that reads of slow servers do not delay them."""
        return cls(pace, RequestLimits.of_threads(settings.workers))

    async def carry_out(self, ftj: FineTuneJob, server: Hashable, action: Action, act: Act) -> ActionResult:
        """Carry out an action, or return the result of the same action that an earlier pass began.

        The result is pending while the server takes long, or another action of the job is in progress; the end of the write then queues a
        pass.

        Args:
            server: the server that is written to. While one write to it is late, passes do not wait for its other writes.
            act: carries the action out.

        Raises:
            Exception: the error of `act`; it is raised only once.
        """
        question = _identify(action)
        write = self._find(ftj, question)
        if write is None:
            write = self._begin(ftj, server, question, act)
            if not await self.pace.has_ended_soon(server, write.task):
                write.task.add_done_callback(lambda _task: self.pace.wake(ftj.key, is_routine=False))
        if not write.task.done() or write.question != question:
            return ActionResult(action, pending_seconds=self.pace.clock() - write.began_at)
        self._writes.pop(ftj.uid, None)
        return write.task.result()

    def forget(self, ftj: FineTuneJob) -> None:
        """Discard the result of a write for a job that was deleted. A write in progress continues."""
        self._writes.pop(ftj.uid, None)

    def _find(self, ftj: FineTuneJob, question: object) -> _Write | None:
        """The write of a job that is in progress, or the one with this question if its result is not too old."""
        write = self._writes.get(ftj.uid)
        if write is None or write.ended_at is None:
            return write
        is_fresh = self.pace.clock() - write.ended_at < _RESULT_SECONDS
        return write if is_fresh and write.question == question else None

    def _begin(self, ftj: FineTuneJob, server: Hashable, question: object, act: Act) -> _Write:
        """Start a write in the background."""
        now = self.pace.clock()
        self._discard_old(now)
        task = asyncio.create_task(self._act_in_turn(ftj.namespace, server, act))
        write = self._writes[ftj.uid] = _Write(question, now, task)
        task.add_done_callback(lambda _task: self._end(write))
        return write

    async def _act_in_turn(self, namespace: str, server: Hashable, act: Act) -> ActionResult:
        async with self.threads.turn(namespace, server):
            return await act()

    def _end(self, write: _Write) -> None:
        write.ended_at = self.pace.clock()
        if not write.task.cancelled():
            # Marks the error as retrieved: asyncio would log the one of a write whose result no pass requests.
            write.task.exception()

    def _discard_old(self, now: float) -> None:
        """Discard the results that no pass has requested in time."""
        self._writes = {
            uid: write
            for uid, write in self._writes.items()
            if write.ended_at is None or now - write.ended_at < _RESULT_SECONDS
        }


def _identify(action: Action) -> object:
    """What makes two actions the same. NB: not the tags of a run: one of them depends on whether the namespace can be read."""
    match action:
        case EnsureRun(experiment, run_name):
            return EnsureRun, experiment, run_name
        case _:
            return action
