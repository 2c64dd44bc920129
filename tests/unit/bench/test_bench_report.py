"""What the benchmark makes of the figures: ratios, goals, JSON and table."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from bench.trainer import report
from bench.trainer.contenders import CHECKPOINT, ISOLATED, LONGEST, OURS, PADDED, TRL, Figures
from bench.trainer.report import Goal, Result
from bench.trainer.shapes import LLAMA_1B, LLAMA_8B, SMALL, Shape

ROWS = {"rows": 10, "mean": 200.0, "percentiles": {"0": 100, "10": 120, "50": 200, "90": 280, "100": 300}}
MACHINE = {
    "gpu": None,
    "gpus": 0,
    "cpu": "Fast CPU",
    "cores": 2,
    "versions": {"torch": "2.13.0", "trl": None},
}


def figures(tokens: float, *seconds: float, flying: int = 0) -> Figures:
    """Figures of a run, the first `flying` steps of which had a checkpoint in flight."""
    flights = [at < flying for at in range(len(seconds))]
    return Figures("how", 9.0, 0.5, tokens, 0.98, list(seconds), flights, 2**30, None)


def result() -> Result:
    """Three rounds, one of which TRL did not end."""
    found = Result(SMALL, processes=2, gpu=None, rows=ROWS)
    found.rounds = {
        OURS: {1: figures(4000, 1.0, 1.0), 2: figures(4000, 2.0), 3: figures(4000, 1.0)},
        CHECKPOINT: {1: figures(4000, 1.1, 1.0, flying=1), 2: figures(4000, 2.02, 2.0, flying=1)},
        PADDED: {1: figures(400, 1.0), 2: figures(400, 1.0), 3: figures(400, 1.0)},
        LONGEST: {1: figures(4000, 2.0)},
        TRL: {2: figures(4000, 2.0), 3: figures(4000, 1.0)},
        ISOLATED: {1: replace(figures(4000, 1.25), host_bytes=2**29)},
    }
    found.failures = {TRL: ["trl_packed ended with exit code 1:\nTraceback"]}
    return found


def test_ratios_are_taken_within_rounds() -> None:
    found = result()
    assert (found.times(PADDED), found.times(TRL)) == (10.0, 1.0)
    costs = (found.checkpoint_cost(), found.checkpoint_cost_within())
    assert [round(cost or 0.0, 3) for cost in costs] == [0.055, 0.055]
    assert found.mfu(OURS) is None


def test_goals_say_by_how_much_they_are_missed() -> None:
    goals = [
        Goal("", 5.2, 5.0, least=True),
        Goal("", 0.99, 1.1, least=True),
        Goal("", 0.075, 0.05, least=False),
        Goal("", -0.01, 0.05, least=False),
        Goal("", 1.2, 1.0, least=False),
        Goal("", None, 5.0, least=True),
    ]
    assert [goal.verdict() for goal in goals] == [
        "reached",
        "missed by 10%",
        "missed by 2.5 points",
        "reached",
        "missed by 20%",
        "not measured",
    ]


def test_the_table_has_all_contenders_and_goals() -> None:
    found = result()
    del found.rounds[PADDED]
    found.failures[PADDED] = ["padded took longer than 60 s:\n..."]
    assert report.as_markdown(MACHINE, "2026-01-02", [found]).splitlines() == [
        "2026-01-02; Fast CPU, 2 cores; torch 2.13.0",
        "",
        "**small**, 5.0 M parameters, SFT Full, FP32, 2 x 1 sequences of 2,048 a step; 10 rows of 100 to 300 tokens "
        "(10%: 120, median 200, 90%: 280)",
        "",
        "| | how | useful tokens/s | least to most | ours / it | tokens a step | useful slots | step, s | memory, GiB | MFU |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        "| ours | how | 4,000 | 2,000 to 4,000 | 1.00x | 4,000 | 98% | 1.000 | 1.00 | - |",
        "| ours-checkpoint | how | 2,900 | 1,990 to 3,810 | 1.03x | 4,000 | 98% | 1.530 | 1.00 | - |",
        "| padded | padded took longer than 60 s | - | - | - | - | - | - | - | - |",
        "| padded-to-longest | how | 2,000 | 2,000 to 2,000 | 2.00x | 4,000 | 98% | 2.000 | 1.00 | - |",
        "| trl | how; failed rounds: 1 | 3,000 | 2,000 to 4,000 | 1.00x | 4,000 | 98% | 1.500 | 1.00 | - |",
        "| trl-isolated | how | 3,200 | 3,200 to 3,200 | 1.25x | 4,000 | 98% | 1.250 | 0.50 | - |",
        "",
        "| goal | limit | measured | |",
        "|---|---:|---:|---|",
        "| ours / padded to the longest, useful tokens/s | at least 1.5x | 2.00x | reached |",
        "| ours / TRL packed, useful tokens/s | at least 2x | 1.00x | missed by 50% |",
        "| ours / TRL with our attention, useful tokens/s | at least 1.3x | 1.25x | missed by 4% |",
        "| peak memory, ours / TRL packed | at most 1x | 1.00x | reached |",
        "| useful slots of ours | at least 97% | 98.0% | reached |",
        "| step time added by a checkpoint in flight | at most 5% | 5.5% | missed by 0.5 points |",
    ]


def test_a_row_that_computes_something_else_is_void() -> None:
    found = result()
    found.rounds[TRL][2] = replace(found.rounds[TRL][2], loss=9.0003)
    found.rounds[LONGEST][1] = replace(found.rounds[LONGEST][1], gradient=0.0)
    found.rounds[ISOLATED][1] = replace(found.rounds[ISOLATED][1], loss=math.nan)
    assert {name: found.void(name) for name in (OURS, PADDED, LONGEST, TRL, ISOLATED)} == {
        OURS: None,
        PADDED: None,
        LONGEST: "void: its first gradients have the norm 0",
        TRL: "void: loss 9.0003 on the probe, ours 9.0000",
        ISOLATED: "void: loss nan on the probe, ours 9.0000",
    }
    assert [found.times(name) for name in (LONGEST, TRL, ISOLATED)] == [None, None, None]
    assert "void" in "\n".join(report.as_markdown(MACHINE, "2026-01-02", [found]).splitlines()[6:12])


@pytest.mark.parametrize(("shape", "processes", "goal"), [(LLAMA_1B, 1, 0.55), (LLAMA_8B, 2, 0.5)])
def test_gpus_have_a_goal_of_their_own_and_sharded_ones_a_lower_one(
    shape: Shape, processes: int, goal: float
) -> None:
    found = Result(shape, processes=processes, gpu="NVIDIA H100 80GB HBM3", rows=ROWS)
    found.rounds = {OURS: {1: figures(20_000, 1.0)}}
    expected = 20_000 * shape.operations(2048) / (processes * 989e12)
    assert found.goals()[-1] == Goal("MFU of ours", expected, goal, least=True)
    needed = found.mfu_needed(OURS)
    assert needed is not None
    assert needed < expected


def test_the_json_can_be_written_and_names_its_schema() -> None:
    whole = json.loads(json.dumps(report.as_json(MACHINE, "2026-01-02", [result()])))
    assert (whole["schema"], list(whole["models"][0]["contenders"])) == (
        "finetune-bench-trainer/2",
        [OURS, CHECKPOINT, PADDED, LONGEST, TRL, ISOLATED],
    )
    assert whole["models"][0]["contenders"][TRL] == {
        "tokensPerSecond": 3000.0,
        "mfu": None,
        "mfuNeeded": None,
        "useful": 0.98,
        "void": None,
        "failures": ["trl_packed ended with exit code 1:\nTraceback"],
        "rounds": [
            {
                "round": number,
                "description": "how",
                "loss": 9.0,
                "gradient": 0.5,
                "tokensPerSecond": speed,
                "tokensPerStep": 4000,
                "stepSeconds": [second],
                "checkpointInFlight": [False],
                "hostBytes": 2**30,
                "deviceBytes": None,
            }
            for number, speed, second in ((2, 2000.0, 2.0), (3, 4000.0, 1.0))
        ],
    }
