"""Run a command and everything it starts to its end, and leave nothing of it behind."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_MARK = "BENCH_RUN"
_SECONDS_TO_END = 10
_LINES_SHOWN = 60


@dataclass(frozen=True)
class Line:
    """A line of output, and when it came (seconds of a monotonic clock)."""

    text: str
    when: float


class RunFailedError(RuntimeError):
    """A command did not end well; the message says how, and has its last lines."""


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    folder: Path,
    seconds: float,
    on_line: Callable[[Line], None] | None = None,
) -> list[Line]:
    """Run a command in `folder`, and return what it printed, on either stream.

    Args:
        command: program and arguments.
        environment: its whole environment.
        folder: its working directory.
        seconds: how long it may take.
        on_line: called with each line as it comes.

    Raises:
        RunFailedError: it failed, or took longer.
    """
    mark = uuid.uuid4().hex
    lines: list[Line] = []
    late = threading.Event()

    def stop() -> None:
        late.set()
        _end_marked(mark)

    timer = threading.Timer(seconds, stop)
    process = subprocess.Popen(
        list(command),
        env={**environment, _MARK: mark},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )

    def clear_up() -> None:
        # NB: what outlives the command keeps its output open, which is read to the end.
        process.wait()
        _end_marked(mark)

    clearing = threading.Thread(target=clear_up)
    timer.start()
    clearing.start()
    try:
        assert process.stdout is not None
        with process.stdout:
            for text in process.stdout:
                line = Line(text.rstrip("\n"), time.monotonic())
                lines.append(line)
                if on_line is not None:
                    on_line(line)
        code = process.wait()
    finally:
        timer.cancel()
        _end_marked(mark)
        clearing.join()
    if late.is_set() or code:
        how = f"took longer than {seconds:.0f} s" if late.is_set() else f"ended with exit code {code}"
        last = "\n".join(line.text for line in lines[-_LINES_SHOWN:])
        raise RunFailedError(f"{command[-1]} {how}:\n{last}")
    return lines


def _end_marked(mark: str) -> None:
    """End the processes that came of a command, those too that left its session or lost their parent."""
    for which in (signal.SIGTERM, signal.SIGKILL):
        _signal(mark, which)
        deadline = time.monotonic() + _SECONDS_TO_END
        while _marked(mark) and time.monotonic() < deadline:
            time.sleep(0.05)


def _signal(mark: str, which: signal.Signals) -> None:
    for pid in _marked(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, which)


def _marked(mark: str) -> list[int]:
    """The processes with a mark in their environment; the ended have none."""
    variable = f"{_MARK}={mark}".encode()
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                if variable in (folder / "environ").read_bytes().split(b"\0"):
                    pids.append(int(folder.name))
    return pids
