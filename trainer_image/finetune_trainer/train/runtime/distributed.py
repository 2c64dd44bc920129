"""The ranks of a job: this process's rank, and decisions that all ranks take together."""

from __future__ import annotations

import os
import traceback
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from finetune_crds.contract import EXIT_PREEMPTED
from finetune_trainer.pod.exit_status import PodFailure, PreemptedError, describe
from finetune_trainer.train.runtime.device import Card
from finetune_trainer.train.runtime.explain import explain_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from finetune_trainer.train.runtime.preemption import Preemption

T = TypeVar("T")
# A group must have a timeout: this one is longer than any call of `World.agree` takes.
_HOST_GROUP_TIMEOUT = timedelta(days=2)


@dataclass(frozen=True)
class World:
    """This rank's place among all ranks: `rank` of `size` in the job, `local_rank` of `local_size` in the pod."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    preemption: Preemption | None = None
    host: dist.ProcessGroup | None = None
    """The group for calls without a deadline, such as downloading a model."""
    card: Card | None = None
    """The GPU of this rank; None on a CPU."""

    @property
    def leads(self) -> bool:
        """Whether this is rank 0: only rank 0 prints, tracks, exports and registers."""
        return self.rank == 0

    @property
    def leads_pod(self) -> bool:
        """Whether this is the first rank of its pod: only that rank downloads and tokenizes."""
        return self.local_rank == 0

    def say(self, line: str) -> None:
        """Print a line, on rank 0 only."""
        if self.leads:
            print(line, flush=True)

    def agree(self, call: Callable[[], T]) -> T:
        """Run `call` on every rank and return its result; when any rank fails, every rank raises that rank's error.

        All pods then end with the same exit code and sentence, and no rank waits for a rank that failed. SIGTERM to
        any rank interrupts its `call` and counts as a failure, so `call` must not run collectives.
        """
        result: T | None = None
        # The exit code, the reason and the message.
        failure: tuple[int, str, str] | None = None
        try:
            with self.preemption.interrupt_on_sigterm() if self.preemption else nullcontext():
                result = call()
        except Exception as error:  # noqa: BLE001 - raised again below, on every rank
            code, outcome = describe(explain_error(error, self.rank))
            assert outcome.error is not None  # noqa: S101 - describe() always sets it
            failure = (code, outcome.error.reason, outcome.error.message)
            if not isinstance(error, PodFailure):
                traceback.print_exc()
        for rank, rank_failure in enumerate(self.gather(failure)):
            if rank_failure is not None:
                code, reason, message = rank_failure
                if code == EXIT_PREEMPTED:
                    checkpoint_step = self.preemption.checkpoint_step if self.preemption else None
                    raise PreemptedError(message, checkpoint_step, reason)
                agreed_failure = PodFailure(reason, message, rank=rank)
                agreed_failure.exit_code = code
                raise agreed_failure
        return result  # type: ignore[return-value]

    def agree_in_pod(self, call: Callable[[], T]) -> T:
        """Run `call` on the first rank of each pod, and return its result on all ranks; errors as in `agree`."""
        result = self.agree(lambda: call() if self.leads_pod else None)
        # torchrun numbers the ranks pod by pod.
        return self.gather(result)[self.rank - self.local_rank]  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank, in rank order."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.host)
        return values

    def broadcast(self, value: T) -> T:
        """Return rank 0's value, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.host)
        return box[0]

    def destroy_group(self) -> None:
        """Destroy the process group, on all ranks together, when only rank 0 has work left."""
        self.gather(None)
        dist.destroy_process_group()

    def sum_over_ranks(self, *values: float) -> list[float]:
        """Return the sums of host-side numbers over all ranks; never waits for the GPU."""
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return [float(value) for value in sums]

    def max_over_ranks(self, value: float) -> float:
        """Return the maximum of a host-side number over all ranks; never waits for the GPU."""
        maximum = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(maximum, dist.ReduceOp.MAX)
        return float(maximum)


@contextmanager
def join_ranks(*, timeout_seconds: int, preemption: Preemption | None = None) -> Iterator[World]:
    """Join the process group of the launcher's environment, and leave it at the end unless an error occurs on GPUs.

    Collectives on host tensors use gloo, on CUDA tensors NCCL, with `timeout_seconds` each. Decisions (`agree`) have
    no such timeout: a rank may work for hours before a decision. In both cases, the end of a rank is detected at once.
    """
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        timeout=timedelta(seconds=timeout_seconds),
        device_id=device if cuda else None,
    )
    has_ended = False
    try:
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        host = dist.new_group(backend="gloo", timeout=_HOST_GROUP_TIMEOUT)
        yield World(
            rank=dist.get_rank(),
            size=dist.get_world_size(),
            local_rank=local_rank,
            local_size=local_size,
            device=device,
            preemption=preemption,
            host=host,
            card=Card.of(device),
        )
        has_ended = True
    finally:
        # NB: all ranks destroy a group of NCCL together. After an error, this rank would wait for the others before it
        # reports the error, and they may still wait for this rank in a collective (pytorch/torchtitan#1342).
        if dist.is_initialized() and (has_ended or not cuda):
            dist.destroy_process_group()
