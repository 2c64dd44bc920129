"""SIGTERM: recorded at any time, handled where all ranks can stop together, or immediately if no work is lost."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from finetune_trainer.pod.exit_status import PreemptedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NOT_STARTED = "stopped by SIGTERM before the first step"


class Preemption:
    """Records SIGTERM; the ranks check it at safe points and stop after the same step."""

    def __init__(self) -> None:
        self.requested = False
        self.checkpoint_step: int | None = None
        """Step of the newest complete checkpoint, once known."""
        # The message of the error that SIGTERM raises at once; None: SIGTERM is only recorded.
        self._sentence: str | None = None
        signal.signal(signal.SIGTERM, self._record_sigterm)

    @contextmanager
    def interrupt_on_sigterm(self, sentence: str = NOT_STARTED) -> Iterator[None]:
        """While inside, SIGTERM interrupts this rank at once; for work without collectives.

        Raises:
            PreemptedError: SIGTERM arrived, now or earlier.
        """
        self._sentence = sentence
        try:
            if self.requested:
                raise self.error(sentence)
            yield
        finally:
            self._sentence = None

    def error(self, sentence: str = NOT_STARTED) -> PreemptedError:
        """Return the error that ends this rank after SIGTERM."""
        return PreemptedError(sentence, self.checkpoint_step)

    def _record_sigterm(self, _signal: int, _frame: object) -> None:
        self.requested = True
        if self._sentence is not None:
            raise self.error(self._sentence)


def build_preempted_error(step: int, *, published: int | None, failure: str | None) -> PreemptedError:
    """Return the error that ends a loop after a step.

    Args:
        step: the last step; 0: none was taken.
        published: step of the newest complete checkpoint.
        failure: why the last step has no checkpoint.
    """
    if step == 0:
        sentence = NOT_STARTED
    elif published == step:
        sentence = f"stopped by SIGTERM after the checkpoint of step {step}"
    else:
        sentence = f"stopped by SIGTERM after step {step}; {failure}"
    return PreemptedError(sentence, published)


@contextmanager
def on_sigterm(end: Callable[[], None]) -> Iterator[None]:
    """While inside, SIGTERM calls `end` in a separate thread.

    Python runs signal handlers between bytecodes of the main thread: never while that thread blocks in native code,
    as in a rendezvous. But the number of each signal is written to the wakeup file descriptor at once, and the separate thread reads it.
    """
    reader, writer = os.pipe()
    # `set_wakeup_fd` requires this.
    os.set_blocking(writer, False)

    def watch() -> None:
        while received := os.read(reader, 1):
            if received[0] == signal.SIGTERM:
                end()
        os.close(reader)

    previous_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=watch, name="sigterm", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_fd)
        with suppress(OSError):
            os.close(writer)
