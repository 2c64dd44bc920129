"""Errors of GPUs and of collectives say what to do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from finetune_trainer.pod.exit_status import PodFailure, TrainingError
from finetune_trainer.train.runtime.explain import explain_error, is_loss_of_peer
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


DUPLICATE_GPU = dist.DistBackendError(
    "NCCL error in: ProcessGroupNCCL.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.27.3\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
    "Last error:\n"
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 7000\n"
)
PAIR = "[/pytorch/third_party/gloo/gloo/transport/tcp/"
# A lack of memory of the CUDA runtime, of cuBLAS, and of NCCL, which do not use torch's allocator; and what is reported of it.
OTHER_LACKS: list[tuple[BaseException, str]] = [
    (error, NEEDS_MEMORY.format(3).replace("CUDA out of memory. Tried to allocate 2.00 GiB.", reported))
    for error, reported in (
        (
            RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in ..."),
            "CUDA error: out of memory",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        ),
        (
            dist.DistBackendError(
                "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3\n"
                "ncclUnhandledCudaError: Call to CUDA function failed.\n"
                "Last error:\n"
                "Cuda failure 2 'out of memory'"
            ),
            "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3 ... Cuda "
            "failure 2 'out of memory'",
        ),
    )
]
# What torch 2.13 raises in a collective, and whether another rank is its cause.
LOSSES: list[tuple[BaseException, bool]] = [
    (RuntimeError(f"{PAIR}pair.cc:553] Connection closed by peer [10.1.2.3]:45466."), True),
    (RuntimeError(f"{PAIR}pair.cc:537] Read error [10.1.2.3]:3285: Connection reset by peer."), True),
    (
        RuntimeError(f"{PAIR}unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete"),
        True,
    ),
    (NO_ROUTE, True),
    (
        dist.DistBackendError(
            "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE)"
        ),
        True,
    ),
    (
        dist.DistNetworkError(
            "The client socket has timed out after 5000ms while trying to connect to (a, 29500)."
        ),
        True,
    ),
    (dist.DistStoreError("Socket Timeout"), True),
    (DUPLICATE_GPU, False),
    (
        dist.DistBackendError("NCCL error in: a.cpp:9\nncclInvalidArgument: Invalid value for an argument."),
        False,
    ),
    (
        dist.DistBackendError(
            "NCCL error in: a.cpp:9\nncclUnhandledCudaError: Call to CUDA function failed."
        ),
        False,
    ),
    (
        dist.DistBackendError(
            "NCCL error in: a.cpp:9\nncclSystemError: System call failed.\nLast error:\n"
            "Error while creating shared memory segment /dev/shm/nccl-a: No space left on device"
        ),
        False,
    ),
    (
        dist.DistNetworkError(
            "The server socket has failed to listen on any local network address. EADDRINUSE"
        ),
        False,
    ),
    (
        RuntimeError(
            "[enforce fail at gloo/transport/tcp/device.cc:84] ifname. Unable to find address for: eth9"
        ),
        False,
    ),
    (
        RuntimeError("ProcessGroupGloo::allgather: invalid tensor size at index 0 (expected (3), got (2))"),
        False,
    ),
    (RuntimeError("Invalid scalar type"), False),
    (RuntimeError("NCCL WARN invalid usage"), False),
    (ValueError("gloo: connection closed by peer"), False),
]


@pytest.mark.parametrize(("error", "is_loss"), LOSSES, ids=[str(error).strip()[-40:] for error, _ in LOSSES])
def test_a_loss_of_a_peer_is_told_from_a_fault_of_the_rank(error: BaseException, is_loss: bool) -> None:
    assert is_loss_of_peer(error) is is_loss


@pytest.mark.parametrize(
    ("error", "reason", "sentence"),
    [
        (
            DUPLICATE_GPU,
            "CollectiveRefused",
            "rank 3 cannot take part in a collective (NCCL error in: ProcessGroupNCCL.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for "
            "details), NCCL version 2.27.3 ... Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 7000): check distributed, "
            "and the variables of NCCL and Gloo in pods.train",
        ),
        (OUT_OF_MEMORY, "OutOfMemory", NEEDS_MEMORY.format(3)),
        *((error, "OutOfMemory", sentence) for error, sentence in OTHER_LACKS),
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
