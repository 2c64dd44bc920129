"""Programs as forks of one process that has imported their packages.

The operator and MLflow's server spend seconds on imports each time they start. A fork of a process with these imports starts in
milliseconds, with a session, an environment and a log of its own. What a package reads from the environment while it is imported
is that of the first fork's parent: a program that depends on this must be started as a Process.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from support.process import Child, Process

UVICORN = "uvicorn:main"
# NB: not mlflow.server, which reads its settings while it is imported.
_PRELOADED = [
    "finetune_operator.__main__",
    "mlflow.store.tracking.rest_store",
    "mlflow.store.model_registry.rest_store",
    "mlflow.store.tracking.sqlalchemy_store",
    "mlflow.store.model_registry.sqlalchemy_store",
    "uvicorn",
]


@dataclass
class ForkedProcess(Process):
    """A Process whose first argument is the function to run, as `module:function`."""

    def _start_child(self, environment: Mapping[str, str]) -> Child:
        self.log.touch()
        program, *arguments = self.argv
        return _Fork(program, arguments, environment, self.log)


class _Fork:
    """A fork, with what Process uses of `subprocess.Popen`."""

    def __init__(
        self, program: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        self._program = program
        # NB: one that is still running when the tests end is terminated.
        self._process: Any = _context().Process(
            target=_run, args=(program, [*arguments], dict(environment), log), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """The process ID."""
        pid: int = self._process.pid
        return pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        code: int | None = self._process.exitcode
        return code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self._program, timeout or 0)
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


def _context() -> ForkServerContext:
    """The context of all forks; the process that they are forks of starts with the first one."""
    multiprocessing.set_forkserver_preload(_PRELOADED)
    return multiprocessing.get_context("forkserver")


def _run(program: str, arguments: list[str], environment: dict[str, str], log: Path) -> None:
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    module, _, function = program.partition(":")
    sys.argv = [program, *arguments]
    sys.exit(getattr(importlib.import_module(module), function)())


def _end_with_parent() -> None:
    # NB: not PR_SET_PDEATHSIG: the process that forks serves as long as one of its forks runs.
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
