"""Answers of servers about FineTuneJobs, each asked for once in a poll interval."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from finetune_operator.settings import Settings

Answer = TypeVar("Answer")


class Held(NamedTuple, Generic[Answer]):
    """An answer, to which question, and when it was asked."""

    at: float
    question: Hashable
    answer: Answer


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
    # NB: a pass that comes a little early, as passes at a poll interval do, asks again.
    if held and held.question == question and now - held.at < settings.poll_seconds * 0.8:
        return held.answer
    answer = await ask()
    results[uid] = Held(now, question, answer)
    return answer
