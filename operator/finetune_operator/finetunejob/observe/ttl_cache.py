"""Answers of servers about FineTuneJobs, cached for a share of the poll interval."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from finetune_operator.settings import Settings

Answer = TypeVar("Answer")


class CachedAnswer(NamedTuple, Generic[Answer]):
    """An answer, to which question, and when it was asked."""

    at: float
    question: Hashable
    answer: Answer


# NB: a pass that comes a little early, as passes at a poll interval do, asks again.
INTERVAL_SHARE = 0.8
"""Of the poll interval: how long an answer counts."""

Results = dict[str, CachedAnswer[Answer]]
"""By the FineTuneJob's uid."""


async def get_recent(
    results: Results[Answer],
    uid: str,
    question: Hashable,
    ask: Callable[[], Awaitable[Answer]],
    *,
    clock: Callable[[], float],
    settings: Settings,
) -> Answer:
    """The answer to a question about a job, at most a poll interval old."""
    now, cached = clock(), results.get(uid)
    if cached and cached.question == question and now - cached.at < settings.poll_seconds * INTERVAL_SHARE:
        return cached.answer
    answer = await ask()
    results[uid] = CachedAnswer(now, question, answer)
    return answer


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
