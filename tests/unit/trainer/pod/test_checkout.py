"""The command that fetches a commit, as a process, from git's own server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from finetune_trainer.pod import checkout
from fixtures.git_server import GitServer, git_server
from support.http_server import Answer


class World(NamedTuple):
    """The server, and commits of its repository: one that no branch is at, and one that nothing has any more."""

    server: GitServer
    earlier: str
    newest: str


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with git_server(tmp_path_factory.mktemp("git")) as server:
        server.create("code")
        earlier = server.commit("code", {"train.py": "1", "pkg/part.py": "1"})
        newest = server.commit("code", {"train.py": "2"})
        server.logins["code"] = ("me", "pass:word")
        yield World(server, earlier, newest)


class Ended(NamedTuple):
    """How the process ended: its exit code, and the reason and the sentence of its error."""

    code: int
    reason: str = ""
    message: str = ""


LOGIN = "pass:word"


def run(
    world: World, folder: Path, commit: str, *, password: str | None = LOGIN, name: str = "code"
) -> Ended:
    folder.mkdir(exist_ok=True)
    if os.geteuid() == 0:
        # A volume belongs to another user than the process.
        os.chown(folder, 12345, 12345)
    report = folder.parent / "said.json"
    report.unlink(missing_ok=True)
    url = world.server.url(name)
    environment = {
        **{name: value for name, value in os.environ.items() if name != "GIT_SSL_CAINFO"},
        "SSL_CERT_FILE": str(world.server.authority),
        **({"FINETUNE_GIT_USERNAME": "me", "FINETUNE_GIT_PASSWORD": password} if password else {}),
        "FINETUNE_TERMINATION_PATH": str(report),
    }
    ended = subprocess.run(
        [sys.executable, "-m", "finetune_trainer.pod.checkout", url, commit, str(folder)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not password or password not in ended.stdout + ended.stderr
    if not report.exists():
        return Ended(ended.returncode)
    error = json.loads(report.read_text())["error"]
    return Ended(ended.returncode, error["reason"], error["message"].replace(url, "URL"))


@pytest.mark.parametrize("protocol_2", [True, False], ids=["version 2", "a server that gives tips alone"])
def test_a_commit_that_no_branch_is_at(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol_2: bool
) -> None:
    monkeypatch.setattr(world.server, "protocol_2", protocol_2)
    folder = tmp_path / "code"
    assert run(world, folder, world.earlier) == Ended(0)
    files = {path: (folder / path).read_text() for path in ("train.py", "pkg/part.py")}
    assert files == {"train.py": "1", "pkg/part.py": "1"}
    assert {oct((folder / path).stat().st_mode & 0o666) for path in ("train.py", "pkg", ".git")} == {"0o666"}
    assert "pass" not in (folder / ".git/config").read_text()
    assert (folder / ".git/shallow").exists() == protocol_2


def test_a_container_that_runs_again(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "code"
    assert run(world, folder, world.newest) == Ended(0)
    (folder / "train.py").write_text("changed")
    assert run(world, folder, world.newest) == Ended(0)
    assert (folder / "train.py").read_text() == "2"


def test_a_container_that_was_killed_leaves_a_lock(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "code"
    assert run(world, folder, world.newest) == Ended(0)
    (folder / ".git/index.lock").touch()
    assert run(world, folder, world.newest) == Ended(0)


def test_a_server_that_is_away_for_a_moment(world: World, tmp_path: Path) -> None:
    world.server.faults.append(Answer(503, b""))
    assert run(world, tmp_path / "code", world.newest) == Ended(0)


def test_a_commit_that_is_gone(world: World, tmp_path: Path) -> None:
    missing_commit = "f" * 40
    assert run(world, tmp_path / "code", missing_commit) == Ended(
        64,
        "CheckoutFailed",
        (
            f"the repository URL does not have commit {missing_commit}: create the job with a commit that exists, a branch "
            "or a tag"
        ),
    )


NO_LOGIN = "the repository URL does not exist, or requires other credentials: {} spec.trainer.code.git.secretRef (fatal: "
CHECK, NAME = NO_LOGIN.format("check the Secret in"), NO_LOGIN.format("name a Secret with credentials in")
LOGINS: dict[str, tuple[str | None, str, int, str]] = {
    "one that is refused": ("wrong", "code", 69, CHECK),
    "none, for a repository that needs one": (None, "code", 1, NAME),
    "one, for a repository that is mistyped": (LOGIN, "typo", 1, CHECK),
}


@pytest.mark.parametrize("case", LOGINS.values(), ids=LOGINS)
def test_a_login_that_opens_nothing(
    world: World, tmp_path: Path, case: tuple[str | None, str, int, str]
) -> None:
    password, name, code, sentence = case
    ended = run(world, tmp_path / "code", world.newest, password=password, name=name)
    assert (ended.code, ended.reason) == (code, "CheckoutFailed")
    assert ended.message.startswith(sentence)


def test_a_server_that_stays_away(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkout, "_RETRY_DELAYS_SECONDS", (0,))
    monkeypatch.delenv("GIT_SSL_CAINFO", raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(world.server.authority))
    monkeypatch.setattr(world.server, "faults", [Answer(503, b""), Answer(503, b"")])
    with pytest.raises(checkout.CheckoutError, match=r"cannot be fetched: .*: 503$") as failure:
        checkout.checkout(world.server.url("code"), world.newest, tmp_path)
    assert failure.value.exit_code == 69
    assert world.server.faults == []


AT = "fatal: unable to access 'URL/': "
WORDS: dict[str, tuple[str, int]] = {
    "no address": (f"{AT}Could not resolve host: git.example.com", 69),
    "no connection": (
        f"{AT}Failed to connect to 127.0.0.1 port 1 after 0 ms: Couldn't connect to server",
        69,
    ),
    "no answer": (f"{AT}Empty reply from server", 69),
    "a proxy that is busy": (f"{AT}CONNECT tunnel failed, response 503", 69),
    "a connection that breaks": (
        "error: RPC failed; curl 56 GnuTLS recv error (-54): Error in the pull function.\nfatal: early EOF",
        69,
    ),
    "a certificate that nobody trusts": (f"{AT}server certificate verification failed. CAfile: none", 1),
    "a proxy that is mistyped": (f"{AT}Unsupported proxy syntax in 'x y'", 1),
}


@pytest.mark.parametrize(("errors", "code"), WORDS.values(), ids=WORDS)
def test_what_git_says_of_a_server(errors: str, code: int) -> None:
    classified = checkout._classify_failure("URL", errors)
    assert (classified.exit_code, classified.message) == (
        code,
        f"the repository URL cannot be fetched: {errors.splitlines()[-1]}",
    )


def test_no_redirect_is_followed(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = Answer(302, b"", {"Location": f"{world.server.address}/elsewhere.git/info/refs"})
    monkeypatch.setattr(world.server, "answers", {"/code.git/info/refs": elsewhere})
    monkeypatch.setattr(world.server, "asked", [])
    ended = run(world, tmp_path / "code", world.newest)
    assert (ended.code, ended.message.startswith("the repository URL cannot be fetched: fatal: ")) == (
        1,
        True,
    )
    assert {path for path, _ in world.server.asked} == {"/code.git/info/refs"}
