"""The gang of ranks: who this process is, and how all of them come to the same decision."""

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
from finetune_trainer.outcome import PodFailure, PreemptedError, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from finetune_trainer.train.runtime.preemption import Preemption

T = TypeVar("T")
_PATIENCE = timedelta(days=2)


@dataclass(frozen=True)
class World:
    """This rank's place among all ranks."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    preemption: Preemption | None = None
    host: dist.ProcessGroup | None = None
    """For what takes as long as it takes: a rank that downloads a model is not lost."""

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which alone prints, tracks, exports and registers."""
        return self.rank == 0

    @property
    def leads_pod(self) -> bool:
        """Whether this is its pod's first rank, which alone downloads and tokenises."""
        return self.local_rank == 0

    def say(self, line: str) -> None:
        """Print a line once, whatever the number of ranks."""
        if self.leads:
            print(line, flush=True)

    def agree(self, step: Callable[[], T]) -> T:
        """Run `step` on every rank; when it fails on any, every rank raises the first failing rank's error.

        So all pods end with the same exit code and sentence, and no rank waits for one that is gone. SIGTERM to any
        rank ends `step` there, and is such an error too: `step` takes part in no collective.
        """
        result: T | None = None
        failure: tuple[int, str, str] | None = None
        try:
            with self.preemption.interrupting() if self.preemption else nullcontext():
                result = step()
        except Exception as error:  # noqa: BLE001 - raised again below, on every rank
            code, told = describe(error)
            assert told.error is not None  # noqa: S101 - describe() always tells
            failure = (code, told.error.reason, told.error.message)
            if not isinstance(error, PodFailure):
                traceback.print_exc()
        for rank, found in enumerate(self.gather(failure)):
            if found is not None:
                code, reason, message = found
                if code == EXIT_PREEMPTED:
                    raise PreemptedError(
                        message, self.preemption.checkpoint_step if self.preemption else None
                    )
                agreed = PodFailure(reason, message, rank=rank)
                agreed.exit_code = code
                raise agreed
        return result  # type: ignore[return-value]

    def agree_in_pod(self, step: Callable[[], T]) -> T:
        """Run `step` on the first rank of each pod, and have its result on all of them; errors as in `agree`."""
        found = self.agree(lambda: step() if self.leads_pod else None)
        # torchrun numbers the ranks pod by pod.
        return self.gather(found)[self.rank - self.local_rank]  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.host)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.host)
        return box[0]

    def part(self) -> None:
        """End the gang, all ranks together: rank 0 may have minutes of work yet, the others are done."""
        self.gather(None)
        dist.destroy_process_group()

    def total(self, *values: float) -> list[float]:
        """The sums of small host-side numbers over all ranks; never waits for a GPU."""
        summed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(summed)
        return [float(value) for value in summed]

    def greatest(self, value: float) -> float:
        """The greatest of a small host-side number over all ranks; never waits for a GPU."""
        greatest = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(greatest, dist.ReduceOp.MAX)
        return float(greatest)


def is_loss_of_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone, which is never the cause but its consequence."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in str(error) or "NCCL" in str(error))
    )


@contextmanager
def joined(*, timeout_seconds: int, preemption: Preemption | None = None) -> Iterator[World]:
    """Join the process group that the launcher's environment describes, and leave it at the end.

    Collectives on host tensors go over gloo, those on CUDA tensors over NCCL; each may take `timeout_seconds`, but
    for decisions, before which a rank may have hours of work. A rank that dies is noticed at once in any case.
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
    try:
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        host = dist.new_group(backend="gloo", timeout=_PATIENCE)
        yield World(dist.get_rank(), dist.get_world_size(), local_rank, local_size, device, preemption, host)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
