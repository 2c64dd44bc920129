"""Asking a server of Git for the commit of a job beside the passes, with the login of a Secret, and again after a problem."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator import bounded
from finetune_operator.errors import ExternalError, Problem
from finetune_operator.finetunejob.model import FineTuneJob, ResolvedRevision
from finetune_operator.finetunejob.observe.background_reads import ReadPace
from finetune_operator.finetunejob.observe.git_revisions import RevisionReader
from finetune_operator.finetunejob.observe.request_limits import RequestLimits
from finetune_operator.git.repository import Repository, Resolved
from finetune_operator.kube import KubeError
from fixtures.fake_kube import StandIn
from fixtures.git_server import git_server
from fixtures.operator_in_memory.decisions import ACCEPTED, ftj, status

Json = dict[str, Any]


def secret(**values: str) -> Json:
    data = {name: base64.b64encode(value.encode()).decode() for name, value in values.items()}
    return {"kind": "Secret", "metadata": {"name": "login"}, "data": data}


LOGIN: Json = {"secretRef": {"name": "login"}}


def job(url: str, revision: str = "main", login: Json = LOGIN) -> FineTuneJob:
    code = {"git": {"url": url, "revision": revision, **login}}
    return ftj(status(ACCEPTED), trainer={"command": ["torchrun", "train.py"], "code": code})


@dataclass
class World:
    """A reader, a clock that the test moves, and which jobs are to be looked at again.

    Attributes:
        patience: of a pass, in seconds of the real clock.
    """

    kube: StandIn = field(default_factory=StandIn)
    patience: float = 60.0
    clock: float = 0.0
    woken: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        threads = RequestLimits.of_threads(1)
        self.pace = ReadPace(lambda: self.clock, self._wake, threads, self.patience)
        self.reader = RevisionReader(self.kube, self.pace)
        self._answered = asyncio.Event()

    def _wake(self, key: str, *, is_routine: bool) -> None:
        self.woken.append(key)
        self._answered.set()

    async def read_and_be_woken(self, of: FineTuneJob) -> ResolvedRevision | None:
        """What the first of two passes sees, which waits for no server; the server's answer brings the second one."""
        self._answered.clear()
        self.pace.patience_seconds = 0.0
        revision = await self.reader.read(of)
        await self._answered.wait()
        self.pace.patience_seconds = self.patience
        return revision


def why(revision: ResolvedRevision | None) -> tuple[str | None, float | None]:
    """The reason of the problem, and when the server is asked again."""
    assert revision
    return revision.problem.reason if revision.problem else None, revision.retry_seconds


async def test_the_login_and_the_delays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with git_server(tmp_path) as server:
        context = ssl.create_default_context(cafile=server.authority)
        monkeypatch.setattr(bounded, "create_ssl_context", lambda: context)
        server.create("code")
        commit = server.commit("code", {"train.py": "1"})
        server.logins["code"] = ("git", "token")
        world = World(StandIn(secret(password="wrong", other="x")))
        finetunejob = job(server.url("code"))
        assert await world.read_and_be_woken(finetunejob) is None
        assert why(await world.reader.read(finetunejob)) == (ConditionReason.GIT_FORBIDDEN, 1)
        world.clock = 0.75
        requests_before = len(server.asked)
        assert why(await world.reader.read(finetunejob)) == (ConditionReason.GIT_FORBIDDEN, 0.25)
        assert len(server.asked) == requests_before
        world.clock = 1
        assert why(await world.read_and_be_woken(finetunejob)) == (ConditionReason.GIT_FORBIDDEN, None)
        assert why(await world.reader.read(finetunejob)) == (ConditionReason.GIT_FORBIDDEN, 2)
        world.clock = 3
        world.reader.kube = StandIn(secret(password="token\n"))
        # A pass waits for a server that answers at once.
        assert await world.reader.read(finetunejob) == ResolvedRevision(commit, "main")
        requests_before = len(server.asked)
        assert await world.reader.read(finetunejob) == ResolvedRevision(commit, "main")
        assert await world.reader.read(job(server.url("code"), commit)) is None
        assert len(server.asked) == requests_before
        assert world.woken == [finetunejob.key] * 2


@dataclass
class Hanging:
    """Repositories whose server does not answer until told, and then with an error, if there is one."""

    error: ExternalError | None = None
    open: int = 0
    asked: int = 0
    answers: asyncio.Event = field(default_factory=asyncio.Event)

    async def resolve(self, repository: Repository, revision: str) -> Resolved:
        self.asked, self.open = self.asked + 1, self.open + 1
        try:
            await self.answers.wait()
        finally:
            self.open -= 1
        if self.error:
            raise self.error
        return Resolved("a" * 40)


AWAY = ExternalError(Problem(ConditionReason.GIT_UNREACHABLE, "no response within 10 s"))
Hang = Callable[..., Hanging]


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Hang:
    """Have all repositories hang."""

    def given(error: ExternalError | None = None) -> Hanging:
        server = Hanging(error)

        def resolve(self: Repository, revision: str) -> Awaitable[Resolved]:
            return server.resolve(self, revision)

        monkeypatch.setattr(Repository, "resolve", resolve)
        return server

    return given


def jobs(
    number: int, url: str = "https://git.example.com/code", namespace: str = "team"
) -> list[FineTuneJob]:
    return [
        dataclasses.replace(job(url, login={}), uid=f"uid-{namespace}-{index}", namespace=namespace)
        for index in range(number)
    ]


