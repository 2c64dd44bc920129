"""Answers to questions that several FineTuneJobs have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

Answer = TypeVar("Answer")


class _Request(NamedTuple, Generic[Answer]):
    """When a question was asked, and what gets the answer."""

    at: float
    answer: asyncio.Task[Answer]


@dataclass
class SharedAnswers(Generic[Answer]):
    """Answers to questions that several jobs have: each is asked once per interval, also by concurrent passes.

    Attributes:
        clock: monotonic seconds.
        seconds: how long an answer counts, from when it was asked for.
    """

    clock: Callable[[], float]
    seconds: float
    _requests: dict[Hashable, _Request[Answer]] = field(default_factory=dict)

    async def answer(
        self, question: Hashable, ask: Callable[[], Coroutine[object, object, Answer]]
    ) -> Answer:
        """The answer to a question. Those that wait for one get it however long it takes.

        Raises:
            Exception: what `ask` raises, in all passes that wait for it; the next one asks again.
        """
        now = self.clock()
        oldest = now - self.seconds
        self._requests = {
            key: request
            for key, request in self._requests.items()
            if request.at > oldest or not request.answer.done()
        }
        request = self._requests.get(question)
        if request is None:
            request = self._requests[question] = _Request(now, asyncio.create_task(ask()))
        try:
            return await asyncio.shield(request.answer)
        except Exception:
            self._requests.pop(question, None)
            raise
