"""How a pod ends: its exit code and its termination message."""

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
from finetune_crds.recipe import RecipeError

if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_FAILED = 1
ENV_TERMINATION_PATH = "FINETUNE_TERMINATION_PATH"
_MESSAGE_MAX_CHARS = 2048


class PodFailure(Exception):  # noqa: N818 - not every end is an error: preemption is one too
    """An end that the operator is told about: an exit code, a CamelCase reason and one sentence."""

    exit_code = EXIT_FAILED

    def __init__(self, reason: str, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.rank = rank
        self.checkpoint_step: int | None = None


class RecipeRefusedError(PodFailure):
    """The recipe is wrong, or asks for what is not available: no attempt can succeed."""

    exit_code = EXIT_RECIPE

    def __init__(self, message: str, reason: str = "RecipeRefused") -> None:
        super().__init__(reason, message)


class DataError(PodFailure):
    """The data is wrong: no attempt can succeed before it changes."""

    exit_code = EXIT_DATA


class TrainingError(PodFailure):
    """Something that another attempt may get past."""


class PreemptedError(PodFailure):
    """Stopped on request; `checkpoint_step` is where the next attempt goes on."""

    exit_code = EXIT_PREEMPTED

    def __init__(self, message: str, checkpoint_step: int | None) -> None:
        super().__init__("Preempted", message)
        self.checkpoint_step = checkpoint_step


def tell_kubernetes(code: int, message: TerminationMessage | None) -> None:  # noqa: ARG001 - it sees the code itself
    """Leave the message where Kubernetes picks it up, and an error's sentence in the log."""
    if message is None:
        return
    if message.error is not None:
        print(f"{message.error.reason}: {message.error.message}", file=sys.stderr, flush=True)
    # Outside a pod that place may not exist.
    with contextlib.suppress(OSError):
        path = Path(os.environ.get(ENV_TERMINATION_PATH, TERMINATION_PATH))
        path.write_text(message.dump(), encoding="utf-8")


def run(
    main: Callable[[], TerminationMessage | None],
    tell: Callable[[int, TerminationMessage | None], None] = tell_kubernetes,
) -> int:
    """Run `main`, tell how it ended, and return the exit code for it.

    RecipeError and RecipeRefusedError give 64, DataError 65, PreemptedError 75, and anything else 1. Only what
    nobody expected shows its traceback.
    """
    try:
        code, message = EXIT_OK, main()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_FAILED
    except BaseException as error:  # noqa: BLE001 - whatever it is, the operator is told
        code, message = describe(error)
        if not isinstance(error, PodFailure | RecipeError | KeyboardInterrupt):
            traceback.print_exc()
    tell(code, message)
    return code


def describe(error: BaseException) -> tuple[int, TerminationMessage]:
    """The exit code and the message that stand for an exception."""
    rank = step = None
    if isinstance(error, PodFailure):
        code, reason, sentence = error.exit_code, error.reason, error.message
        rank, step = error.rank, error.checkpoint_step
    elif isinstance(error, RecipeError):
        code, reason, sentence = EXIT_RECIPE, "InvalidRecipe", str(error)
    elif isinstance(error, KeyboardInterrupt):
        code, reason, sentence = 128 + signal.SIGINT, "Interrupted", "interrupted from the terminal"
    else:
        first_line = next(iter(str(error).strip().splitlines()), "")
        code, reason = EXIT_FAILED, type(error).__name__
        sentence = f"{reason}: {first_line}" if first_line else reason
    told = PodError(reason=reason[:64], message=sentence[:_MESSAGE_MAX_CHARS], rank=rank)
    return code, TerminationMessage(error=told, checkpoint_step=step)
