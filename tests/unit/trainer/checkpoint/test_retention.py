"""Which saves are deleted."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_trainer.train.checkpoint.folder import Save
from finetune_trainer.train.checkpoint.retention import select_left_over, select_old


def saved(step: int, attempt: int = 2) -> Save:
    return Save("/c", step, f"attempt-{attempt}-0f3a" if attempt else "")


OF_EARLIER_RELEASE = saved(1, 0)
# The saves, those without a marker, what else the rule is told, and what it deletes.
OLD: dict[str, tuple[list[Save], list[Save], dict[str, Any], list[Save]]] = {
    "the newest two stay": ([saved(1), saved(2), saved(3)], [], {}, [saved(1)]),
    "the best one stays": ([saved(1), saved(2), saved(3)], [], {"best_step": 1}, []),
    "of an earlier release": ([OF_EARLIER_RELEASE, saved(2), saved(3)], [], {}, [OF_EARLIER_RELEASE]),
    "later steps stay": ([saved(2), saved(3), saved(4)], [saved(4)], {}, []),
    "killed attempts": ([saved(2, 1), saved(2), saved(3, 1), saved(3)], [saved(2, 1), saved(3, 1)], {}, [saved(2, 1), saved(3, 1)]),
    "one without a marker does not count": ([saved(1), saved(2), saved(3)], [saved(2)], {}, [saved(2)]),
    "two of a step count once": ([saved(1), saved(2), saved(3, 1), saved(3)], [], {}, [saved(1)]),
    "those of a higher attempt stay": ([saved(1, 3), saved(2, 3), saved(3, 3), saved(3)], [saved(2, 3)], {"keep": 1}, []),
}  # fmt: skip


@pytest.mark.parametrize(("saves", "incomplete", "options", "expected"), OLD.values(), ids=OLD)
def test_old_saves(
    saves: list[Save], incomplete: list[Save], options: dict[str, Any], expected: list[Save]
) -> None:
    complete = [save for save in saves if save not in incomplete]
    rule = {"attempt": 2, "newest_step": 3, "keep": 2, "best_step": None} | options
    assert select_old(saves, complete, **rule) == expected


def test_what_killed_attempts_left() -> None:
    saves = [OF_EARLIER_RELEASE, saved(1, 1), saved(1), saved(1, 3)]
    assert select_left_over(saves, [], attempt=2) == saves[:3]
    assert select_left_over(saves, saves[1:], attempt=2) == saves[:1]
