"""The progress of many trainings, written to their MLflow runs as the pods would."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.operator.api import Client, RequestError
from finetune_crds.contract import (
    METRIC_LOSS,
    METRIC_MAX_STEPS,
    METRIC_SECONDS_REMAINING,
    METRIC_STEP,
    METRIC_TOKENS_PER_SECOND,
)

MAX_STEPS = 10_000
STEPS_PER_REPORT = 10
_THREADS = 4


@dataclass
class RunWriter:
    """Writes a later step to each of many runs once an interval, at an even pace.

    Attributes:
        steps: the last step of each run.
        failures: how many reports MLflow did not take.
    """

    client: Client
    run_ids: Sequence[str]
    interval_seconds: float
    steps: dict[str, int] = field(default_factory=dict)
    failures: int = 0
    _stopped: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        """Begin to write."""
        for number in range(_THREADS):
            thread = threading.Thread(target=self._write, args=(self.run_ids[number::_THREADS],), daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Stop, and wait for the last reports."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _write(self, run_ids: Sequence[str]) -> None:
        began, reports = time.monotonic(), 0
        while run_ids:
            for run_id in run_ids:
                pause = began + reports * self.interval_seconds / len(run_ids) - time.monotonic()
                if self._stopped.wait(max(pause, 0.0)):
                    return
                self._report(run_id)
                reports += 1

    def _report(self, run_id: str) -> None:
        step = self.steps.get(run_id, 0) + STEPS_PER_REPORT
        now = int(time.time() * 1000)
        metrics = {
            METRIC_STEP: step,
            METRIC_MAX_STEPS: MAX_STEPS,
            METRIC_LOSS: 1 + 1 / step,
            METRIC_TOKENS_PER_SECOND: 1000.0,
            METRIC_SECONDS_REMAINING: MAX_STEPS - step,
        }
        values = [
            {"key": key, "value": value, "timestamp": now, "step": step} for key, value in metrics.items()
        ]
        try:
            self.client.call("POST", "/api/2.0/mlflow/runs/log-batch", {"run_id": run_id, "metrics": values})
        except (OSError, RequestError):
            self.failures += 1
        else:
            self.steps[run_id] = step
