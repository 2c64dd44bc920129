"""A cache of answers that several FineTuneJobs share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

Answer = TypeVar("Answer")


class _Request(NamedTuple, Generic[Answer]):
    """The time of a request, and the task that gets the response."""

    at: float
    answer: asyncio.Task[Answer]


@dataclass
class SharedAnswers(Generic[Answer]):
    """Answers that several jobs share: each question is asked once per interval, even by concurrent passes.

    Attributes:
        clock: monotonic seconds.
        seconds: the time for which a response is used, from the start of the request.
    """

    clock: Callable[[], float]
    seconds: float
    _requests: dict[Hashable, _Request[Answer]] = field(default_factory=dict)

    async def answer(
        self, question: Hashable, ask: Callable[[], Coroutine[object, object, Answer]]
    ) -> Answer:
        """The answer to a question. Callers that wait for an answer receive it, however long it takes.

        Raises:
            Exception: the error of `ask`, for all callers that wait; the next caller asks again.
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
