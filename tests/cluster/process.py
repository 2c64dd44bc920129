"""Runs programs to completion, and identifies processes by their id and start time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from cluster.paths import ClusterError


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


def run(*argv: str, check: bool = True, timeout: float = 60, stdin: str | None = None) -> str:
    """Run a program to its end and return what it printed; its error output is in the error."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=timeout, input=stdin)
    except FileNotFoundError:
        raise ClusterError(f"{argv[0]} is not installed") from None
    if check and done.returncode != 0:
        raise ClusterError(f"{' '.join(argv)} failed ({done.returncode}): {done.stderr.strip()[-2000:]}")
    return done.stdout
