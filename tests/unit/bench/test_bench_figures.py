"""What the benchmark of the trainer reads out of what its contenders print and write."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bench.trainer import contenders, shapes
from bench.trainer.process import Line, RunFailedError
from bench.trainer.work import Work

WORK = Work(
    model="/model",
    rows="/rows.jsonl",
    probe="/probe.jsonl",
    row_tokens=200.0,
    out="/out",
    method="Full",
    precision="FP32",
    sequences=2,
    warmup=1,
    steps=3,
    processes=2,
)


def progress(step: int, speed: str, when: float) -> Line:
    """A progress line of the trainer."""
    return Line(f"step {step}/1,200  25%  loss 5.1234  lr 1.00e-04  grad 0.50  {speed} tok/s  eta 3s", when)


def test_steps_are_timed_by_when_their_lines_come() -> None:
    lines = [
        Line("1,000 examples with 215,861 tokens", 1.0),
        progress(1, "900", 10.0),
        progress(2, "1,024", 12.0),
        Line("evaluation at step 2: loss 1.0", 12.5),
        progress(3, "2,048.5", 13.0),
    ]
    assert contenders.read_progress(lines) == [2.0, 1.0]


def test_what_ours_computes_is_read_from_its_lines() -> None:
    lines = [
        Line("evaluation before training: loss 9.0123", 1.0),
        progress(1, "900", 2.0),
        progress(2, "900", 3.0),
    ]
    assert contenders.read_check(lines) == (9.0123, 0.5)
    assert [math.isnan(value) for value in contenders.read_check(lines[:0])] == [True, True]


def test_tokens_of_a_sequence_are_those_of_the_corpus() -> None:
    said = (
        "1,000 examples with 215,861 tokens in 106 sequences (99% full); 12 steps of 2 sequences on 2 ranks"
    )
    assert contenders.tokens_of_sequence([Line("resuming", 0.5), Line(said, 1.0)]) == 215_861 / 106
    with pytest.raises(RunFailedError, match="how many tokens"):
        contenders.tokens_of_sequence([progress(1, "900", 2.0)])


@pytest.mark.parametrize(
    ("every", "changed", "expected"),
    [
        # Steps 2 to 7; a checkpoint after 3 and after 6.
        (3, [False, False, True, True, False, True], [False, False, True, True, False, True]),
        # One that is too fast to be seen is in flight nevertheless, and a change before a save is no save.
        (3, [False, True, False, False, True, False], [False, False, True, False, False, True]),
        (1, [True, False], [True, True]),
    ],
)
def test_a_checkpoint_is_in_flight_while_its_folder_changes(
    every: int, changed: list[bool], expected: list[bool]
) -> None:
    assert contenders.in_flight(changed, every=every) == expected


def test_figures_are_of_all_ranks() -> None:
    ranks = [[(100, 128, 1.0), (200, 256, 1.5)], [(110, 128, 1.25), (220, 256, 1.0)]]
    assert contenders.read_steps(ranks) == [(210, 256, 1.25), (420, 512, 1.5)]
    figures = contenders.Figures("", 9.0, 0.5, 300.0, 0.98, [1.0, 2.0], [False, True], 1, None)
    assert (figures.tokens_per_second, figures.flying, figures.resting) == (200.0, [2.0], [1.0])


def test_memory_is_of_the_largest_process_of_each_rank() -> None:
    told: list[dict[str, Any]] = [
        {"rank": 0, "host": 5, "device": 70},
        {"rank": 0, "host": 9, "device": None},
        {"rank": 1, "host": 4, "device": 80},
    ]
    assert contenders.read_memory(told) == {"host_bytes": 13, "device_bytes": 150}
    assert contenders.read_memory([{"rank": 0, "host": 5, "device": None}]) == {
        "host_bytes": 5,
        "device_bytes": None,
    }


def test_our_recipe_fits_the_schema_and_takes_changes() -> None:
    from finetune_crds.recipe import Recipe

    changes = {"training.compile": True, "distributed.port": 29_501}
    recipe = Recipe.model_validate(contenders.recipe(WORK, changes, checkpoint_steps=2))
    assert recipe.checkpoint is not None
    found = (
        recipe.training.packing,
        recipe.training.max_steps,
        recipe.training.compile,
        recipe.distributed.port,
        recipe.distributed.processes_per_node,
        recipe.checkpoint.uri,
        recipe.checkpoint.every_steps,
    )
    assert found == (True, 4, True, 29_501, 2, "/out/checkpoints", 2)


def test_shapes_have_the_parameters_of_their_models() -> None:
    assert {name: shape.parameters for name, shape in shapes.SHAPES.items()} == {
        "small": 4_999_424,
        "llama-3.2-1b": 1_235_814_400,
        "llama-3.1-8b": 8_030_261_248,
    }


def test_operations_leave_out_what_is_not_multiplied() -> None:
    tied, apart = shapes.LLAMA_1B, shapes.LLAMA_8B
    attention = 12 * 32 * 4096 * 2048
    assert tied.operations(0) == 6 * 1_235_814_400 == tied.operations_needed(0)
    assert apart.operations(2048) == 6 * (8_030_261_248 - 128_256 * 4096) + attention
    assert apart.operations_needed(2048) == 4 * (8_030_261_248 - 128_256 * 4096) + attention


def test_peaks_are_known_by_the_names_that_drivers_give() -> None:
    names = ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "Tesla T4", None]
    assert [shapes.peak(name) for name in names] == [989e12, 312e12, None, None]
