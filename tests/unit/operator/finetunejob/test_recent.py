"""Answers about jobs: asked for once in a poll interval, and again for another question."""

from __future__ import annotations

import dataclasses

from finetune_operator.finetunejob.recent import Results, recent
from worlds.memory.decisions import SETTINGS


async def test_a_question_is_asked_again_when_it_is_another_or_old() -> None:
    settings = dataclasses.replace(SETTINGS, poll_seconds=5.0)
    results: Results[int] = {}
    asked: list[tuple[float, str, str]] = []
    now = [0.0]

    async def about(uid: str, question: str) -> int:
        async def ask() -> int:
            asked.append((now[0], uid, question))
            return len(asked)

        return await recent(results, uid, question, ask, clock=lambda: now[0], settings=settings)

    found = []
    for now[0], uid, question in (
        (0.0, "a", "run 1"),
        (1.0, "b", "run 1"),
        (3.9, "a", "run 1"),
        (4.0, "a", "run 1"),
        (4.1, "a", "run 2"),
    ):
        found.append(await about(uid, question))
    assert found == [1, 2, 1, 3, 4]
    assert asked == [(0.0, "a", "run 1"), (1.0, "b", "run 1"), (4.0, "a", "run 1"), (4.1, "a", "run 2")]
