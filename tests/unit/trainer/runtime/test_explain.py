"""Errors of GPUs and of collectives say what to do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from finetune_trainer.pod.exit_status import PodFailure, TrainingError
from finetune_trainer.train.runtime.explain import explain_error
from support import networks

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
NEEDS_MEMORY = (
    "rank {} ran out of GPU memory: set training.activationCheckpointing to Full, or lower "
    "training.perDeviceBatchSize or training.maxLength; if the weights alone do not fit, use more GPUs with FSDP, or "
    "method QLoRA (CUDA out of memory. Tried to allocate 2.00 GiB.)"
)
# As torch puts NCCL's words together.
NO_ROUTE = dist.DistBackendError(
    "NCCL error in: NCCLUtils.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \n"
    "Last error:\n"
    "socketStartConnect: Connect to 10.1.2.3<41523> failed : No route to host\n"
)


@pytest.mark.parametrize(
    ("error", "reason", "sentence"),
    [
        (OUT_OF_MEMORY, "OutOfMemory", NEEDS_MEMORY.format(3)),
        (
            NO_ROUTE,
            "PeerLost",
            "a collective failed, most likely because another rank exited (NCCL error in: NCCLUtils.cpp:94, unhandled system error (run "
            "with NCCL_DEBUG=INFO for details), NCCL version 2.27.3 ... socketStartConnect: Connect to 10.1.2.3<41523> failed : No "
            "route to host): see the log of the rank that failed first",
        ),
        (
            RuntimeError("gloo: connection closed by peer"),
            "PeerLost",
            "a collective failed, most likely because another rank exited (gloo: connection closed by peer): see the log of the "
            "rank that failed first",
        ),
    ],
)
def test_what_a_gpu_and_a_collective_say_is_told(error: Exception, reason: str, sentence: str) -> None:
    failure = explain_error(error, rank=3)
    assert isinstance(failure, TrainingError)
    assert (failure.reason, failure.message, failure.rank) == (reason, sentence, 3)


def test_other_errors_are_told_as_they_are() -> None:
    error = ValueError("something else")
    assert explain_error(error, rank=3) is error


def test_memory_that_is_short_in_a_common_step_is_told_alike() -> None:
    def fails() -> None:
        raise OUT_OF_MEMORY

    with networks.alone() as world, pytest.raises(PodFailure) as failure:
        world.agree(fails)
    assert (failure.value.reason, failure.value.message) == ("OutOfMemory", NEEDS_MEMORY.format(0))
