"""Writes to servers go on in the background: how long a pass waits for one, and which pass gets its result."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass, field
from functools import partial

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.finetunejob.background_writes import BackgroundWrites
from finetune_operator.finetunejob.decision import Action, ActionResult, CancelRun, EnsureRun, FinishRun
from finetune_operator.finetunejob.model import FineTuneJob
from finetune_operator.finetunejob.observe.background_reads import ReadPace
from finetune_operator.finetunejob.observe.request_limits import RequestLimits
from finetune_operator.mlflow.model import Run
from fixtures.operator_in_memory.decisions import ftj

CREATE = EnsureRun("team", "tune", {"b": "2", "a": "1"})
FINISH = FinishRun("r1", "FAILED")
TIMEOUT_SECONDS = 10.0


@dataclass
class World:
    """The writes to a server that answers when it may, and the passes that they queue.

    Attributes:
        actions: the actions that were begun.
        error: the answer, in place of a run.
    """

    seconds: float = 0.0
    actions: list[Action] = field(default_factory=list)
    error: Exception | None = None
    woken: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        threads = RequestLimits.of_threads(4)
        self.pace = ReadPace(lambda: self.seconds, self._wake, threads, patience_seconds=0.01)
        self.writes = BackgroundWrites(self.pace, threads)

    def _wake(self, key: str, *, is_routine: bool) -> None:
        assert not is_routine
        self.woken.put_nowait(key)

    async def write(self, action: Action = CREATE, job: FineTuneJob | None = None) -> ActionResult:
        return await self.writes.carry_out(job or ftj(), "mlflow", action, partial(self._act, action))

    async def answer(self) -> None:
        """Answer, and wait for the pass that this queues."""
        self.may_answer.set()
        assert await asyncio.wait_for(self.woken.get(), TIMEOUT_SECONDS) == "team/tune"

    async def _act(self, action: Action) -> ActionResult:
        self.actions.append(action)
        number = len(self.actions)
        await self.may_answer.wait()
        if self.error:
            raise self.error
        return done(number, action)


def done(number: int, action: Action = CREATE) -> ActionResult:
    return ActionResult(action, run=Run(f"run-{number}", "e1", "RUNNING"))


def pending(seconds: float = 0.0, action: Action = CREATE) -> ActionResult:
    return ActionResult(action, pending_seconds=seconds)


async def test_a_pass_gets_the_result_of_a_fast_server() -> None:
    world = World()
    world.may_answer.set()
    world.pace.patience_seconds = TIMEOUT_SECONDS
    # A pass that requests the action again, for example because a run was deleted, gets another result.
    assert [await world.write() for _ in range(2)] == [done(1), done(2)]
    assert world.woken.empty()


async def test_a_later_pass_gets_the_result_of_a_slow_server() -> None:
    world = World()
    for world.seconds in (0.0, 3.0):
        assert await world.write() == pending(world.seconds)
    await world.answer()
    assert await world.write() == done(1)


async def test_a_later_pass_gets_the_error_of_a_slow_server_once() -> None:
    world = World()
    assert await world.write() == pending()
    world.error = ExternalError(Problem(ConditionReason.MLFLOW_UNREACHABLE, "away"))
    await world.answer()
    with pytest.raises(ExternalError, match="away"):
        await world.write()
    world.error = None
    world.pace.patience_seconds = TIMEOUT_SECONDS
    assert await world.write() == done(2)


async def test_a_run_with_other_tags_is_the_same_run() -> None:
    """For example, the uid of the namespace is a tag only if the namespace can be read."""
    world = World()
    other_tags = dataclasses.replace(CREATE, tags={"b": "2"})
    assert [await world.write(), await world.write(other_tags)] == [pending(), pending(0.0, other_tags)]
    await world.answer()
    assert await world.write(other_tags) == done(1)


async def test_actions_of_a_job_do_not_overlap() -> None:
    """A run that is canceled while it is being submitted would not be found, and would go on."""
    world = World()
    cancel = CancelRun("name")
    assert [await world.write(), await world.write(cancel)] == [pending(), pending(0.0, cancel)]
    assert world.actions == [CREATE]
    await world.answer()
    world.pace.patience_seconds = TIMEOUT_SECONDS
    assert await world.write(cancel) == done(2, cancel)


async def test_a_result_that_no_pass_requested_in_time_is_discarded() -> None:
    """A run may have been recorded without it, and deleted long afterwards: the next run must be another one."""
    world = World()
    assert await world.write() == pending()
    await world.answer()
    world.seconds = 60.0
    world.pace.patience_seconds = TIMEOUT_SECONDS
    assert await world.write() == done(2)


async def test_a_result_is_kept_for_the_time_of_a_slow_pass() -> None:
    world = World()
    assert await world.write() == pending()
    world.seconds = 100.0
    await world.answer()
    world.seconds = 159.0
    assert await world.write() == done(1)


async def test_while_a_server_is_slow_no_other_pass_waits_for_it() -> None:
    world = World()
    assert await world.write() == pending()
    # With this patience, a pass that waited would end the test.
    world.pace.patience_seconds = 2 * TIMEOUT_SECONDS
    other_job = dataclasses.replace(ftj(), name="other", uid="u2")
    async with asyncio.timeout(TIMEOUT_SECONDS / 2):
        assert await world.write(FINISH, other_job) == pending(0.0, FINISH)


async def test_nothing_is_kept_of_jobs_that_do_not_return() -> None:
    world = World()
    deleted_job = dataclasses.replace(ftj(), name="deleted", uid="u2")
    assert [await world.write(), await world.write(CREATE, deleted_job)] == [pending(), pending()]
    world.writes.forget(deleted_job)
    world.may_answer.set()
    await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=TIMEOUT_SECONDS)
    assert [*world.writes._writes] == [ftj().uid]
    world.seconds = 60.0
    await world.write(CREATE, dataclasses.replace(ftj(), name="next", uid="u3"))
    assert not {ftj().uid, "u2"} & {*world.writes._writes}
