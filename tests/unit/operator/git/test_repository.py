"""Which commit a revision is, asked of git's own server."""

from __future__ import annotations

import asyncio
import gzip
import socket
import ssl
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator import bounded
from finetune_operator.bounded import ANONYMOUS, Login
from finetune_operator.errors import ExternalError
from finetune_operator.git.repository import Repository, Resolved
from fixtures.git_server import GitServer, git_server
from support.counted import counted
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
    monkeypatch.setattr(bounded, "create_ssl_context", lambda: context)
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
    reported = failed.value.problem
    start = f"the repository {world.server.url(name)} "
    assert reported.message.startswith(start)
    return reported.reason, reported.message.removeprefix(start)


ME = Login("me", "pass:word")
REMEDY = (
    "push the revision, or create a FineTuneJob with another name and another spec.trainer.code.git.revision"
)
WHERE = "spec.trainer.code.git.secretRef"


@pytest.mark.parametrize("protocol_2", [True, False], ids=["version 2", "version 0"])
def test_what_is_not_there(world: World, monkeypatch: pytest.MonkeyPatch, protocol_2: bool) -> None:
    monkeypatch.setattr(world.server, "protocol_2", protocol_2)
    missing = ConditionReason.REVISION_NOT_FOUND
    assert problem(world, "code", "gone") == (missing, f"has no branch or tag gone: {REMEDY}")
    assert problem(world, "code", world.first[:10]) == (
        missing,
        f"has no branch or tag {world.first[:10]}: if {world.first[:10]} is an abbreviated commit, create a FineTuneJob with another name, "
        "and set its spec.trainer.code.git.revision to the full hash of the commit; otherwise push the revision",
    )


def test_a_login_is_sent_where_there_is_one(world: World) -> None:
    with counted("finetune_operator_requests") as changes:
        assert resolve(world, "private", "HEAD", ME).branch == "main"
    assert changes == {"_total Git 200": 2}
    assert {login for _, login in world.server.asked} == {"Basic bWU6cGFzczp3b3Jk"}
    sentence = "does not exist, or requires other credentials: check the address, and"
    forbidden = ConditionReason.GIT_FORBIDDEN
    assert problem(world, "private") == (forbidden, f"{sentence} name a Secret in {WHERE} (HTTP 401)")
    assert problem(world, "private", login=Login("me", "no")) == (
        forbidden,
        f"{sentence} check the Secret in {WHERE} (HTTP 401)",
    )
    assert problem(world, "absent") == (forbidden, f"{sentence} name a Secret in {WHERE} (HTTP 404)")


