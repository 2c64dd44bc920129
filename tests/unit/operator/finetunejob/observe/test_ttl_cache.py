"""Answers about jobs: asked for once in a poll interval, and again for another question."""

from __future__ import annotations

import asyncio
import dataclasses

from finetune_operator.finetunejob.observe.ttl_cache import Results, SharedAnswers, get_recent
from worlds.memory.decisions import SETTINGS


async def test_a_question_is_asked_again_when_it_is_another_or_old() -> None:
    settings = dataclasses.replace(SETTINGS, poll_seconds=5.0)
    results: Results[int] = {}
    calls: list[tuple[float, str, str]] = []
    now = [0.0]

    async def about(uid: str, question: str) -> int:
        async def ask() -> int:
            calls.append((now[0], uid, question))
            return len(calls)

        return await get_recent(results, uid, question, ask, clock=lambda: now[0], settings=settings)

    answers = []
    for now[0], uid, question in (
        (0.0, "a", "run 1"),
        (1.0, "b", "run 1"),
        (3.9, "a", "run 1"),
        (4.0, "a", "run 1"),
        (4.1, "a", "run 2"),
    ):
        answers.append(await about(uid, question))
    assert answers == [1, 2, 1, 3, 4]
    assert calls == [(0.0, "a", "run 1"), (1.0, "b", "run 1"), (4.0, "a", "run 1"), (4.1, "a", "run 2")]


async def test_a_question_of_several_jobs_is_asked_once_also_at_the_same_time() -> None:
    now, calls = [0.0], []
    shared = SharedAnswers[int](lambda: now[0], 4.0)

    async def ask() -> int:
        calls.append(now[0])
        await asyncio.sleep(0)
        return len(calls)

    assert await asyncio.gather(*(shared.answer("a", ask) for _ in range(3))) == [1, 1, 1]
    now[0] = 3.9
    assert (await shared.answer("a", ask), await shared.answer("b", ask)) == (1, 2)
    now[0] = 4.0
    assert (await shared.answer("a", ask), calls) == (3, [0.0, 3.9, 4.0])


async def test_answers_that_nobody_asks_for_any_more_are_not_kept() -> None:
    now = [0.0]
    shared = SharedAnswers[int](lambda: now[0], 4.0)

    async def ask() -> int:
        return 1

    await shared.answer("a", ask)
    now[0] = 4.0
    await shared.answer("b", ask)
    assert list(shared._requests) == ["b"]


async def test_an_error_is_not_kept() -> None:
    shared = SharedAnswers[int](lambda: 0, 4.0)

    async def fails() -> int:
        raise ValueError("no")

    async def ask() -> int:
        return 1

    answers = await asyncio.gather(*(shared.answer("a", fails) for _ in range(2)), return_exceptions=True)
    assert [str(item) for item in answers] == ["no", "no"]
    assert await shared.answer("a", ask) == 1
