"""A server that several test processes share: the first one that needs it starts it, and it ends with the last.

A keeper process runs the server. Each user holds a shared lock on a file, and the kernel releases the lock when the
user ends, however it ends; the keeper waits for the lock alone, and then stops the server. So nothing is left behind
by a failure, an interrupt, or a worker of pytest-xdist that is killed.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from support.waiting import WaitError, wait_for

Json = dict[str, Any]
Serve = Callable[[Path], AbstractContextManager[Json]]
_SECONDS_TO_START = 300


@contextmanager
def shared(folder: Path, made_by: str) -> Iterator[Json]:
    """A server for the time of a block; yields what its maker says of it: addresses, files.

    Args:
        folder: the same one for all processes that share the server.
        made_by: `module:function` of a context manager that takes an empty folder, runs the server, and yields what
            its users need to know, as JSON.

    Raises:
        WaitError: the server did not start; the message has the end of the keeper's log.
    """
    place = folder / made_by.replace(":", ".")
    place.mkdir(parents=True, exist_ok=True)
    keeper = None
    try:
        with (place / "users").open("w") as users:
            # NB: this blocks while a keeper that was left by its last user stops.
            fcntl.flock(users, fcntl.LOCK_SH)
            with FileLock(place / "starting"):
                if not _ready(place).exists():
                    keeper = _start_keeper(place, made_by)
            yield json.loads(_ready(place).read_text(encoding="utf-8"))
    finally:
        if keeper:
            # The process that started the keeper ends after it: when pytest is done, so are its servers.
            keeper.wait()


def _ready(place: Path) -> Path:
    return place / "ready.json"


def _start_keeper(place: Path, made_by: str) -> subprocess.Popen[bytes]:
    log = place / "keeper.log"
    with log.open("ab") as output:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "support.shared", made_by, str(place)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            # An interrupt from the keyboard is for pytest; the keeper stops when pytest has.
            start_new_session=True,
        )
    wait_for(
        f"{made_by} runs", lambda: _ready(place).exists() or keeper.poll() is not None, _SECONDS_TO_START
    )
    if keeper.poll() is not None:
        raise WaitError(f"{made_by} did not start:\n{log.read_text(encoding='utf-8')[-3000:]}")
    return keeper


def keep(made_by: str, place: Path) -> None:
    """Run the server until no user holds its lock."""
    module, _, name = made_by.partition(":")
    serve: Serve = getattr(importlib.import_module(module), name)
    with (place / "users").open("w") as users, serve(Path(tempfile.mkdtemp(dir=place))) as description:
        unfinished = place / "ready.new"
        unfinished.write_text(json.dumps(description), encoding="utf-8")
        unfinished.rename(_ready(place))
        fcntl.flock(users, fcntl.LOCK_EX)
        _ready(place).unlink()


if __name__ == "__main__":
    keep(sys.argv[1], Path(sys.argv[2]))