SECRET = "what only the operator may see"
NO_SERVER = (ConditionReason.GIT_ERROR, "does not respond like a Git server: check the address")
# The beginning of a list of version 0, and a ref in it.
LISTING = b"001e# service=git-upload-pack\n0000"
REF = b"0031" + b"a" * 40 + b" ref\n"
ERROR = b"%04x%b" % (len(SECRET) + 9, f"ERR {SECRET}\n".encode())
FAILED = (
    ConditionReason.GIT_ERROR,
    "returned an error, and the operator retries: read the log of the server, or check the address",
)
ANSWERS: dict[str, tuple[Answer, tuple[str, str]]] = {
    "another address": (
        Answer(301, SECRET, {"Location": "https://127.0.0.1:1/elsewhere"}),
        (
            ConditionReason.GIT_ERROR,
            (
                "redirects requests: create a FineTuneJob with another name and the final address, which usually ends "
                "in .git (HTTP 301)"
            ),
        ),
    ),
    "a page": (Answer(200, SECRET), NO_SERVER),
    "nothing": (Answer(200, ""), NO_SERVER),
    "half a packet": (Answer(200, "00ff# service=git-upload-pack"), NO_SERVER),
    "no refs": (Answer(200, "001e# service=git-upload-pack\n00000009page\n"), NO_SERVER),
    "an error of its own": (
        Answer(418, SECRET),
        (ConditionReason.GIT_ERROR, "does not respond like a Git server: check the address (HTTP 418)"),
    ),
    "too busy": (Answer(503, SECRET), (ConditionReason.GIT_UNREACHABLE, "cannot be reached: HTTP 503")),
    "separators alone": (Answer(200, b"0000" * 100), NO_SERVER),
    "packets of one letter": (Answer(200, b"0006ab" * 500_000), NO_SERVER),
    "an error, as the server says it": (Answer(200, ERROR), FAILED),
    "an error behind the name of the service": (Answer(200, LISTING + ERROR), FAILED),
    "too many refs": (
        Answer(200, LISTING + REF * (32 * 2**20 // len(REF) + 1)),
        (ConditionReason.GIT_UNREACHABLE, "cannot be reached: the response is larger than 33554432 bytes"),
    ),
    "too many refs, compressed": (
        Answer(
            200, gzip.compress(LISTING + REF * (32 * 2**20 // len(REF) + 1), 1), {"Content-Encoding": "gzip"}
        ),
        (ConditionReason.GIT_UNREACHABLE, "cannot be reached: the response is larger than 33554432 bytes"),
    ),
}


@pytest.mark.parametrize(("answer", "expected"), ANSWERS.values(), ids=ANSWERS)
def test_no_text_of_an_answer_is_told(world: World, answer: Answer, expected: tuple[str, str]) -> None:
    world.server.answers["/code.git/info/refs"] = answer
    assert problem(world, "code", login=ME) == expected
    assert [path for path, _ in world.server.asked] == ["/code.git/info/refs"]


VERSION_2 = Answer(200, LISTING + b"000eversion 2\n" + b"0000")


def test_an_error_in_place_of_refs_is_no_branch_that_is_missing(world: World) -> None:
    world.server.answers |= {
        "/code.git/info/refs": VERSION_2,
        "/code.git/git-upload-pack": Answer(200, ERROR),
    }
    assert problem(world, "code") == FAILED


FLOODS: dict[str, tuple[str, Answer, tuple[str, str]]] = {
    "refs of version 0": (
        "info/refs",
        Answer(200, gzip.compress(LISTING + REF * 200_000, 1), {"Content-Encoding": "gzip"}),
        (ConditionReason.REVISION_NOT_FOUND, f"has no branch or tag main: {REMEDY}"),
    ),
    "packets of one letter": (
        "info/refs",
        Answer(200, gzip.compress(b"0006ab" * 5_000_000, 1), {"Content-Encoding": "gzip"}),
        NO_SERVER,
    ),
    "capabilities": (
        "info/refs",
        Answer(
            200,
            gzip.compress(LISTING + b"000eversion 2\n" + b"0006ab" * 5_000_000, 1),
            {"Content-Encoding": "gzip"},
        ),
        (ConditionReason.REVISION_NOT_FOUND, f"has no branch or tag main: {REMEDY}"),
    ),
    "packets of version 2": ("git-upload-pack", Answer(200, b"0006ab" * 5_000_000), NO_SERVER),
    "refs of version 2": (
        "git-upload-pack",
        Answer(200, REF * 200_000),
        (ConditionReason.REVISION_NOT_FOUND, f"has no branch or tag main: {REMEDY}"),
    ),
    "packets of nothing": ("git-upload-pack", Answer(200, b"0004" * 500_000), NO_SERVER),
}


@pytest.mark.parametrize(("path", "answer", "expected"), FLOODS.values(), ids=FLOODS)
async def test_a_flood_takes_neither_the_memory_nor_the_loop(
    world: World, monkeypatch: pytest.MonkeyPatch, path: str, answer: Answer, expected: tuple[str, str]
) -> None:
    # With the memory traced, all takes longer.
    monkeypatch.setattr(bounded, "TIMEOUT_SECONDS", 60.0)
    world.server.answers |= {
        "/code.git/info/refs": VERSION_2,
        "/code.git/git-upload-pack": Answer(200, b"0000"),
        f"/code.git/{path}": answer,
    }
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while True:
            began = time.monotonic()
            await asyncio.sleep(0)
            longest = max(longest, time.monotonic() - began)

    ticking = asyncio.create_task(tick())
    tracemalloc.start()
    try:
        with pytest.raises(ExternalError) as failed:
            await Repository(world.server.url("code")).resolve("main")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        ticking.cancel()
    reported = failed.value.problem
    assert (
        reported.reason,
        reported.message.removeprefix(f"the repository {world.server.url('code')} "),
    ) == expected
    assert most < 10 * 2**20
    assert longest < 1


async def test_a_branch_is_found_among_all_those_that_its_name_begins(world: World) -> None:
    # `release` is a prefix of each, and a server may show refs that match no prefix.
    other_refs = (f"{'a' * 40} refs/heads/release/{number}\n" for number in range(200_000))
    lines = [line.encode() for line in (*other_refs, f"{world.second} refs/heads/release\n")]
    listing = b"".join(b"%04x%b" % (len(line) + 4, line) for line in lines) + b"0000"
    world.server.answers |= {
        "/code.git/info/refs": VERSION_2,
        "/code.git/git-upload-pack": Answer(200, gzip.compress(listing, 1), {"Content-Encoding": "gzip"}),
    }
    resolved = await Repository(world.server.url("code")).resolve("release")
    assert resolved == Resolved(world.second, "release")


@contextmanager
def silent_after(world: World, beginning: bytes) -> Iterator[str]:
    """A server with TLS that begins an answer, and then neither goes on nor closes the connection; yields its address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(world.server.authority, world.server.authority.with_name("key.pem"))
    finished = threading.Event()

    def answer(listener: socket.socket) -> None:
        with context.wrap_socket(listener.accept()[0], server_side=True) as connection:
            connection.recv(65536)
            connection.sendall(beginning)
            finished.wait(30)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        try:
            yield f"https://127.0.0.1:{listener.getsockname()[1]}/code.git"
        finally:
            finished.set()
            thread.join()


BEGUN: dict[str, tuple[bytes, ConditionReason]] = {
    "a refusal": (b"404 Not Found", ConditionReason.GIT_FORBIDDEN),
    "a page": (b"200 OK", ConditionReason.GIT_ERROR),
}


@pytest.mark.parametrize(("head", "reason"), BEGUN.values(), ids=BEGUN)
async def test_a_server_cannot_draw_out_the_end_of_a_connection(
    world: World, head: bytes, reason: ConditionReason
) -> None:
    beginning = b"HTTP/1.1 " + head + b"\r\nContent-Length: 1000000\r\n\r\n" + b"<html>" * 100
    with silent_after(world, beginning) as url:
        with pytest.raises(ExternalError) as failed:
            await Repository(url).resolve("main")
        for _ in range(5):
            await asyncio.sleep(0)
        # The loop's own pipe alone.
        assert len(asyncio.get_running_loop()._selector.get_map()) == 1  # type: ignore[attr-defined]
    assert failed.value.problem.reason == reason


def unreachable(url: str) -> str:
    with pytest.raises(ExternalError) as failed:
        asyncio.run(Repository(url).resolve("main"))
    assert failed.value.problem.reason == ConditionReason.GIT_UNREACHABLE
    return failed.value.problem.message.rpartition(": ")[2]


def test_a_server_that_is_away(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, monkeypatch.context() as patch:
        port = silent.getsockname()[1]
        patch.setattr(bounded, "TIMEOUT_SECONDS", 0.3)
        assert unreachable(f"https://127.0.0.1:{port}/code.git") == "no response within 0.3 s"
    assert unreachable(f"https://127.0.0.1:{port}/code.git") == "the connection failed"
    monkeypatch.setattr(bounded, "create_ssl_context", ssl.create_default_context)
    assert unreachable(world.server.url("code")) == "its certificate is not trusted"
