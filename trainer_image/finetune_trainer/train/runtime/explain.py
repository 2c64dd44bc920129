"""Messages for errors that do not say what to do."""

from __future__ import annotations

import torch
import torch.distributed as dist

from finetune_trainer.pod.exit_status import TrainingError, first_line
from finetune_trainer.train.runtime import scratch

_MAX_LINE_CHARS = 300


def explain_error(error: BaseException, rank: int) -> BaseException:
    """Return the error to report: with a remedy for a lack of GPU memory, and marked as a consequence if another rank failed."""
    if isinstance(error, torch.OutOfMemoryError):
        sentence = (
            f"rank {rank} ran out of GPU memory: set training.activationCheckpointing to Full, or lower "
            "training.perDeviceBatchSize or training.maxLength; if the weights alone do not fit, use more GPUs with FSDP, or "
            f"method QLoRA ({first_line(error)[:_MAX_LINE_CHARS]})"
        )
        return TrainingError("OutOfMemory", sentence, rank=rank)
    if is_loss_of_peer(error):
        sentence = (
            f"a collective failed, most likely because another rank exited ({_join_first_and_last_line(error)}): "
            "see the log of the rank that failed first"
        )
        return TrainingError(scratch.PEER_LOST, sentence, rank=rank)
    return error


def is_loss_of_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank exited: a consequence, never the cause."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in str(error) or "NCCL" in str(error))
    )


def _join_first_and_last_line(error: BaseException) -> str:
    """The first line of an error and its last one: NCCL says in the first where it failed, and at the end which link did."""
    first, *more = str(error).strip().splitlines() or [type(error).__name__]
    return (
        f"{first[:_MAX_LINE_CHARS]} ... {more[-1].strip()[:_MAX_LINE_CHARS]}"
        if more
        else first[:_MAX_LINE_CHARS]
    )
