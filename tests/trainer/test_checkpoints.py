"""Checkpoints that several ranks write together."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING, Any

import pytest
import torch

from support import networks
from support.checkpoints import Run, compact, muon, same

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
    result = (failures, run.published, [step for step, _ in run.failed], run.state())
    torch.save(result, folder / f"rank-{world.rank}.pt")


def test_all_ranks_know_that_one_of_them_could_not_write(tmp_path: Path, world: World) -> None:
    networks.on_ranks(2, tmp_path / "rendezvous", one_of_two, tmp_path)
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in range(2))
    failures = [False, True, False, True, False]
    assert first[:3] == (failures, [1, 3, 5], [2, 4])
    assert second[:3] == (failures, [], [])
    again = Run(tmp_path, world)
    assert again.resume().step == 5
    assert same(again.state(), first[3])


# 8 rows of 1,024 numbers have 8 bits, and none of the other tensors.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "compact": {"optimizers_of": compact, "width": 1024},
    "compact with bf16 weights": {"optimizers_of": compact, "width": 1024, "dtype": torch.bfloat16},
    "muon": {"optimizers_of": muon},
}


def resumes(world: World, folder: Path) -> None:
    """Three ranks, which hold 3, 3 and 2 rows, write what one has written, and what they find is the same."""
    for name, options in OPTIMIZERS.items():
        run = Run(folder / name, world, **options)
        run.resume()
        state = run.state()
        if world.leads:
            torch.save(state, folder / f"{name}.pt")
        run.train()
        run.save()
        if world.leads:
            torch.save(run.state(), folder / f"{name} after.pt")
        else:
            run.state()


def test_any_number_of_ranks_resumes_what_an_optimizer_keeps(tmp_path: Path, world: World) -> None:
    states = {}
    for name, options in OPTIMIZERS.items():
        run = Run(tmp_path / name, world, **options)
        run.train_and_save(2)
        run.checkpointer.drain()
        states[name] = run.state()
    networks.on_ranks(3, tmp_path / "rendezvous", resumes, tmp_path)
    for name, options in OPTIMIZERS.items():
        assert same(torch.load(tmp_path / f"{name}.pt"), states[name]), name
        again = Run(tmp_path / name, world, **options)
        assert again.resume().step == 3
        assert same(again.state(), torch.load(tmp_path / f"{name} after.pt")), name
    kinds = {name for name, value in states["compact"].items() if value.dtype == torch.uint8}
    assert kinds == {"1.weight exp_avg", "1.weight exp_avg_sq"}


@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_resumed_run_takes_the_same_steps(tmp_path: Path, world: World, options: dict[str, Any]) -> None:
    first = Run(tmp_path, world, **options)
    first.train_and_save(2)
    first.checkpointer.drain()
    second = Run(tmp_path, world, **options)
    second.resume()
    for run in (first, second):
        run.train()
        run.train()
    assert same(first.state(), second.state())
