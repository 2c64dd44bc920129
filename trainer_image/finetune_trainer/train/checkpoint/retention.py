"""Selects the saves of a checkpoint folder to delete; never a save of a higher attempt, whose pods may be writing it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from finetune_trainer.train.checkpoint.folder import Save


def select_left_over(saves: Collection[Save], complete: Collection[Save], *, attempt: int) -> list[Save]:
    """Return the saves without a marker, which killed pods left.

    Args:
        saves: the saves of a step.
        complete: the saves with a marker.
        attempt: the attempt that deletes, before it writes a save of the step.
    """
    return [save for save in saves if save not in complete and save.attempt <= attempt]


def select_old(
    saves: Collection[Save],
    complete: Collection[Save],
    *,
    attempt: int,
    newest_step: int,
    keep: int,
    best_step: int | None,
) -> list[Save]:
    """Return all saves up to `newest_step`, except the complete saves of the newest `keep` checkpoints and of the best checkpoint.

    Args:
        saves: all saves of a folder.
        complete: the saves with a marker.
        attempt: the attempt that deletes.
        newest_step: the step that the attempt has just published.
        keep: the number of checkpoints to keep.
        best_step: step of the best checkpoint; None if there is no evaluation yet.
    """
    until_newest = [save for save in saves if save.step <= newest_step]
    steps = sorted({save.step for save in until_newest if save in complete})
    kept_steps = {*steps[-keep:], best_step}
    kept_saves = [save for save in until_newest if save in complete and save.step in kept_steps]
    return [save for save in until_newest if save not in kept_saves and save.attempt <= attempt]