async def settle() -> None:
    """Let the requests run until each waits for something."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_server_that_hangs_holds_no_pass_and_few_connections(hang: Hang) -> None:
    server, world = hang(AWAY), World(patience=0.001)
    many = jobs(10)
    assert [await world.reader.read(each) for each in many] == [None] * 10
    await settle()
    assert server.open == 4
    server.answers.set()
    await settle()
    assert [why(await world.reader.read(each)) for each in many] == [
        (ConditionReason.GIT_UNREACHABLE, 1)
    ] * 10
    # The others had waited for the first four, and did not ask in vain as well.
    assert (server.asked, sorted(world.woken)) == (4, sorted(each.key for each in many))


async def test_the_jobs_of_another_namespace_and_another_server_do_not_wait_for_it(hang: Hang) -> None:
    server, world = hang(), World(patience=0.001)
    other_jobs = [*jobs(4), *jobs(1, namespace="other"), *jobs(1, "https://git.example.org/code", "third")]
    for each in other_jobs:
        await world.reader.read(each)
    await settle()
    assert server.open == 6


async def test_servers_that_hang_hold_few_connections_of_a_namespace_and_of_all(hang: Hang) -> None:
    server, world = hang(), World(patience=0.001)

    async def open_after(*more: FineTuneJob) -> int:
        for each in more:
            await world.reader.read(each)
        await settle()
        return server.open

    def on_hosts(number: int, namespace: str) -> list[FineTuneJob]:
        return [
            dataclasses.replace(
                job(f"https://{index}.example.com/code", login={}),
                uid=f"uid-{namespace}-{index}",
                namespace=namespace,
            )
            for index in range(number)
        ]

    assert await open_after(*on_hosts(20, "greedy")) == 8
    assert await open_after(*on_hosts(1, "other")) == 9
    assert await open_after(*(each for index in range(10) for each in on_hosts(8, f"team-{index}"))) == 32
    server.answers.set()
    for _ in range(30):
        await settle()
    assert (server.open, server.asked) == (0, 101)


async def test_a_server_that_did_not_answer_is_left_alone_for_a_while(hang: Hang) -> None:
    server, world = hang(AWAY), World()
    server.answers.set()
    first, second = jobs(2)
    await world.reader.read(first)
    revision = await world.reader.read(second)
    assert revision
    assert revision.problem == Problem(
        ConditionReason.GIT_UNREACHABLE,
        "the repository https://git.example.com/code cannot be reached: git.example.com did not respond to another request",
    )
    assert server.asked == 1
    world.clock, server.error = 5, None
    assert await world.reader.read(second) == ResolvedRevision("a" * 40)
    assert server.asked == 2


async def test_a_commit_that_was_found_is_not_asked_for_again_before_it_is_in_the_status(hang: Hang) -> None:
    server, world = hang(), World()
    server.answers.set()
    (first,) = jobs(1)
    assert await world.reader.read(first) == ResolvedRevision("a" * 40)
    world.clock = 3600
    assert await world.reader.read(first) == ResolvedRevision("a" * 40)
    await settle()
    assert server.asked == 1


async def test_nobody_is_asked_about_a_job_that_is_not_accepted(hang: Hang) -> None:
    server, world = hang(), World()
    (first,) = jobs(1)
    assert await world.reader.read(dataclasses.replace(first, status=status())) is None
    await settle()
    assert server.asked == 0


async def test_a_job_that_was_deleted_is_forgotten(hang: Hang) -> None:
    server, world = hang(), World(patience=0.001)
    (first,) = jobs(1)
    await world.reader.read(first)
    await settle()
    assert server.open == 1
    world.reader.forget(first)
    await settle()
    assert (server.open, world.woken) == (0, [])


async def test_an_error_that_nobody_expected_is_a_problem_and_not_the_end(
    hang: Hang, caplog: pytest.LogCaptureFixture
) -> None:
    server, world = hang(), World()
    server.error = ValueError("a bug")  # type: ignore[assignment]
    server.answers.set()
    (first,) = jobs(1)
    assert why(await world.reader.read(first)) == (ConditionReason.INTERNAL_ERROR, 1)
    assert "a bug" in caplog.text


async def test_an_api_server_that_is_away_fails_the_pass_and_not_the_job() -> None:
    kube = StandIn(secret(password="token"))
    kube.refuse["get", "Secret"] = KubeError(0, "away")
    with pytest.raises(KubeError, match="away"):
        await World(kube).reader.read(job("https://127.0.0.1:1/code"))


NO_LOGIN: dict[str, tuple[StandIn, str]] = {
    "there is none": (
        StandIn(),
        "Secret login of spec.trainer.code.git.secretRef does not exist in namespace team: create the Secret",
    ),
    "no password": (
        StandIn(secret(username="me", token="t")),
        "Secret login of spec.trainer.code.git.secretRef lacks the key password: add the keys username and password",
    ),
}


@pytest.mark.parametrize(("kube", "message"), NO_LOGIN.values(), ids=NO_LOGIN)
async def test_a_secret_without_a_login(kube: StandIn, message: str) -> None:
    revision = await World(kube).reader.read(job("https://127.0.0.1:1/code"))
    assert revision
    assert revision.problem
    assert (revision.problem.reason, revision.problem.message) == (
        ConditionReason.CREDENTIALS_MISSING,
        message,
    )
