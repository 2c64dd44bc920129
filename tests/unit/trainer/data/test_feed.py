"""Batches come in the plan's order, ready before they are asked for, to each rank its own."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from finetune_trainer.train.data import pack
from finetune_trainer.train.data.feed import Collator, Examples, Feed
from finetune_trainer.train.runtime.device import Card
from finetune_trainer.train.runtime.distributed import World
from support import networks

if TYPE_CHECKING:
    from finetune_trainer.train.data.dataset import Split

STEPS = 3


def world(rank: int = 0, size: int = 1) -> World:
    return World(rank, size, rank, size, torch.device("cpu"))


ON_GPU = replace(world(), card=Card("NVIDIA H100", 80 * 2**30, (9, 0)))
WIDTHS: dict[str, tuple[World, dict[str, Any], int | None]] = {
    "packed on a GPU": (ON_GPU, {"packing": True}, 64),
    "packed on a CPU": (world(), {"packing": True}, None),
    "apart on a GPU": (ON_GPU, {"packing": False}, None),
    "compiled": (world(), {"packing": False, "compile": True}, 64),
}


@pytest.mark.parametrize("case", WIDTHS)
def test_rows_have_one_width_where_widths_cost(case: str) -> None:
    ranks, training, width = WIDTHS[case]
    collator = Collator.of(networks.recipe(Path("/base"), **training), ranks, 7)
    assert collator == Collator(ranks, 7, width, compiled=case == "compiled")


def plan_of(split: Split) -> pack.Plan:
    rows = pack.pack_examples(split.lengths, max_length=64, packing=True)
    return pack.Plan.of(rows, global_batch=4, seed=1, epochs=None, max_steps=STEPS)


def feed(rank: int = 0, size: int = 1, batch_size: int = 2) -> Feed:
    split = networks.random_split(examples=24)
    return Feed(Collator(world(rank, size), 0, 64), split, plan_of(split), batch_size)


def examples_of(fed: Feed, steps: range = range(STEPS)) -> list[list[int]]:
    return [[example for batch in fed.of_step(step) for example in batch.examples.tolist()] for step in steps]


def test_steps_have_the_examples_of_the_plan() -> None:
    split = networks.random_split(examples=24)
    plan = plan_of(split)
    fed = feed()
    assert examples_of(fed) == [
        [example for row in plan.of_step(step) for example in row] for step in range(STEPS)
    ]
    fed.close()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_share_a_step(size: int) -> None:
    all_examples = [sorted(examples) for examples in examples_of(feed())]
    of_ranks = [feed(rank, size, batch_size=1) for rank in range(size)]
    shares = [[fed.of_step(step) for fed in of_ranks] for step in range(STEPS)]
    for step, share in enumerate(shares):
        # As many batches on each rank, so that all take part in the same collectives.
        assert len({len(batches) for batches in share}) == 1
        shared_examples = [
            example for batches in share for batch in batches for example in batch.examples.tolist()
        ]
        assert sorted(shared_examples) == all_examples[step]


def test_the_next_step_is_made_while_one_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    ready = threading.Event()
    collate = pack.collate

    def seen(*args: object, **options: object) -> pack.Batch:
        threads.append(threading.current_thread().name)
        batch = collate(*args, **options)  # type: ignore[arg-type]
        if len(threads) == 4:
            ready.set()
        return batch

    monkeypatch.setattr(pack, "collate", seen)
    fed = feed()
    fed.of_step(0)
    assert ready.wait(10)
    assert [name.startswith("feed") for name in threads] == [False, False, True, True]
    fed.of_step(1)
    fed.of_step(2)
    fed.close()
    # Each batch was made once, and none after the last step.
    assert len(threads) == 2 * STEPS
    assert fed.waited_seconds > 0


def test_a_run_can_be_taken_up_at_any_step() -> None:
    expected = examples_of(feed())
    fed = feed()
    assert examples_of(fed, range(1, STEPS)) == expected[1:]
    # And turned back, as for a step that is done again.
    assert examples_of(fed, range(1)) == expected[:1]
    fed.close()


def test_an_error_in_a_batch_comes_with_its_step() -> None:
    split = networks.random_split(examples=24)
    fed = Feed(Collator(world(), 0, 8), split, plan_of(split), 2)
    with pytest.raises(ValueError, match="does not fit a width of 8"):
        fed.of_step(0)
    fed.close()


def test_evaluation_shares_out_what_there_is() -> None:
    split = networks.random_split(examples=5)
    batches = [
        list(Collator(world(rank, 2), 0, None).batches(Examples(split, [[0], [1], [2, 3], [4]]), 3))
        for rank in (0, 1)
    ]
    assert [[batch.examples.tolist() for batch in batches] for batches in batches] == [[[0, 1, 2, 3]], [[4]]]
