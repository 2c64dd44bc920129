"""Child processes that never outlive their parent, and processes told apart by more than a number."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.paths import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass
class Process:
    """A long-running program: started, stopped, killed and started again under one name.

    NB: it dies with the *thread* that started it (PR_SET_PDEATHSIG), so start it from one that lives as long.
    """

    name: str
    argv: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    started: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        """Start it, its output going to the end of its log; nothing happens if it runs already."""
        if self.alive():
            return
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.started = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *self.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        return self.started.pid if self.started is not None and self.alive() else None

    def alive(self) -> bool:
        """Whether it runs."""
        return self.started is not None and self.started.poll() is None

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self.started is not None:
            self.started.kill()
            self.started.wait()

    def stop(self, timeout: float = 10) -> None:
        """Ask it to end, and end it if it has not after `timeout` seconds."""
        if self.started is None:
            return
        self.started.terminate()
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


def wait_until(what: str, ready: Callable[[], bool], timeout: float, *processes: Process) -> None:
    """Wait until `ready()`; fail when time is up or one of the processes it depends on has ended."""
    deadline = time.monotonic() + timeout
    while not ready():
        for process in processes:
            if not process.alive():
                raise ClusterError(f"{process.name} ended while waiting for {what}:\n{process.tail()}")
        if time.monotonic() > deadline:
            tails = "\n".join(f"--- {process.log}\n{process.tail()}" for process in processes)
            raise ClusterError(f"{what}: not after {timeout:.0f} seconds\n{tails}")
        time.sleep(0.1)


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: with its id it names the process for good."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # NB: the command's name comes second, in parentheses, and may hold spaces and parentheses itself.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def end(pid: int, started: int, timeout: float = 20) -> None:
    """End a process that may not be ours to wait for, if it is still the one that started then."""
    for number, patience in ((signal.SIGTERM, timeout), (signal.SIGKILL, timeout)):
        if start_time(pid) != started:
            return
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + patience
        while start_time(pid) == started and time.monotonic() < deadline:
            time.sleep(0.05)


def run(*argv: str, check: bool = True, timeout: float = 60, given: str | None = None) -> str:
    """Run a program to its end and return what it printed; its error output is in the error."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=timeout, input=given)
    except FileNotFoundError:
        raise ClusterError(f"{argv[0]} is not installed") from None
    if check and done.returncode != 0:
        raise ClusterError(f"{' '.join(argv)} failed ({done.returncode}): {done.stderr.strip()[-2000:]}")
    return done.stdout
