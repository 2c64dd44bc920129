"""System metrics of a rank: CPU, memory and GPU, logged at intervals."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import psutil
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from finetune_trainer.track import Tracker

_INTERVAL_SECONDS = 10.0


class Sampler:
    """Samples the CPU, memory and GPU use of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process = psutil.Process()
        # The first call starts the interval that the next call measures.
        self._process.cpu_percent()

    def sample(self) -> dict[str, float]:
        """Return CPU in percent of one core since the last sample, memory in bytes, and the same of the GPU, if any."""
        found = {
            "cpu_percent": self._process.cpu_percent(),
            "memory_bytes": float(self._process.memory_info().rss),
        }
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            found["gpu_memory_bytes"] = float(total - free)
            # NB: this needs a package that the image may lack, and a driver that a container may not reach.
            with suppress(Exception):
                found["gpu_percent"] = float(torch.cuda.utilization(self._device))
        return found


@contextmanager
def logged(
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
