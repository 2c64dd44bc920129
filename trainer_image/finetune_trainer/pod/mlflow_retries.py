"""Calls of MLflow that are repeated while the server does not answer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from finetune_trainer.pod import mlflow_run
from finetune_trainer.pod.exit_status import PodFailure

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
UNREACHABLE_TIMEOUT_SECONDS = 600.0
"""How long to wait for a server that does not answer, unless the environment says otherwise."""
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.5, 15.0


def call_with_retries(
    call: Callable[[], T],
    *,
    purpose: str,
    refuse: Callable[[str], PodFailure],
    give_up: Callable[[str], PodFailure],
    patience_seconds: float,
) -> T:
    """Call MLflow, with retries while it is unreachable.

    Args:
        purpose: what the process waits for, for its log.
        refuse: builds the error for a call that the server refuses for good, from the first line of its answer.
        give_up: builds the error for a server that did not answer in time, in the same way.
        patience_seconds: how long to retry.

    Raises:
        PodFailure: of `refuse` or `give_up`, or raised by the call.
    """
    deadline = time.monotonic() + patience_seconds
    pause, is_first = _FIRST_PAUSE_SECONDS, True
    while True:
        try:
            return call()
        except PodFailure:
            raise
        except Exception as error:
            line = mlflow_run.first_line(error)
            if mlflow_run.is_final(error):
                raise refuse(line) from error
            if time.monotonic() + pause > deadline:
                raise give_up(line) from error
            if is_first:
                print(f"waiting for MLflow {purpose}: {line}", flush=True)
                is_first = False
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)
