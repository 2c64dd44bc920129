"""Checkpoints that several ranks write together."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import torch

from support import networks
from support.checkpoints import Run, same

if TYPE_CHECKING:
    from pathlib import Path

    from finetune_trainer.train.runtime.distributed import World

UNLIMITED = resource.RLIM_INFINITY


def one_of_two(world: World, folder: Path) -> None:
    """A rank that may write no large file for a while, and one that may."""
    run = Run(folder, world)
    failures = []
    for step in range(1, 6):
        limited = world.rank == 1 and step in (2, 4)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if limited else UNLIMITED, UNLIMITED))
        run.train()
        run.save(wait=step >= 4)
        run.checkpointer.drain()
        failures.append(run.checkpointer.failure is not None)
    found = (failures, run.published, [step for step, _ in run.failed], run.state())
    torch.save(found, folder / f"rank-{world.rank}.pt")


def test_all_ranks_know_that_one_of_them_could_not_write(tmp_path: Path, world: World) -> None:
    networks.on_ranks(2, tmp_path / "rendezvous", one_of_two, tmp_path)
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(2))
    failures = [False, True, False, True, False]
    assert first[:3] == (failures, [1, 3, 5], [2, 4])
    assert second[:3] == (failures, [], [])
    again = Run(tmp_path, world)
    assert again.resume().step == 5
    assert same(again.state(), first[3])
