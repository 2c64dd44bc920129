"""The outcome of a pod: its exit code and its termination message."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from finetune_crds.contract import (
    EXIT_DATA,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_RECIPE,
    TERMINATION_PATH,
    PodError,
    TerminationMessage,
)
from finetune_crds.masking import find_secrets, mask, mask_recognized
from finetune_crds.recipe import RecipeError

if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_FAILED = 1
ENV_TERMINATION_PATH = "FINETUNE_TERMINATION_PATH"
_REASON_MAX_CHARS, _MESSAGE_MAX_CHARS = 64, 2048


class PodFailure(Exception):  # noqa: N818 - preemption is an outcome, not an error
    """An outcome that is reported to the operator: an exit code, a CamelCase reason and one sentence."""

    exit_code = EXIT_FAILED

    def __init__(self, reason: str, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.rank = rank
        self.checkpoint_step: int | None = None


class RecipeRefusedError(PodFailure):
    """The recipe is invalid, or requires what is not available: no attempt can succeed."""

    exit_code = EXIT_RECIPE

    def __init__(self, message: str, reason: str = "RecipeRefused") -> None:
        super().__init__(reason, message)


class DataError(PodFailure):
    """The data is invalid: no attempt can succeed until it changes."""

    exit_code = EXIT_DATA


class TrainingError(PodFailure):
    """A failure that another attempt can avoid."""


class PreemptedError(PodFailure):
    """Stopped on request; the next attempt resumes from `checkpoint_step`."""

    exit_code = EXIT_PREEMPTED

    def __init__(self, message: str, checkpoint_step: int | None, reason: str = "Preempted") -> None:
        super().__init__(reason, message)
        self.checkpoint_step = checkpoint_step


class SupersededError(PreemptedError):
    """Newer pods of the job have taken over a folder that this pod writes to."""

    def __init__(self, message: str) -> None:
        super().__init__(message, checkpoint_step=None, reason="Superseded")


def write_termination_message(code: int, message: TerminationMessage | None) -> None:  # noqa: ARG001 - Kubernetes reads the exit code of the process
    """Write the message where Kubernetes reads it, and print the sentence of an error."""
    if message is None:
        return
    if message.error is not None:
        print(f"{message.error.reason}: {message.error.message}", file=sys.stderr, flush=True)
    # Outside a pod, the path does not always exist.
    with contextlib.suppress(OSError):
        path = Path(os.environ.get(ENV_TERMINATION_PATH, TERMINATION_PATH))
        path.write_text(message.dump(), encoding="utf-8")


def exit_on_sigterm() -> None:
    """End this process at once on SIGTERM. Nothing needs to be cleaned up: files in the storage are written atomically.

    NB: this is process 1 of its container, and the kernel ignores signals for which process 1 has no handler. Without this handler,
    the driver of a Spark preparation would run until SIGKILL, and replace the executor pods that are being deleted.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))


def run(
    main: Callable[[], TerminationMessage | None],
    report: Callable[[int, TerminationMessage | None], None] = write_termination_message,
) -> int:
    """Run `main`, report its outcome, and return its exit code.

    RecipeError and RecipeRefusedError give 64, DataError 65, PreemptedError 75, any other PodFailure its own code, KeyboardInterrupt
    130, and any other error 1. Only an unexpected error prints its traceback. SystemExit is not reported: it gives its own code if that
    is a number, and 1 otherwise, since the work is not done. Its text is printed, as Python does.
    """
    try:
        code, message = EXIT_OK, main()
    except SystemExit as stop:
        if isinstance(stop.code, int):
            return stop.code
        print(stop.code or "the process ended before its work was done", file=sys.stderr, flush=True)
        return EXIT_FAILED
    except BaseException as error:  # noqa: BLE001 - every error is reported to the operator
        code, message = describe(error)
        if not isinstance(error, PodFailure | RecipeError | KeyboardInterrupt):
            traceback.print_exc()
    report(code, message)
    return code


def first_line(error: object) -> str:
    """Return the first non-blank line of an error's message; without one, the name of the error's type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def describe(error: BaseException) -> tuple[int, TerminationMessage]:
    """Return the exit code and the termination message of an exception, without credentials: clients quote them in their errors."""
    rank = step = None
    if isinstance(error, PodFailure):
        code, reason, sentence = error.exit_code, error.reason, error.message
        rank, step = error.rank, error.checkpoint_step
    elif isinstance(error, RecipeError):
        code, reason, sentence = EXIT_RECIPE, "InvalidRecipe", str(error)
    elif isinstance(error, KeyboardInterrupt):
        code, reason, sentence = 128 + signal.SIGINT, "Interrupted", "interrupted from the terminal"
    else:
        code, reason, line = EXIT_FAILED, type(error).__name__, first_line(error)
        # Without a message, the line is the name of the error's type, which the reason already is.
        sentence = line if line == reason else f"{reason}: {line}"
    sentence = mask(mask_recognized(sentence), find_secrets(os.environ))
    pod_error = PodError(reason=reason[:_REASON_MAX_CHARS], message=sentence[:_MESSAGE_MAX_CHARS], rank=rank)
    return code, TerminationMessage(error=pod_error, checkpoint_step=step)
