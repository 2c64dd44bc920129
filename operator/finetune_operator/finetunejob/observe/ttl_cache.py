"""Answers of servers about FineTuneJobs, each asked for once in a while."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from finetune_operator.settings import Settings

Answer = TypeVar("Answer")


class Held(NamedTuple, Generic[Answer]):
    """An answer, to which question, and when it was asked."""

    at: float
    question: Hashable
    answer: Answer


# NB: a pass that comes a little early, as passes at a poll interval do, asks again.
SHARE = 0.8
"""Of the poll interval: how long an answer counts."""

Results = dict[str, Held[Answer]]
"""By the FineTuneJob's uid."""


async def recent(
    results: Results[Answer],
    uid: str,
    question: Hashable,
    ask: Callable[[], Awaitable[Answer]],
    *,
    clock: Callable[[], float],
    settings: Settings,
) -> Answer:
    """The answer to a question about a job, at most a poll interval old."""
    now, held = clock(), results.get(uid)
    if held and held.question == question and now - held.at < settings.poll_seconds * SHARE:
        return held.answer
    answer = await ask()
    results[uid] = Held(now, question, answer)
    return answer


class _Asked(NamedTuple, Generic[Answer]):
    """When a question was asked, and what gets the answer."""

    at: float
    answer: asyncio.Task[Answer]


@dataclass
class Shared(Generic[Answer]):
    """Answers to questions that several jobs have: each is asked once in a while, also by passes at the same time.

    Attributes:
        clock: monotonic seconds.
        seconds: how long an answer counts, from when it was asked for.
    """

    clock: Callable[[], float]
    seconds: float
    _asked: dict[Hashable, _Asked[Answer]] = field(default_factory=dict)

    async def answer(
        self, question: Hashable, ask: Callable[[], Coroutine[object, object, Answer]]
    ) -> Answer:
        """The answer to a question. Those that wait for one get it however long it takes.

        Raises:
            Exception: what `ask` raises, in all passes that wait for it; the next one asks again.
        """
        now = self.clock()
        oldest = now - self.seconds
        self._asked = {
            key: asked for key, asked in self._asked.items() if asked.at > oldest or not asked.answer.done()
        }
        asked = self._asked.get(question)
        if asked is None:
            asked = self._asked[question] = _Asked(now, asyncio.create_task(ask()))
        try:
            return await asyncio.shield(asked.answer)
        except Exception:
            self._asked.pop(question, None)
            raise
