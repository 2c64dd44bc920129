"""The pace of reads beside the passes, for tests that compare what one pass decides."""

from __future__ import annotations

from collections.abc import Callable

from finetune_operator.finetunejob.observe.background_reads import ReadPace
from finetune_operator.finetunejob.observe.read_limits import ReadLimits

_PATIENCE_SECONDS = 60.0


def wait_for_answers(clock: Callable[[], float], wake: Callable[[str], None] = lambda _key: None) -> ReadPace:
    """A pace with which every pass waits for its answers, however slow the machine is."""
    return ReadPace(clock, wake, ReadLimits.of_threads(16), patience_seconds=_PATIENCE_SECONDS)
