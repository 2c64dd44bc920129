"""Questions that several jobs have are asked once in an interval."""

from __future__ import annotations

import asyncio

from finetune_operator.finetunejob.observe.shared_answers import SharedAnswers


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
