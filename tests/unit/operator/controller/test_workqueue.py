"""The queue of keys."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import NamedTuple

import pytest

from finetune_operator.controller.workqueue import WorkQueue, work


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> WorkQueue:
    return WorkQueue(clock=clock)


async def take_all(queue: WorkQueue) -> list[str]:
    """Every key that is ready, each handled at once."""
    queue._move_due()
    keys = []
    while len(queue):
        keys.append(await queue.take())
        queue.done(keys[-1])
    return keys


async def test_a_key_is_in_it_once_and_keys_keep_their_order(queue: WorkQueue) -> None:
    for key in ("b", "a", "b", "c", "a"):
        queue.add(key)
    assert len(queue) == 3
    assert await take_all(queue) == ["b", "a", "c"]


async def test_news_come_before_routine_which_gets_every_fourth_turn(queue: WorkQueue) -> None:
    for number in range(4):
        queue.add(f"progress-{number}", is_routine=True)
    for number in range(8):
        queue.add(f"failure-{number}")
    assert len(queue) == 12
    assert await take_all(queue) == [
        *("failure-0", "failure-1", "failure-2", "progress-0"),
        *("failure-3", "failure-4", "failure-5", "progress-1"),
        *("failure-6", "failure-7", "progress-2", "progress-3"),
    ]


async def test_a_routine_key_with_news_moves_ahead_and_is_handled_once(queue: WorkQueue) -> None:
    for key in ("a", "b", "c"):
        queue.add(key, is_routine=True)
    queue.add("c")
    queue.add("c", is_routine=True)
    assert (len(queue), await take_all(queue)) == (3, ["c", "a", "b"])
    queue.add("b", is_routine=True)
    assert await take_all(queue) == ["b"]


async def test_news_about_a_key_that_is_handled_make_it_no_routine(queue: WorkQueue) -> None:
    for added_as_routine in ((True, False), (False, True), (True, True)):
        queue.add("a")
        key = await queue.take()
        for is_routine in added_as_routine:
            queue.add("a", is_routine=is_routine)
        queue.add("b", is_routine=True)
        queue.done(key)
        first = "b" if all(added_as_routine) else "a"
        assert (await take_all(queue))[0] == first


# The delays of a key: seconds, and whether each is routine. The key is then added after the shorter delay, routine only if both are.
DELAYS = {
    "routine": ((5, True), (9, True), True),
    "news before routine": ((5, False), (9, True), False),
    "news after routine": ((9, False), (5, True), False),
}


@pytest.mark.parametrize(("first", "second", "is_routine"), DELAYS.values(), ids=DELAYS)
@pytest.mark.parametrize("order", [1, -1])
async def test_a_delay_is_routine_only_if_all_delays_of_the_key_are(
    queue: WorkQueue,
    clock: Clock,
    first: tuple[float, bool],
    second: tuple[float, bool],
    *,
    is_routine: bool,
    order: int,
) -> None:
    for seconds, delay_is_routine in (first, second)[::order]:
        queue.add_after("a", seconds, is_routine=delay_is_routine)
    clock.now += 5
    queue._move_due()
    assert queue._queued == {"a": is_routine}


async def test_a_key_that_is_added_while_it_is_handled_is_handled_once_more(queue: WorkQueue) -> None:
    queue.add("a")
    key = await queue.take()
    queue.add("a")
    queue.add("a")
    assert len(queue) == 0
    queue.done(key)
    assert await take_all(queue) == ["a"]


async def test_a_delay_passes(queue: WorkQueue, clock: Clock) -> None:
    queue.add_after("a", 5)
    assert await take_all(queue) == []
    clock.now += 4.9
    assert await take_all(queue) == []
    clock.now += 0.1
    assert await take_all(queue) == ["a"]
    clock.now += 100
    assert await take_all(queue) == []


async def test_the_earliest_of_several_delays_counts_once(queue: WorkQueue, clock: Clock) -> None:
    for seconds in (60, 5, 30):
        queue.add_after("a", seconds)
    clock.now += 5
    assert await take_all(queue) == ["a"]
    clock.now += 100
    assert await take_all(queue) == []


async def test_a_delay_that_ends_while_the_key_is_handled_is_not_lost(queue: WorkQueue, clock: Clock) -> None:
    queue.add("a")
    key = await queue.take()
    queue.add_after("a", 1)
    clock.now += 1
    queue._move_due()
    queue.done(key)
    assert await take_all(queue) == ["a"]


async def test_a_delay_ends_with_the_next_pass_which_decides_anew(queue: WorkQueue, clock: Clock) -> None:
    queue.add_after("a", 5)
    queue.add("a")
    assert await take_all(queue) == ["a"]
    clock.now += 6
    assert await take_all(queue) == []
    queue.add("a")
    key = await queue.take()
    queue.add_after("a", 5)
    queue.done(key)
    clock.now += 6
    assert await take_all(queue) == ["a"]


async def test_a_dropped_key_does_not_come_back(queue: WorkQueue, clock: Clock) -> None:
    queue.retry("a")
    queue.drop("a")
    clock.now += 1000
    assert await take_all(queue) == []


def test_the_delay_grows_with_each_failure_and_starts_anew_after_a_success(
    queue: WorkQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: (low + high) / 2)
    assert [queue.retry("a") for _ in range(10)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30]
    assert queue.retry("b") == 0.5
    queue.forget("a")
    assert queue.retry("a") == 0.5


def test_delays_are_spread(queue: WorkQueue) -> None:
    delays = [queue.retry(str(number)) for number in range(100)]
    assert 0.375 <= min(delays) < 0.45
    assert 0.55 < max(delays) <= 0.625


async def test_how_long_the_oldest_has_waited(queue: WorkQueue, clock: Clock) -> None:
    assert queue.oldest_age_seconds() == 0
    queue.add("a")
    clock.now += 3
    queue.add("b")
    queue.add("a")
    clock.now += 2
    assert queue.oldest_age_seconds() == 5
    await queue.take()
    assert queue.oldest_age_seconds() == 2


def test_a_server_that_asks_for_time_gets_it_and_the_keys_are_spread(queue: WorkQueue) -> None:
    delays = [queue.retry(str(number), at_least_seconds=10) for number in range(100)]
    assert 10 <= min(delays) < 10.5
    assert 12 < max(delays) <= 12.5


def test_a_scrape_in_another_thread_reads_the_age_while_keys_come_and_go(
    queue: WorkQueue, clock: Clock
) -> None:
    queue.add("a")
    clock.now += 5
    queue.add("b")

    def read_clock() -> float:
        """The time. Another thread adds a key meanwhile, as it may between any two steps in Python."""
        queue._added_at[str(len(queue._added_at))] = clock.now
        return clock.now

    queue.clock = read_clock
    assert queue.oldest_age_seconds() == 5


async def test_a_waiting_worker_is_woken_by_a_key(queue: WorkQueue) -> None:
    waiting = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.add("a")
    assert await asyncio.wait_for(waiting, 5) == "a"


async def test_a_waiting_worker_is_woken_by_a_delay() -> None:
    queue = WorkQueue(clock=asyncio.get_running_loop().time)
    waiting = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.add_after("late", 60)
    await asyncio.sleep(0)
    queue.add_after("early", 0.01)
    assert await asyncio.wait_for(waiting, 5) == "early"


async def test_no_key_is_ever_with_two_workers(queue: WorkQueue) -> None:
    at_work: Counter[str] = Counter()
    handled: Counter[str] = Counter()
    dice = random.Random(7)  # noqa: S311
    enough = asyncio.Event()

    async def handle(key: str) -> None:
        at_work[key] += 1
        assert at_work[key] == 1
        for _ in range(dice.randrange(3)):
            await asyncio.sleep(0)
        for _ in range(2):
            queue.add(dice.choice("abcd"))
        handled[key] += 1
        if handled.total() >= 400:
            enough.set()
        at_work[key] -= 1

    async with asyncio.TaskGroup() as group:
        workers = [group.create_task(work(queue, handle)) for _ in range(4)]
        for key in "abcd":
            queue.add(key)
        async with asyncio.timeout(10):
            await enough.wait()
        for worker in workers:
            worker.cancel()
    assert set(handled) == set("abcd")


async def test_a_key_is_released_when_its_worker_is_stopped(queue: WorkQueue) -> None:
    started = asyncio.Event()

    async def handle(_key: str) -> None:
        started.set()
        await asyncio.Event().wait()

    queue.add("a")
    worker = asyncio.create_task(work(queue, handle))
    await started.wait()
    worker.cancel()
    with pytest.raises(asyncio.CancelledError):
        await worker
    queue.add("a")
    assert await take_all(queue) == ["a"]


async def test_a_closed_queue_drops_what_waits_and_ends_what_was_taken() -> None:
    queue = WorkQueue(clock=lambda: 0.0)
    for key in ("a", "b"):
        queue.add(key)
    assert await queue.take() == "a"
    queue.add("a")
    queue.add_after("c", 1)
    queue.close()
    queue.add("d")
    queue.add_after("e", 1)
    idle = asyncio.create_task(queue.wait_until_idle())
    await asyncio.sleep(0)
    assert (len(queue), queue.oldest_age_seconds(), idle.done()) == (0, 0.0, False)
    queue.done("a")
    await idle
    assert len(queue) == 0


class Turns(NamedTuple):
    """Keys that are added, and the order in which a free worker takes those that wait, one after the other.

    Attributes:
        earlier: news that are added first.
        handled: how many of the earlier keys are taken before the others are added. Their passes do not end.
        news: added next.
        routine: added last.
    """

    workers: int
    earlier: tuple[str, ...]
    handled: int
    news: tuple[str, ...]
    routine: tuple[str, ...]
    order: tuple[str, ...]


# The first letter is the namespace of the key.
TURNS = {
    "one namespace keeps the order of its keys": Turns(4, (), 0, ("a3", "a1", "a2"), (), ("a3", "a1", "a2")),
    "namespaces take turns": Turns(
        4, (), 0, ("a1", "a2", "a3", "b1", "b2", "c1"), (), ("a1", "b1", "c1", "a2", "b2", "a3")
    ),
    "a namespace that waits first comes before those that had a turn": Turns(
        8, ("a0", "c0", "a1", "a2", "c1"), 2, ("b1",), (), ("b1", "a1", "c1", "a2")
    ),
    "the namespaces of routine keys take turns too": Turns(
        4, (), 0, (), ("a1", "a2", "a3", "b1"), ("a1", "b1", "a2", "a3")
    ),
    "news of one namespace come before routine of another": Turns(
        4, (), 0, ("b1", "b2"), ("a1", "a2"), ("b1", "b2", "a1", "a2")
    ),
    "routine of one namespace has every fourth turn beside news of another": Turns(
        4, (), 0, ("a1", "a2", "a3", "a4", "a5"), ("b1", "b2"), ("a1", "a2", "a3", "b1", "a4", "a5", "b2")
    ),
    "with half of the workers at work for a namespace the others come first": Turns(
        4, ("a8", "a9"), 2, ("a1", "a2", "b1", "b2"), (), ("b1", "b2", "a1", "a2")
    ),
    "half of an odd number is rounded up": Turns(
        5, ("a8", "a9"), 2, ("a1", "a2", "b1", "b2"), (), ("a1", "b1", "a2", "b2")
    ),
    "with half of the workers at work for a namespace even routine of the others comes first": Turns(
        4, ("a8", "a9"), 2, ("a1", "a2"), ("b1", "b2"), ("b1", "b2", "a1", "a2")
    ),
    "a namespace alone may use all workers": Turns(4, ("a7", "a8", "a9"), 3, ("a1", "a2"), (), ("a1", "a2")),
}


@pytest.mark.parametrize("turns", TURNS.values(), ids=TURNS)
async def test_namespaces_take_turns(clock: Clock, turns: Turns) -> None:
    queue = WorkQueue(clock=clock, workers=turns.workers)
    for name in turns.earlier:
        queue.add(f"{name[0]}/{name}")
    for _ in range(turns.handled):
        await queue.take()
    queue._taken = 0
    for name in turns.news:
        queue.add(f"{name[0]}/{name}")
    for name in turns.routine:
        queue.add(f"{name[0]}/{name}", is_routine=True)
    assert tuple(key[2:] for key in await take_all(queue)) == turns.order


async def test_a_namespace_that_comes_back_at_once_waits_for_its_turn(queue: WorkQueue) -> None:
    for name in ("a1", "a2", "a3"):
        queue.add(f"a/{name}")
    taken = []
    for _ in range(6):
        queue.add("b/1")
        taken.append(await queue.take())
        queue.done(taken[-1])
    assert taken == ["a/a1", "b/1", "a/a2", "b/1", "a/a3", "b/1"]


async def test_the_share_of_a_namespace_is_free_again_when_its_passes_end(clock: Clock) -> None:
    queue = WorkQueue(clock=clock, workers=2)
    for key in ("a/1", "a/2", "a/3", "b/1", "b/2"):
        queue.add(key)
    assert [await queue.take(), await queue.take()] == ["a/1", "b/1"]
    queue.done("a/1")
    queue.done("b/1")
    assert await take_all(queue) == ["a/2", "b/2", "a/3"]


# By the number of workers: how many keys of the crowded namespace are taken until the key of the other one is. With a single worker, the
# pass that is at work and those of the fourth turn.
@pytest.mark.parametrize(
    ("workers", "is_routine", "passes"), [(1, False, 1), (1, True, 3), (2, True, 1), (16, True, 1)]
)
async def test_500_jobs_of_one_namespace_delay_a_job_of_another_by_one_pass(
    clock: Clock, workers: int, passes: int, *, is_routine: bool
) -> None:
    """Each pass of the crowded namespace lasts until the test ends it."""
    queue = WorkQueue(clock=clock, workers=workers)
    for number in range(500):
        queue.add(f"crowded/{number}")
    running = [await queue.take() for _ in range(workers)]
    queue.add("other/job", is_routine=is_routine)
    ended = 0
    while True:
        queue.done(running.pop(0))
        ended += 1
        running.append(await queue.take())
        if running[-1] == "other/job":
            break
    assert (ended, len(queue)) == (passes, 500 - workers - passes + 1)


async def test_what_is_remembered_about_namespaces_goes_when_no_key_waits(queue: WorkQueue) -> None:
    for number in range(100):
        queue.add(f"team-{number}/job")
    queue.add("team-7/other", is_routine=True)
    queue.add("team-7/other")
    assert len(await take_all(queue)) == 101
    assert queue == WorkQueue(clock=queue.clock, _taken=101, _wake=queue._wake, _key_done=queue._key_done)
