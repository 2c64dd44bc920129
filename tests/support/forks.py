"""Pods of the trainer as forks of one process that has imported what takes long.

The start of a rank costs seconds of imports and milliseconds of everything else. A pod that is a fork runs the same
launcher, torchrun's agent and worker; only the interpreter is not started anew.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

# NB: everything that a rank imports before its end; rank 0 would import MLflow for 6 s when it registers the model.
_PRELOADED = [
    "torch",
    "transformers.models.llama.modeling_llama",
    "transformers.integrations.bitsandbytes",
    "peft",
    "finetune_trainer.train.worker",
    "deltalake",
    "pyarrow.dataset",
    "mlflow.transformers",
    "mlflow.pyfunc",
    "mlflow.store.tracking.sqlalchemy_store",
    "sqlalchemy.dialects.sqlite",
    "alembic.command",
]
_SECONDS = 300


def preloaded() -> Any:
    """The context that starts such forks; the process that they are forked off starts with the first of them."""
    multiprocessing.set_forkserver_preload(_PRELOADED)
    return multiprocessing.get_context("forkserver")


def children(pid: int) -> list[int]:
    """Process ids of a process's children, in the order in which they were started."""
    pids = "".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return sorted(map(int, pids.split()))


def kill_pod(launcher: int) -> None:
    """Kill a launcher and its ranks, as far as they still run. NB: ranks lead process groups of their own."""
    for pid in (*children(launcher), launcher):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class ForkedPod:
    """A started pod, with what tests use of `subprocess.Popen`: its output, its end, and signals."""

    def __init__(self, environment: dict[str, str], pipe: Path) -> None:
        os.mkfifo(pipe)
        self.process = preloaded().Process(target=_launch, args=(environment, pipe))
        self.process.start()
        # NB: opening a FIFO returns once the pod has opened it too.
        self.stdout = pipe.open(encoding="utf-8")
        pipe.unlink()

    @property
    def pid(self) -> int:
        """Process id of the launcher."""
        process_id: int = self.process.pid
        return process_id

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        exit_code: int | None = self.process.exitcode
        return exit_code

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self.returncode

    def wait(self, timeout: float) -> int | None:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it runs on.
        """
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("finetune-train", timeout)
        return self.returncode

    def communicate(self, timeout: float = _SECONDS) -> tuple[str, None]:
        """The rest of the output, when the pod has ended.

        Raises:
            subprocess.TimeoutExpired: it ran on, and was killed.
        """
        limit = threading.Timer(timeout, self.kill)
        limit.start()
        with self.stdout:
            output = self.stdout.read()
        expired = not limit.is_alive()
        limit.cancel()
        self.wait(timeout)
        if expired:
            raise subprocess.TimeoutExpired("finetune-train", timeout, output)
        return output, None

    def send_signal(self, number: int) -> None:
        """Send a signal to the launcher, as the kubelet does."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the launcher and its ranks."""
        kill_pod(self.pid)


def _launch(environment: dict[str, str], pipe: Path) -> None:
    """Run `finetune-train`, with ranks that are forks too."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    from finetune_trainer.train.__main__ import main

    os.setsid()
    os.environ.update(environment)
    output = os.open(pipe, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(output, stream)
    SubprocessHandler._popen = lambda _handler, _command, rank: _ForkedRank(rank)
    sys.exit(main([]))


class _ForkedRank(subprocess.Popen[bytes]):
    """A rank as torchrun's agent starts it, but for the interpreter."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        super().__init__(())

    def _execute_child(self, *_parts: object) -> None:
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            os._exit(_train(self._environment))
        self._child_created = True


def _train(environment: dict[str, str]) -> int:
    """Run a rank in a process that was forked off its launcher, and return its exit code."""
    import torch

    from finetune_trainer.train import worker

    # A rank that is started anew inherits no handlers of its launcher.
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        return worker.main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
