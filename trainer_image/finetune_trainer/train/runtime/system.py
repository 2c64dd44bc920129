"""System metrics of a rank: CPU, memory and GPU, logged at intervals."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import psutil
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_trainer.pod.mlflow_run import Tracker

_INTERVAL_SECONDS = 10.0


class Sampler:
    """Samples the CPU, memory and GPU use of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process = psutil.Process()
        self._without_utilization = False
        # The first call starts the interval that the next call measures.
        self._process.cpu_percent()

    def sample(self) -> dict[str, float]:
        """Return CPU in percent of one core since the last sample, and memory in bytes; with a GPU, also its memory and use."""
        metrics = {
            "cpu_percent": self._process.cpu_percent(),
            "memory_bytes": float(self._process.memory_info().rss),
        }
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            metrics["gpu_memory_bytes"] = float(total - free)
            metrics |= self._utilization()
        return metrics

    def _utilization(self) -> dict[str, float]:
        """Return the GPU utilization in percent; empty if it cannot be read, which is printed once."""
        if self._without_utilization:
            return {}
        try:
            return {"gpu_percent": float(torch.cuda.utilization(self._device))}
        except Exception as error:  # noqa: BLE001 - NVML has errors of its own: a container may not reach the driver
            self._without_utilization = True
            print(
                f"cannot read the GPU utilization; system metrics omit gpu_percent: {str(error) or type(error).__name__}",
                flush=True,
            )
            return {}


@contextmanager
def log_system_metrics(
    tracker: Tracker, rank: int, device: torch.device, *, interval_seconds: float = _INTERVAL_SECONDS
) -> Iterator[None]:
    """While inside, log `system/rank-<rank>/...` at intervals, and once at the end.

    The step of such a metric is the number of the sample, from 1.
    """
    sampler, done = Sampler(device), threading.Event()

    def watch() -> None:
        number, last = 0, False
        while not last:
            last = done.wait(interval_seconds)
            number += 1
            with suppress(psutil.Error, OSError):
                sample = sampler.sample()
                tracker.metrics(
                    number, {f"system/rank-{rank}/{name}": value for name, value in sample.items()}
                )

    thread = threading.Thread(target=watch, name="system", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
