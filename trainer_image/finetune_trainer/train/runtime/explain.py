"""Messages for errors that do not say what to do."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist

from finetune_trainer.pod.exit_status import TrainingError, first_line
from finetune_trainer.train.runtime import scratch

_MAX_LINE_CHARS = 300
# Errors of a collective that the rank itself causes: by its settings, its GPU, its shared memory or its port. Source: PyTorch,
# NCCLUtils.cpp, getNcclErrorDetailStr.
_FAULT_OF_RANK = re.compile(
    r"ncclInvalid(?:Usage|Argument)|ncclUnhandledCudaError|ncclInternalError|No space left on device|EADDRINUSE"
)
# A lack of GPU memory outside of torch's allocator: of the CUDA runtime, of cuBLAS, and of NCCL in its error of a collective.
_OUT_OF_MEMORY = re.compile(
    r"CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|Cuda failure (?:\d+ )?'out of memory'"
)
# Gloo has no error class of its own: its RuntimeErrors are recognized by their texts. Source: Gloo, transport/tcp/pair.cc and
# unbound_buffer.cc.
_GLOO = re.compile(r"gloo", re.IGNORECASE)
_GLOO_LOSS = re.compile(
    r"connection closed by peer|connection reset by peer|timed out|broken pipe|no route to host",
    re.IGNORECASE,
)


def explain_error(error: BaseException, rank: int) -> BaseException:
    """Return the error to report: one that explains a lack of GPU memory or a failed collective, or else the error itself."""
    if _is_out_of_memory(error):
        # NCCL names what failed in the last line.
        detail = _join_first_and_last_line(error) if isinstance(error, dist.DistError) else first_line(error)
        sentence = (
            f"rank {rank} ran out of GPU memory: set training.activationCheckpointing to Full, or lower "
            "training.perDeviceBatchSize or training.maxLength; if the weights alone do not fit, use more GPUs with FSDP, or "
            f"method QLoRA ({detail[: 2 * _MAX_LINE_CHARS]})"
        )
        return TrainingError("OutOfMemory", sentence, rank=rank)
    if is_loss_of_peer(error):
        sentence = (
            f"a collective failed, most likely because another rank exited ({_join_first_and_last_line(error)}): "
            "see the log of the rank that failed first"
        )
        return TrainingError(scratch.PEER_LOST, sentence, rank=rank)
    if isinstance(error, dist.DistError):
        sentence = (
            f"rank {rank} cannot take part in a collective ({_join_first_and_last_line(error)}): check distributed, and the variables "
            "of NCCL and Gloo in pods.train"
        )
        return TrainingError("CollectiveRefused", sentence, rank=rank)
    return error


def is_loss_of_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank exited: a consequence, never the cause."""
    text = str(error)
    if isinstance(error, dist.DistError):
        # Another rank causes every error that this rank does not cause itself.
        return not _FAULT_OF_RANK.search(text)
    return isinstance(error, RuntimeError) and bool(_GLOO.search(text) and _GLOO_LOSS.search(text))


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU has too little memory: for torch's allocator, or for what a library allocates itself."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and bool(_OUT_OF_MEMORY.search(str(error)))
    )


def _join_first_and_last_line(error: BaseException) -> str:
    """Return the first and the last line of an error: NCCL names the failed call in the first line, and the failed link in the last."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    first = lines[0][:_MAX_LINE_CHARS]
    if len(lines) == 1:
        return first
    return f"{first} ... {lines[-1].strip()[:_MAX_LINE_CHARS]}"
