"""The process of one sink: `python -m finetune_trainer.sinks`. It reads its settings and its entries from stdin.

It never fails the pod: what it cannot do, it says in one line of the pod's log.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Protocol

from finetune_trainer.pod.mlflow_run import first_line
from finetune_trainer.sinks.entries import End, Settings, decode

if TYPE_CHECKING:
    from collections.abc import Callable

    from finetune_trainer.sinks.entries import Entry

# Entries that wait here; the pipe and the rank's queue hold more.
_MAX_QUEUED_ENTRIES = 1000
_TAKE_SECONDS = 1.0
# The pause before a retry, and after the rank has closed the pipe.
_RETRY_SECONDS, _LAST_RETRY_SECONDS = 15.0, 1.0
# How long this process outlives a rank that was killed.
_ORPHAN_SECONDS = 60.0


class Writer(Protocol):
    """Writes entries to a tracker. Each method raises what its client raises."""

    label: str
    """The tracker and its address, for the log."""

    def add(self, entry: Entry) -> None:
        """Write an entry, or keep it for `publish`."""

    def publish(self) -> None:
        """Write what is kept, if it is due."""

    def close(self) -> None:
        """Write what is kept."""

    def is_final(self, error: Exception) -> bool:
        """Whether a retry cannot succeed."""


def main() -> int:
    """Write all entries of stdin, and return 0 if the sink has said what it could not do."""
    # The rank decides when this process ends: it closes stdin. Signals to the group of its processes are not for this one.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = Settings.decode(sys.stdin.readline())
    try:
        writer = _build_writer(settings)
    except ImportError as error:
        package = (error.name or "a package").split(".")[0]
        print(
            f"{package} is not installed in this image; the job goes on without {settings.type}: use the trainer image, or install "
            f"{package} in yours",
            flush=True,
        )
        return 0
    lines = Lines()
    write_all(writer, lines.take, lines.pause)
    return 0


class Lines:
    """The lines of stdin, read by a thread."""

    def __init__(self) -> None:
        self._queue: queue.Queue[str | None] = queue.Queue(_MAX_QUEUED_ENTRIES)
        self._closed = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def take(self) -> str | None:
        """Wait briefly for the next line; empty if there is none yet, None after the last one."""
        try:
            return self._queue.get(timeout=_TAKE_SECONDS)
        except queue.Empty:
            return ""

    def pause(self) -> None:
        """Wait before a retry."""
        if self._closed.is_set():
            time.sleep(_LAST_RETRY_SECONDS)
        else:
            self._closed.wait(_RETRY_SECONDS)

    def _read(self) -> None:
        for line in sys.stdin:
            self._queue.put(line)
            # NB: a process that the rank has forked may keep the pipe open.
            if isinstance(decode(line), End):
                break
        self._closed.set()
        # The rank kills this process when its own patience ends; a rank that was killed cannot.
        watchdog = threading.Timer(_ORPHAN_SECONDS, os._exit, [1])
        watchdog.daemon = True
        watchdog.start()
        self._queue.put(None)


def write_all(writer: Writer, take: Callable[[], str | None], pause: Callable[[], None]) -> None:
    """Write all entries, and retry what fails; end early if a retry cannot succeed.

    While the tracker is unreachable, no entry is taken, so the queues before this function fill up.

    Args:
        writer: writes to the tracker.
        take: as `Lines.take`.
        pause: waits before a retry.
    """
    retries = _Retries(writer, pause)
    while (line := take()) is not None:
        if line and not retries.run(partial(writer.add, decode(line))):
            return
        if not retries.run(writer.publish):
            return
    retries.run(writer.close)


class _Retries:
    """Repeats what fails while the tracker is unreachable, and says so once."""

    def __init__(self, writer: Writer, pause: Callable[[], None]) -> None:
        self._writer = writer
        self._pause = pause
        self._is_away = False

    def run(self, step: Callable[[], None]) -> bool:
        """Run a step until it succeeds; return False if it cannot."""
        while True:
            try:
                step()
            except Exception as error:  # noqa: BLE001 - a sink never stops a job
                if self._writer.is_final(error):
                    self._say(f"refuses the metrics; the job goes on without it: {first_line(error)}")
                    return False
                if not self._is_away:
                    self._is_away = True
                    self._say(f"is unreachable; the job goes on without it: {first_line(error)}")
                self._pause()
            else:
                if self._is_away:
                    self._is_away = False
                    self._say("is reachable again")
                return True

    def _say(self, what: str) -> None:
        print(f"{self._writer.label} {what}", flush=True)


def _build_writer(settings: Settings) -> Writer:
    if settings.type == "TensorBoard":
        from finetune_trainer.sinks.event_files import EventFiles

        return EventFiles(settings)
    from finetune_trainer.sinks.wandb_run import WandbRun

    return WandbRun(settings)


if __name__ == "__main__":
    code = main()
    # NB: threads of the clients, and what they do at exit, would keep the process.
    sys.stdout.flush()
    os._exit(code)
