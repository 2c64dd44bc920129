"""A server that several processes share ends with its last user, however that one ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.shared import shared
from support.waiting import WaitError, wait_for

SERVER = """
import os
from contextlib import contextmanager

@contextmanager
def serve(folder):
    with (folder.parent.parent / "log").open("a") as log:
        print("started", file=log, flush=True)
        yield {"pid": os.getpid()}
        print("stopped", file=log, flush=True)

@contextmanager
def broken(folder):
    raise RuntimeError("no such flag")
    yield
"""
USER = """
import sys
from pathlib import Path
from support.shared import shared
with shared(Path(sys.argv[1]), "a_server:serve") as found:
    print(found["pid"], flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "a_server.py").write_text(SERVER, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@contextmanager
def user(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process that uses the server until its input ends; its server's process id."""
    with subprocess.Popen(
        [sys.executable, "-c", USER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())


def history(folder: Path) -> list[str]:
    return (folder / "log").read_text(encoding="utf-8").split()


def test_the_server_ends_with_its_last_user(folder: Path) -> None:
    with user(folder) as (_, pid):
        with shared(folder, "a_server:serve") as found:
            assert found == {"pid": pid}
        assert history(folder) == ["started"]
    wait_for("the server ends", lambda: history(folder) == ["started", "stopped"])
    with shared(folder, "a_server:serve") as found:
        assert found["pid"] != pid


def test_the_server_ends_with_a_user_that_is_killed(folder: Path) -> None:
    with user(folder) as (process, _):
        process.kill()
    wait_for("the server ends", lambda: history(folder) == ["started", "stopped"])


def test_a_server_that_does_not_start_says_why(folder: Path) -> None:
    with pytest.raises(WaitError, match="no such flag"), shared(folder, "a_server:broken"):
        pass
