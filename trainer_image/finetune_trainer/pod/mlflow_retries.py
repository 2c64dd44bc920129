"""Calls of MLflow that are repeated while the server does not answer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from finetune_trainer.pod import mlflow_run
from finetune_trainer.pod.exit_status import PodFailure, RecipeRefusedError, TrainingError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
# How long to wait for a server that does not answer, unless the environment says otherwise.
_UNREACHABLE_TIMEOUT_SECONDS = 600.0


def call_with_retries(
    call: Callable[[], T],
    *,
    purpose: str,
    refused: str,
    refusal_reason: str,
    unreachable: str,
    patience_seconds: float | None = None,
) -> T:
    """Call MLflow, with retries while it is unreachable.

    Args:
        purpose: what the process waits for, for its log.
        refused: beginning of the error about a call that the server refuses for good, before the first line of its answer.
        refusal_reason: the reason of this error.
        unreachable: beginning of the error about a server that did not answer in time, before `was not reachable`.
        patience_seconds: how long to retry. Default: what the environment says, or ten minutes.

    Raises:
        RecipeRefusedError: the server refused the call.
        TrainingError: the server was unreachable for too long.
        PodFailure: raised by the call.
    """
    patience_seconds = patience_seconds or mlflow_run.get_patience_seconds(_UNREACHABLE_TIMEOUT_SECONDS)
    deadline = time.monotonic() + patience_seconds
    pause, is_first = mlflow_run.FIRST_PAUSE_SECONDS, True
    while True:
        try:
            return call()
        except PodFailure:
            raise
        except Exception as error:
            line = mlflow_run.first_line(error)
            if mlflow_run.is_final(error):
                raise RecipeRefusedError(f"{refused}: {line}", reason=refusal_reason) from error
            if time.monotonic() + pause > deadline:
                message = f"{unreachable} was not reachable for {patience_seconds:.0f} s: {line}"
                raise TrainingError("MlflowUnreachable", message) from error
            if is_first:
                print(f"waiting for MLflow {purpose}: {line}", flush=True)
                is_first = False
            time.sleep(pause)
            pause = min(2 * pause, mlflow_run.MAX_PAUSE_SECONDS)
