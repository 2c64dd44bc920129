"""The kinds of memory that a step uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from finetune_trainer.train.model.memory import accounting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RANKS = 4


@pytest.fixture(autouse=True)
def four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def gather_as_fsdp(shard: torch.Tensor) -> torch.Tensor:
    output = torch.empty(RANKS * len(shard))
    dist.all_gather_single(output, shard)
    return output


def gather_as_dtensor(shard: torch.Tensor) -> torch.Tensor:
    """Gather as the optimizer Muon does."""
    mesh = init_device_mesh("cpu", (RANKS,))
    return DTensor.from_local(shard, mesh, [Shard(0)], run_check=False).full_tensor()


@pytest.mark.parametrize("gather", [gather_as_fsdp, gather_as_dtensor])
def test_the_output_of_an_all_gather_is_gathered_memory(
    gather: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with accounting.Accounting(torch.device("cpu")) as account:
        shard = torch.zeros(1024)
        whole = gather(shard)
    assert len(whole) == RANKS * 1024
    assert account.compute_peak()["gathered"] == RANKS * 4096
    assert account.traffic == {"all-gather": accounting.Traffic(1, RANKS * 4096)}
