"""Runs work in a new thread, on the GPU of the rank."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def run_in_thread(work: Callable[[], None], device: torch.device) -> Future[None]:
    """Start the work; the future raises its error."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            if device.type == "cuda":
                # NB: a new thread starts on the first GPU: every rank would allocate memory there.
                torch.cuda.set_device(device)
            work()
        except BaseException as error:  # noqa: BLE001 - the future raises it
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="checkpoint").start()
    return future
