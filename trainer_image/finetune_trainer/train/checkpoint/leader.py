"""Runs a function on rank 0 only, and shares its outcome with all ranks, over a given process group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from finetune_trainer.pod.exit_status import SupersededError, TrainingError
from finetune_trainer.storage import filesystems

if TYPE_CHECKING:
    from collections.abc import Callable

    from finetune_trainer.train.runtime.distributed import World


def run_on_leader(call: Callable[[], None], world: World, group: dist.ProcessGroup) -> str | None:
    """Run `call` on rank 0, and return its storage error, if any, on all ranks.

    Raises:
        SupersededError: rank 0 raised it.
        TrainingError: on the other ranks, if rank 0 raised any other error; rank 0 raises that error itself.
    """
    storage_error: str | None = None
    superseded: str | None = None
    unexpected: Exception | None = None
    if world.leads:
        try:
            call()
        except SupersededError as error:
            superseded = error.message
        except Exception as error:  # noqa: BLE001 - reported on all ranks
            storage_error = filesystems.describe_failure(error)
            unexpected = error if storage_error is None else None
    shared = [storage_error, superseded, None if unexpected is None else repr(unexpected)]
    dist.broadcast_object_list(shared, src=0, group=group)
    storage_error, superseded, unexpected_text = shared
    if superseded is not None:
        raise SupersededError(superseded)
    if unexpected is not None:
        raise unexpected
    if unexpected_text is not None:
        raise TrainingError("CheckpointFailed", f"rank 0 failed at a checkpoint: {unexpected_text}", rank=0)
    return None if storage_error is None else f"rank 0: {storage_error}"
