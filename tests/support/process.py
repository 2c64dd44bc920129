"""Child processes that never outlive their parent."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypedDict, TypeVar

# What programs of containers are started with: they leave their folders mounted. In a mount namespace of their own these
# mounts end with them.
ASIDE = ("unshare", "--mount", "--propagation", "private")


class Child(Protocol):
    """What a Process needs of its child, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


@dataclass
class Process:
    """A long-running program: started, stopped, killed and started again under one name.

    NB: it dies with the *thread* that started it (PR_SET_PDEATHSIG), so start it from one that lives as long.
    """

    name: str
    argv: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    """Who it runs as; None for whoever starts it."""
    stop_signal: signal.Signals = signal.SIGTERM
    """What `stop` asks with."""
    started: Child | None = field(default=None, repr=False)

    def start(self) -> None:
        """Start it, its output going to the end of its log; nothing happens if it runs already."""
        if self.alive():
            return
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.started = self._start_child({**os.environ, **self.environment})

    def _start_child(self, environment: Mapping[str, str]) -> Child:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *self.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                **as_user(self.user),
            )

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        return self.started.pid if self.started is not None and self.alive() else None

    def alive(self) -> bool:
        """Whether it runs."""
        return self.started is not None and self.started.poll() is None

    def kill(self) -> None:
        """End it at once, as a node that loses power does: no clean-up runs."""
        if self.started is not None:
            self.started.kill()
            self.started.wait()

    def stop(self, timeout: float = 20) -> None:
        """Ask it to end, and kill it if it has not ended after `timeout` seconds."""
        if self.started is None:
            return
        self.started.send_signal(self.stop_signal)
        try:
            self.started.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()

    def tail(self, lines: int = 15) -> str:
        """The end of its log."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""


class User(TypedDict):
    """Arguments of a child process that say who it runs as."""

    user: str | None
    group: int | None
    extra_groups: list[str | int] | None


def as_user(name: str | None) -> User:
    """A user by name; None for the user that runs the tests."""
    if name is None:
        return {"user": None, "group": None, "extra_groups": None}
    return {"user": name, "group": pwd.getpwnam(name).pw_gid, "extra_groups": []}


class Startable(Protocol):
    """A process, or what is made of some."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


S = TypeVar("S", bound=Startable)


@contextmanager
def running(process: S) -> Iterator[S]:
    """A process for the time of a block."""
    try:
        process.start()
        yield process
    finally:
        process.stop()
