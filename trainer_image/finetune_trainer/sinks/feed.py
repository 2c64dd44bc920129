"""Feeds the sinks of a recipe from the rank that leads, without ever waiting for one of them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from finetune_crds import contract
from finetune_trainer.sinks.entries import End, Metrics, Parameters, Settings, Start, encode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from finetune_crds.recipe import JobRecipe
    from finetune_trainer.sinks.entries import Entry

_MAX_QUEUED_ENTRIES = 20_000
# How long a pod waits at its end for a sink that does not take its last entries; after an error, the wait must fit into the grace period.
_PATIENCE_SECONDS, _CLOSE_SECONDS = 30.0, 10.0
_COMMAND = (sys.executable, "-m", "finetune_trainer.sinks")
# Metrics that describe the run to the operator, not the training.
_OMITTED = frozenset({contract.METRIC_STEP, contract.METRIC_MAX_STEPS})
_LABELS = {"TensorBoard": "TensorBoard", "WandB": "W&B"}


class Sink:
    """Passes entries to the process of one sink, from a thread.

    The queue is bounded: when the process does not keep up, the oldest entries are dropped.
    """

    def __init__(self, settings: Settings, command: Sequence[str] = _COMMAND) -> None:
        self._settings = settings
        self._command = command
        self._label = _LABELS[settings.type]
        self._entries: deque[Entry] = deque()
        self._dropped = 0
        self._changed = threading.Condition()
        self._closing = False
        self._has_ended = False
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._work, name=self._label, daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> None:
        """Queue an entry; never blocks."""
        with self._changed:
            if self._has_ended:
                return
            if len(self._entries) >= _MAX_QUEUED_ENTRIES:
                self._entries.popleft()
                self._dropped += 1
            self._entries.append(entry)
            self._changed.notify()

    def begin_close(self) -> None:
        """Take no more entries, and let the process end when it has written the queue."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def end_close(self, deadline: float) -> None:
        """Wait for the process until `deadline`, by the monotonic clock, and kill it then."""
        self._thread.join(timeout=max(deadline - time.monotonic(), 0.0))
        if self._thread.is_alive():
            print(f"{self._label} did not take all metrics in time: the last ones are lost", flush=True)
            if self._process is not None:
                self._process.kill()
            self._thread.join(timeout=1.0)
        elif self._dropped:
            print(f"{self._label} was too slow: the oldest {self._dropped} entries are lost", flush=True)

    def _work(self) -> None:
        try:
            # NB: a process that is killed leaves files behind, such as those of W&B's client.
            with tempfile.TemporaryDirectory(prefix="finetune-sink-", ignore_cleanup_errors=True) as folder:
                code = self._feed_process({**os.environ, "TMPDIR": folder})
        except OSError as error:
            self._record_end()
            print(f"{self._label} cannot be started; the job goes on without it: {error}", flush=True)
            return
        if code > 0:
            print(f"{self._label} failed with code {code}; the job goes on without it", flush=True)
        elif code < 0 and not self._closing:
            print(f"{self._label} was killed by signal {-code}; the job goes on without it", flush=True)

    def _feed_process(self, environment: Mapping[str, str]) -> int:
        """Start the process, write entries to it until it takes no more, and return its exit code."""
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, text=True, bufsize=1, env=environment
        )
        pipe = self._process.stdin
        assert pipe is not None  # noqa: S101 - stdin is a pipe
        # A process that has given up, and has said why, does not read on. NB: the end of the block flushes, and fails then too.
        with suppress(OSError), pipe:
            pipe.write(f"{self._settings.encode()}\n")
            while (entry := self._take()) is not None:
                pipe.write(f"{encode(entry)}\n")
        self._record_end()
        return self._process.wait()

    def _record_end(self) -> None:
        """Keep no entries for a process that takes no more."""
        with self._changed:
            self._has_ended = True
            self._entries.clear()
            if not self._closing:
                # Only the early end is reported.
                self._dropped = 0

    def _take(self) -> Entry | None:
        """Wait for the next entry and return it; None: the sink is closed, and the queue is empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._entries)
            return self._entries.popleft() if self._entries else None


class Sinks:
    """All sinks of a recipe; without sinks, discards all entries.

    As a context manager, it is closed at the end of the block; after an error, it waits only briefly for the sinks.
    """

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._sinks = sinks

    @classmethod
    def of(cls, recipe: JobRecipe, writer: str) -> Sinks:
        """Start the sinks of a recipe; `writer` says which pod writes, such as attempt-2."""
        return cls([Sink(settings) for settings in build_settings(recipe, writer)])

    def start(self, step: int) -> None:
        """Say that the attempt starts after this step."""
        self._put(Start(step))

    def parameters(self, values: Mapping[str, object]) -> None:
        """Log parameters of the run."""
        self._put(Parameters(dict(values)))

    def metrics(self, step: int, values: Mapping[str, float | None], *, is_result: bool = False) -> None:
        """Log metrics; None values are omitted. `is_result`: see `Metrics`."""
        numbers = {
            name: float(value) for name, value in values.items() if value is not None and name not in _OMITTED
        }
        if numbers:
            self._put(Metrics(step, time.time(), numbers, is_result))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._put(End(0 if kind is None else 1))
        for sink in self._sinks:
            sink.begin_close()
        deadline = time.monotonic() + (_PATIENCE_SECONDS if kind is None else _CLOSE_SECONDS)
        for sink in self._sinks:
            sink.end_close(deadline)

    def _put(self, entry: Entry) -> None:
        for sink in self._sinks:
            sink.put(entry)


def build_settings(recipe: JobRecipe, writer: str) -> list[Settings]:
    """Return the settings of each sink of a recipe."""
    job, tracking = recipe.job, recipe.tracking
    return [
        Settings(
            type=sink.type,
            target=contract.job_folder(sink.uri, namespace=job.namespace, name=job.name, uid=job.uid)
            if sink.uri
            else sink.project or "",
            entity=sink.entity,
            run_id=job.uid,
            run_name=tracking.run_name or job.name,
            writer=f"{job.name}.{writer}",
            has_system_metrics=tracking.system_metrics,
        )
        for sink in tracking.sinks
    ]
