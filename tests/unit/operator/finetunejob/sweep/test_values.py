"""Which values the trials of a sweep get."""

from __future__ import annotations

from typing import Any

import pytest

from finetune_crds.sweep import Sweep
from finetune_operator.finetunejob.sweep.values import (
    find_mistake,
    format_value,
    is_whole_number,
    list_trials,
)

Json = dict[str, Any]
RATE: Json = {"field": "training.learningRate", "values": [1e-4, 1e-3]}
RANK: Json = {"field": "method.lora.rank", "values": [8, 16]}
RATES: Json = {"field": "training.learningRate", "range": {"min": 1e-5, "max": 1e-3, "scale": "Log"}}


def sweep(*parameters: Json, **fields: Any) -> Sweep:
    body = {"parameters": list(parameters), "algorithm": "Grid"} | fields
    return Sweep.model_validate(body)


def with_range(field: str, **interval: Any) -> Json:
    return {"field": field, "range": interval}


# A parameter of a grid, and its values in the order of the trials.
GRIDS: dict[str, tuple[Json, list[Any]]] = {
    "values": (RATE, [1e-4, 1e-3]),
    "values of any type": (
        {"field": "method", "values": [{"type": "Full"}, {"type": "LoRA", "lora": {"rank": 8}}]},
        [{"type": "Full"}, {"type": "LoRA", "lora": {"rank": 8}}],
    ),
    "a linear range": (with_range("training.warmupRatio", min=0, max=0.3, step=0.1), [0, 0.1, 0.2, 0.3]),
    "a range that its steps do not fill": (
        with_range("training.warmupRatio", min=0.1, max=0.35, step=0.1),
        [0.1, 0.2, 0.3],
    ),
    "a logarithmic range": (
        with_range("training.learningRate", min=1e-5, max=1e-3, scale="Log", step=10),
        [1e-5, 1e-4, 1e-3],
    ),
    "whole numbers": (with_range("method.lora.rank", min=8, max=64, scale="Log", step=2), [8, 16, 32, 64]),
    "whole numbers of an optional field": (with_range("training.maxSteps", min=1, max=3, step=1), [1, 2, 3]),
}


@pytest.mark.parametrize(("parameter", "expected"), GRIDS.values(), ids=GRIDS)
def test_a_grid_has_each_value(parameter: Json, expected: list[Any]) -> None:
    values = [trial[parameter["field"]] for trial in list_trials(sweep(parameter))]
    assert values == pytest.approx(expected) if isinstance(expected[0], float) else values == expected
    assert [type(value) for value in values] == [type(values[0])] * len(values)


def test_a_grid_changes_its_last_parameter_fastest() -> None:
    assert [
        (trial["training.learningRate"], trial["method.lora.rank"])
        for trial in list_trials(sweep(RATE, RANK))
    ] == [
        (1e-4, 8),
        (1e-4, 16),
        (1e-3, 8),
        (1e-3, 16),
    ]


def test_whole_numbers_are_those_of_the_api() -> None:
    fields = {
        "method.lora.rank": True,
        "training.maxSteps": True,
        "training.seed": True,
        "distributed.nodes": True,
        "training.learningRate": False,
        "training.epochs": False,
        "training.packing": False,
        "training.scheduler": False,
        "method": False,
        "training.nothing": False,
    }
    assert {field: is_whole_number(field) for field in fields} == fields


def test_random_values_are_in_their_ranges_and_follow_from_the_seed() -> None:
    parameters = (
        RATES,
        with_range("method.lora.rank", min=4, max=8),
        with_range("training.warmupRatio", min=0, max=0.5, step=0.25),
        {"field": "training.scheduler", "values": ["Linear", "Cosine"]},
    )
    trials = list_trials(sweep(*parameters, algorithm="Random", trials=60))
    assert trials == list_trials(sweep(*parameters, algorithm="Random", trials=60))
    # Trials are independent of how many follow.
    assert trials[:20] == list_trials(sweep(*parameters, algorithm="Random", trials=20))
    assert trials != list_trials(sweep(*parameters, algorithm="Random", trials=60, seed=7))
    rates = [trial["training.learningRate"] for trial in trials]
    assert min(rates) >= 1e-5
    assert max(rates) <= 1e-3
    # A logarithmic scale: half of the rates are below the geometric mean.
    assert 20 <= sum(rate < 1e-4 for rate in rates) <= 40
    assert {trial["method.lora.rank"] for trial in trials} == {4, 5, 6, 7, 8}
    assert {trial["training.warmupRatio"] for trial in trials} == {0, 0.25, 0.5}
    assert {trial["training.scheduler"] for trial in trials} == {"Linear", "Cosine"}


def test_the_first_random_trials_stay_the_same_in_later_versions() -> None:
    assert list_trials(sweep(RATES, RANK, algorithm="Random", trials=3)) == [
        {"training.learningRate": 9.63312e-05, "method.lora.rank": 8},
        {"training.learningRate": 1.05219e-05, "method.lora.rank": 16},
        {"training.learningRate": 6.15546e-05, "method.lora.rank": 8},
    ]


def test_random_draws_no_combination_twice() -> None:
    trials = list_trials(sweep(RATE, RANK, algorithm="Random", trials=20))
    assert len(trials) == len({str(trial) for trial in trials}) == 4


MANY = with_range("training.warmupRatio", min=0, max=1, step=0.02)
MISTAKES: dict[str, tuple[Sweep, str | None]] = {
    "a grid": (sweep(RATE, RANK), None),
    "101 combinations": (
        sweep(with_range("training.seed", min=0, max=100, step=1)),
        "spec.sweep.parameters have more than 100 combinations: remove values, or set spec.sweep.algorithm to Random and "
        "spec.sweep.trials",
    ),
    "100 combinations": (sweep(with_range("training.seed", min=1, max=100, step=1)), None),
    "a huge grid": (
        sweep(*({**MANY, "field": f"training.x{number}"} for number in range(8))),
        "spec.sweep.parameters have more than 100 combinations: remove values, or set spec.sweep.algorithm to Random and "
        "spec.sweep.trials",
    ),
    "random trials of a huge range": (sweep(MANY, algorithm="Random", trials=2), None),
    "a value twice": (
        sweep({"field": "training.seed", "values": [1, 2, 1]}),
        "spec.sweep.parameters have the same value twice for training.seed: remove one of them",
    ),
}


@pytest.mark.parametrize(("body", "mistake"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_of_a_sweep(body: Sweep, mistake: str | None) -> None:
    assert find_mistake(body) == mistake


def test_the_status_has_no_long_values() -> None:
    assert (format_value(2e-4), format_value({"b": 1, "a": True})) == ("0.0002", '{"a": true, "b": 1}')
    assert len(format_value("x" * 1000)) == 256
