"""How many reads run at a time: of all namespaces, of one, and of one to a server."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from finetune_operator.finetunejob.observe.request_limits import RequestLimits

# The limits, who wants to read in this order (namespace and server), and how many of each do.
CASES: dict[str, tuple[RequestLimits, list[tuple[str, str]], dict[tuple[str, str], int]]] = {
    "a server": (RequestLimits(9, 9, 2), [("a", "git")] * 4, {("a", "git"): 2}),
    "a server of two namespaces": (
        RequestLimits(9, 9, 2),
        [("a", "git")] * 4 + [("b", "git")] * 4,
        {("a", "git"): 2, ("b", "git"): 2},
    ),
    "another server beside one that does not answer": (
        RequestLimits(9, 3, 2),
        [("a", "git")] * 9 + [("a", "hub")] * 9,
        {("a", "git"): 2, ("a", "hub"): 1},
    ),
    "all namespaces": (
        RequestLimits(3, 2, 2),
        [("a", "git")] * 2 + [("b", "git")] * 2,
        {("a", "git"): 2, ("b", "git"): 1},
    ),
    "threads": (
        RequestLimits.of_threads(4),
        [("a", "mlflow")] * 9 + [("b", "mlflow")] * 9,
        {("a", "mlflow"): 2, ("b", "mlflow"): 2},
    ),
    "one thread": (RequestLimits.of_threads(1), [("a", "mlflow")] * 2, {("a", "mlflow"): 1}),
}


@pytest.mark.parametrize(("limits", "readers", "expected"), CASES.values(), ids=CASES)
async def test_few_reads_run_at_a_time_and_the_others_after_them(
    limits: RequestLimits, readers: list[tuple[str, str]], expected: dict[tuple[str, str], int]
) -> None:
    running, ended = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    may_end = asyncio.Event()

    async def read(namespace: str, server: str) -> None:
        async with limits.turn(namespace, server):
            running[namespace, server] += 1
            await may_end.wait()
        ended[namespace, server] += 1

    reads = [asyncio.create_task(read(*reader)) for reader in readers]
    for _ in range(5):
        await asyncio.sleep(0)
    assert running == expected
    may_end.set()
    await asyncio.gather(*reads)
    assert ended == Counter(readers)
