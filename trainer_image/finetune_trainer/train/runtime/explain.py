"""What a rank says of errors whose own words do not tell people what to do."""

from __future__ import annotations

import torch
import torch.distributed as dist

from finetune_trainer.pod.exit_status import TrainingError, first_line
from finetune_trainer.train.runtime import scratch

_MAX_LINE_CHARS = 300


def explain_error(error: BaseException, rank: int) -> BaseException:
    """What a rank says of an error: of memory that a GPU lacks, what to change; of the loss of another rank, that it is no cause."""
    if isinstance(error, torch.OutOfMemoryError):
        sentence = (
            f"rank {rank} needs more memory than its GPU has: set training.activationCheckpointing to Full where it is not, lower "
            "training.perDeviceBatchSize or training.maxLength, or, where the weights alone do not fit, take more GPUs with FSDP, or "
            f"method QLoRA ({first_line(error)[:_MAX_LINE_CHARS]})"
        )
        return TrainingError("OutOfMemory", sentence, rank=rank)
    if is_loss_of_peer(error):
        sentence = (
            f"a collective failed, as it does where another rank ended ({_join_first_and_last_line(error)}): the log of the rank that failed first has "
            "the cause"
        )
        return TrainingError(scratch.PEER_LOST, sentence, rank=rank)
    return error


def is_loss_of_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank ended: a consequence, never the cause."""
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
