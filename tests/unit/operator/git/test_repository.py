"""Which commit a revision is, asked of git's own server."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator import bounded
from finetune_operator.bounded import ANONYMOUS, Login
from finetune_operator.errors import ExternalError
from finetune_operator.git.repository import Repository, Resolved
from standins.git import GitServer, git_server
from support.http_server import Answer


class World(NamedTuple):
    """The server, and the commits of its repositories."""

    server: GitServer
    first: str
    second: str
    tagged: str


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with git_server(tmp_path_factory.mktemp("git")) as server:
        for name in ("code", "private"):
            server.create(name)
        server.commit("private", {"train.py": "1"})
        server.logins["private"] = ("me", "pass:word")
        first = server.commit("code", {"train.py": "1"}, tag="v1")
        tagged = server.commit("code", {"train.py": "2"}, branch="release/2", tag="release-2")
        second = server.commit("code", {"train.py": "3"})
        # A tag with the name of a branch.
        server.commit("code", {"train.py": "4"}, branch="other", tag="main")
        yield World(server, first, second, tagged)


@pytest.fixture(autouse=True)
def trusted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator trusts the server's certificate."""
    context = ssl.create_default_context(cafile=world.server.authority)
    monkeypatch.setattr(bounded, "trusted", lambda: context)
    monkeypatch.setattr(world.server, "asked", [])
    monkeypatch.setattr(world.server, "answers", {})


def resolve(world: World, name: str, revision: str, login: Login = ANONYMOUS) -> Resolved:
    return asyncio.run(Repository(world.server.url(name), login).resolve(revision))


@pytest.mark.parametrize("protocol_2", [True, False], ids=["version 2", "version 0"])
def test_branches_and_tags(world: World, monkeypatch: pytest.MonkeyPatch, protocol_2: bool) -> None:
    monkeypatch.setattr(world.server, "protocol_2", protocol_2)
    names = ("HEAD", "main", "v1", "release/2", "release-2", "refs/tags/v1", "refs/heads/main")
    assert {name: resolve(world, "code", name) for name in names} == {
        "HEAD": Resolved(world.second, "main"),
        "main": Resolved(world.second, "main"),
        "v1": Resolved(world.first),
        "release/2": Resolved(world.tagged, "release/2"),
        "release-2": Resolved(world.tagged),
        "refs/tags/v1": Resolved(world.first),
        "refs/heads/main": Resolved(world.second, "main"),
    }


def problem(world: World, name: str, revision: str = "main", login: Login = ANONYMOUS) -> tuple[str, str]:
    """The reason and the end of the message."""
    with pytest.raises(ExternalError) as failed:
        resolve(world, name, revision, login)
    found = failed.value.problem
    start = f"the repository {world.server.url(name)} "
    assert found.message.startswith(start)
    return found.reason, found.message.removeprefix(start)


ME = Login("me", "pass:word")
REMEDY = "push it, or create the job with another spec.trainer.code.git.revision"
WHERE = "spec.trainer.code.git.secretRef"


@pytest.mark.parametrize("protocol_2", [True, False], ids=["version 2", "version 0"])
def test_what_is_not_there(world: World, monkeypatch: pytest.MonkeyPatch, protocol_2: bool) -> None:
    monkeypatch.setattr(world.server, "protocol_2", protocol_2)
    missing = ConditionReason.REVISION_NOT_FOUND
    assert problem(world, "code", "gone") == (missing, f"has no branch or tag gone: {REMEDY}")
    assert problem(world, "code", world.first[:10]) == (
        missing,
        f"has no branch or tag {world.first[:10]}: a commit needs all its digits: {REMEDY}",
    )


def test_a_login_is_sent_where_there_is_one(world: World) -> None:
    assert resolve(world, "private", "HEAD", ME).branch == "main"
    assert {login for _, login in world.server.asked} == {"Basic bWU6cGFzczp3b3Jk"}
    said = "does not exist, or needs another login: check the address, and"
    forbidden = ConditionReason.GIT_FORBIDDEN
    assert problem(world, "private") == (forbidden, f"{said} name a Secret in {WHERE} (HTTP 401)")
    assert problem(world, "private", login=Login("me", "no")) == (
        forbidden,
        f"{said} check the Secret in {WHERE} (HTTP 401)",
    )
    assert problem(world, "absent") == (forbidden, f"{said} name a Secret in {WHERE} (HTTP 404)")


SECRET = "what only the operator may see"
NO_SERVER = (ConditionReason.GIT_ERROR, "answers, but not as a Git server: check the address")
ANSWERS: dict[str, tuple[Answer, tuple[str, str]]] = {
    "another address": (
        Answer(301, SECRET, {"Location": "https://127.0.0.1:1/elsewhere"}),
        (
            ConditionReason.GIT_ERROR,
            "is at another address, which usually ends in .git: create the job with that one (HTTP 301)",
        ),
    ),
    "a page": (Answer(200, SECRET), NO_SERVER),
    "nothing": (Answer(200, ""), NO_SERVER),
    "half a packet": (Answer(200, "00ff# service=git-upload-pack"), NO_SERVER),
    "no refs": (Answer(200, "001e# service=git-upload-pack\n00000009page\n"), NO_SERVER),
    "an error of its own": (
        Answer(418, SECRET),
        (ConditionReason.GIT_ERROR, "answers, but not as a Git server: check the address (HTTP 418)"),
    ),
    "too busy": (Answer(503, SECRET), (ConditionReason.GIT_UNREACHABLE, "cannot be reached: HTTP 503")),
    "too much": (
        Answer(200, b"0" * (32 * 2**20 + 1)),
        (ConditionReason.GIT_UNREACHABLE, "cannot be reached: its answer is larger than 33554432 bytes"),
    ),
}


@pytest.mark.parametrize(("answer", "expected"), ANSWERS.values(), ids=ANSWERS)
def test_no_text_of_an_answer_is_told(world: World, answer: Answer, expected: tuple[str, str]) -> None:
    world.server.answers["/code.git/info/refs"] = answer
    assert problem(world, "code", login=ME) == expected
    assert [path for path, _ in world.server.asked] == ["/code.git/info/refs"]


def unreachable(url: str) -> str:
    with pytest.raises(ExternalError) as failed:
        asyncio.run(Repository(url).resolve("main"))
    assert failed.value.problem.reason == ConditionReason.GIT_UNREACHABLE
    return failed.value.problem.message.rpartition(": ")[2]


def test_a_server_that_is_away(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setattr(bounded, "SECONDS", 0.3)
        assert unreachable(f"https://127.0.0.1:{port}/code.git") == "it took longer than 0.3 s"
    assert unreachable(f"https://127.0.0.1:{port}/code.git") == "no connection can be made"
    monkeypatch.setattr(bounded, "trusted", ssl.create_default_context)
    assert unreachable(world.server.url("code")) == "its certificate is not trusted"
