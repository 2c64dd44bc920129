"""Servers are read in the background: a pass gets the last answer, and waits only briefly for a new answer."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest

from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.observe.background_reads import BackgroundReads, MaxAge, ReadPace
from finetune_operator.finetunejob.observe.request_limits import RequestLimits
from fixtures.operator_in_memory.decisions import ftj

POLLED = MaxAge(fresh=4.0, usable=15.0)


@dataclass
class World:
    """The background reads of a server that answers when the test calls `answer`, and their clock.

    Attributes:
        patience: how long a pass waits for an answer, in seconds of the real clock.
        questions: the questions that the server received.
        ended_questions: the questions that the server answered.
    """

    patience: float = 60.0
    clock: float = 0.0
    answers_at_once: bool = True
    max_age: MaxAge = POLLED
    takes_turns: bool = True
    threads: int = 4
    questions: list[str] = field(default_factory=list)
    ended_questions: list[str] = field(default_factory=list)
    woken_jobs: list[str] = field(default_factory=list)
    routinely_woken_jobs: list[str] = field(default_factory=list)
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.may_answer = asyncio.Event()
        limits = RequestLimits.of_threads(self.threads)
        self.pace = ReadPace(lambda: self.clock, self._wake, limits, self.patience)
        self.reads = BackgroundReads[str](self.pace, self.max_age, self.takes_turns)

    def _wake(self, key: str, *, is_routine: bool) -> None:
        (self.routinely_woken_jobs if is_routine else self.woken_jobs).append(key)

    async def read(
        self, question: str = "run 1", job: FineTuneJob | None = None, server: str = "mlflow"
    ) -> str | None:
        async def ask() -> str:
            self.questions.append(question)
            number = len(self.questions)
            if not self.answers_at_once:
                await self.may_answer.wait()
            self.ended_questions.append(question)
            if self.error:
                raise self.error
            return f"{question}: answer {number}"

        return await self.reads.read(job or ftj(), server, question, ask)

    async def answer(self) -> None:
        """Let the server answer all questions that it received."""
        self.may_answer.set()
        for _ in range(5):
            await asyncio.sleep(0)
        self.may_answer.clear()


def slow_world(**fields: Any) -> World:
    return World(patience=0.001, answers_at_once=False, **fields)


def another_job(number: int = 2, namespace: str = "team") -> FineTuneJob:
    return dataclasses.replace(ftj(), uid=f"u{number}", name=f"tune-{number}", namespace=namespace)


async def test_the_pass_that_asks_gets_the_answer_of_a_fast_server() -> None:
    world, answers = World(), []
    for world.clock, question in ((0.0, "run 1"), (3.9, "run 1"), (4.0, "run 1"), (4.1, "run 2")):
        answers.append(await world.read(question))
    assert answers == ["run 1: answer 1", "run 1: answer 1", "run 1: answer 2", "run 2: answer 3"]
    assert world.woken_jobs == []


async def test_the_answer_of_a_slow_server_queues_another_pass() -> None:
    world = slow_world()
    assert (await world.read(), world.woken_jobs) == (None, [])
    # Until the answer arrives, other passes send no request.
    assert await world.read() is None
    await world.answer()
    assert world.woken_jobs == ["team/tune"]
    assert await world.read() == "run 1: answer 1"
    assert world.questions == ["run 1"]


async def test_an_old_answer_to_the_same_question_is_used_while_a_new_one_is_read() -> None:
    world = World(patience=0.001)
    first = await world.read()
    world.clock, world.answers_at_once = 10.0, False
    assert await world.read() == first
    assert await world.read("run 2") is None
    await world.answer()
    # The read of the second question replaced the read of the first question.
    assert (await world.read("run 2"), world.questions) == ("run 2: answer 3", ["run 1", "run 1", "run 2"])


async def test_a_later_answer_to_the_same_question_is_routine() -> None:
    world = slow_world()
    for question, clock in (("run 1", 0.0), ("run 1", 10.0), ("run 2", 10.0)):
        world.clock = clock
        await world.read(question)
        await world.answer()
        await world.read(question)
    assert (world.woken_jobs, world.routinely_woken_jobs) == (["team/tune"] * 2, ["team/tune"])


async def test_a_read_that_began_before_a_write_is_repeated() -> None:
    world = slow_world()
    await world.read()
    world.reads.forget(ftj())
    await world.answer()
    assert (await world.read(), world.woken_jobs) == (None, [])
    await world.answer()
    assert await world.read() == "run 1: answer 2"


async def test_the_read_of_a_deleted_job_can_be_canceled() -> None:
    world = slow_world()
    await world.read()
    world.reads.forget(ftj(), cancel=True)
    await world.answer()
    assert (world.ended_questions, world.woken_jobs) == ([], [])


async def test_one_pass_waits_for_a_slow_server_and_the_others_do_not() -> None:
    world = World(patience=30.0, answers_at_once=False)
    first = asyncio.create_task(world.read())
    await asyncio.sleep(0)
    world.pace.patience_seconds = 0.001
    await world.read(job=another_job())
    # A pass that waits from now on makes this test last a minute.
    world.pace.patience_seconds = 60.0
    assert await world.read(job=another_job(3)) is None
    first.cancel()
    # A pass still waits for another server.
    world.answers_at_once = True
    await world.answer()
    assert await world.read(job=another_job(4), server="another") == "run 1: answer 4"


async def test_an_answer_that_is_too_old_is_not_used() -> None:
    world = World(patience=0.001)
    first = await world.read()
    world.answers_at_once, answers = False, []
    for world.clock in (14.9, 15.0):
        answers.append(await world.read())
    assert answers == [first, None]


async def test_a_server_that_is_always_slow_causes_no_endless_passes() -> None:
    world = slow_world(max_age=MaxAge(fresh=0.0, usable=15.0))
    await world.read()
    world.clock = 10.0
    await world.answer()
    # The queued pass gets the answer, and sends no request.
    assert (world.woken_jobs, await world.read(), world.questions) == (
        ["team/tune"],
        "run 1: answer 1",
        ["run 1"],
    )
    # The next pass, at the poll interval, sends one.
    world.clock = 15.0
    await world.read()
    assert world.questions == ["run 1", "run 1"]


async def test_a_job_is_queued_once_while_another_waits_for_the_same_server() -> None:
    world = slow_world(max_age=MaxAge(fresh=0.0, usable=15.0))
    await world.read()
    world.answers_at_once = True
    assert await world.read(job=another_job()) is None
    for _ in range(5):
        await asyncio.sleep(0)
    assert world.woken_jobs == ["team/tune-2"]
    assert await world.read(job=another_job()) == "run 1: answer 2"
    await asyncio.sleep(0)
    assert world.woken_jobs == ["team/tune-2"]


async def test_a_namespace_uses_at_most_half_of_the_concurrent_reads() -> None:
    world = slow_world()
    for number in range(5):
        await world.read(job=another_job(number))
    await asyncio.sleep(0)
    assert len(world.questions) == 2
    for number in range(5, 10):
        await world.read(job=another_job(number, "other"))
    await asyncio.sleep(0)
    assert len(world.questions) == 4
    world.answers_at_once = True
    await world.answer()
    await world.answer()
    assert len(world.questions) == 10


async def test_the_age_of_an_answer_does_not_include_the_wait_for_a_thread() -> None:
    world = slow_world(threads=1)
    await world.read()
    await world.read(job=another_job())
    world.clock = 10.0
    await world.answer()
    await world.answer()
    assert await world.read(job=another_job()) == "run 1: answer 2"
    world.clock = 13.9
    assert await world.read(job=another_job()) == "run 1: answer 2"
    assert len(world.questions) == 2


async def test_reads_that_wait_for_a_shared_answer_are_not_limited() -> None:
    world = slow_world(takes_turns=False)
    for number in range(5):
        await world.read(job=another_job(number))
    await asyncio.sleep(0)
    assert len(world.questions) == 5


async def test_an_error_is_raised_in_the_pass_that_waits() -> None:
    world = World(error=ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await world.read()
    world.error = None
    assert await world.read() == "run 1: answer 2"


async def test_an_error_that_no_pass_waited_for_is_raised_in_the_next_pass() -> None:
    world = slow_world(error=ValueError("no"))
    await world.read()
    await world.answer()
    assert world.woken_jobs == ["team/tune"]
    with pytest.raises(ValueError, match="no"):
        await world.read()
    assert await world.read() is None
    assert len(world.questions) == 2


# Whether the answer is complete, the resource version of the job in the next pass, the time of that pass, and whether it gets the answer.
OLD_ANSWERS: dict[str, tuple[bool, str, float, bool]] = {
    "it is complete": (True, "1", 89.9, True),
    "something is missing in it": (False, "1", 89.9, False),
    "the job has changed": (True, "2", 89.9, False),
    "it is very old": (True, "1", 90.0, False),
}


@pytest.mark.parametrize(
    ("is_complete", "version", "clock", "is_used"), OLD_ANSWERS.values(), ids=OLD_ANSWERS
)
async def test_a_complete_answer_is_used_for_longer_while_the_job_does_not_change(
    is_complete: bool, version: str, clock: float, is_used: bool
) -> None:
    world = World(patience=0.001)
    world.reads.is_complete = lambda question, answer: is_complete and (question, answer) == ("run 1", first)
    first = await world.read()
    world.answers_at_once, world.clock = False, clock
    answer = await world.read(job=dataclasses.replace(ftj(), version=version))
    assert answer == (first if is_used else None)


async def test_a_late_answer_that_the_passes_know_brings_no_pass() -> None:
    world = World(patience=0.001)

    async def answer_late(text: str) -> str | None:
        """The answer of a pass, and then a late answer of the server."""

        async def ask() -> str:
            await world.may_answer.wait()
            return text

        known = await world.reads.read(ftj(), "mlflow", "run 1", ask)
        await world.answer()
        return known

    assert await answer_late("a") is None
    assert world.woken_jobs == ["team/tune"]
    assert await answer_late("b") == "a"
    for world.clock, text in ((5.0, "a"), (10.0, "a"), (14.5, "b")):
        assert await answer_late(text) == "a"
    assert (world.woken_jobs, world.routinely_woken_jobs) == (["team/tune"], ["team/tune"])


async def test_an_answer_like_one_that_was_too_old_for_a_pass_brings_a_pass() -> None:
    world = slow_world()
    reads = world.reads

    async def ask() -> str:
        await world.may_answer.wait()
        return "running"

    await reads.read(ftj(), "mlflow", "run 1", ask)
    await world.answer()
    assert await reads.read(ftj(), "mlflow", "run 1", ask) == "running"
    world.woken_jobs.clear()
    world.clock = 100.0
    assert await reads.read(ftj(), "mlflow", "run 1", ask) is None
    await world.answer()
    assert world.woken_jobs == ["team/tune"]


async def test_the_more_jobs_are_read_the_older_an_answer_may_be() -> None:
    world = World()
    for number in range(1000):
        await world.read(job=another_job(number))
    questions = len(world.questions)
    world.clock = 9.9
    await world.read(job=another_job(7))
    assert len(world.questions) == questions
    world.clock = 10.0
    await world.read(job=another_job(7))
    assert len(world.questions) == questions + 1
