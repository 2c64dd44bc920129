"""What the sampler of a sweep is asked, and what its answers mean."""

from __future__ import annotations

import math
from typing import Any

from finetune_crds.sweep import Sweep, Trial
from finetune_operator.finetunejob.sweep import search_space, values
from finetune_operator.finetunejob.sweep.sampler import suggest

Json = dict[str, Any]
PARAMETERS: list[Json] = [
    {"field": "training.learningRate", "range": {"min": 1e-5, "max": 1e-3, "scale": "Log"}},
    {"field": "method.lora.rank", "range": {"min": 8, "max": 64, "scale": "Log", "step": 2}},
    {"field": "method.lora.dropout", "range": {"min": 0, "max": 0.5}},
    {"field": "training.scheduler", "values": ["Linear", "Cosine"]},
    {"field": "training.gradientAccumulation", "range": {"min": 1, "max": 4}},
]


def sweep(*parameters: Json, **fields: Any) -> Sweep:
    body = {"parameters": list(parameters or PARAMETERS), "algorithm": "TPE", "trials": 20, "seed": 1}
    return Sweep.model_validate(body | fields)


def record(number: int, trial_values: values.Values, phase: str, metric: float | None = None) -> Trial:
    texts = {field: values.format_value(value) for field, value in trial_values.items()}
    return Trial.model_validate({"n": number, "parameters": texts, "phase": phase, "metric": metric})


VALUES: Json = {
    "training.learningRate": 2e-4,
    "method.lora.rank": 32,
    "method.lora.dropout": 0.25,
    "training.scheduler": "Cosine",
    "training.gradientAccumulation": 3,
}


def test_the_request_has_the_space_the_trials_and_a_seed_for_each_number() -> None:
    trials = [
        record(1, VALUES, "Succeeded", 0.5),
        record(2, VALUES, "Failed"),
        record(3, VALUES, "Training"),
        # One without a loss taught nothing.
        record(4, VALUES, "Succeeded"),
    ]
    request = search_space.build_request(sweep(), trials, [5, 6])
    seeds = request.pop("seeds")
    assert (list(seeds), len(set(seeds.values()))) == (["5", "6"], 2)
    parameters = VALUES | {"method.lora.rank": 2, "training.scheduler": '"Cosine"'}
    assert request == {
        "distributions": {
            "training.learningRate": {"type": "Float", "low": 1e-5, "high": 1e-3, "log": True},
            "method.lora.rank": {"type": "Integer", "low": 0, "high": 3, "log": False},
            "method.lora.dropout": {"type": "Float", "low": 0, "high": 0.5, "log": False},
            "training.scheduler": {"type": "Choice", "choices": ['"Linear"', '"Cosine"']},
            "training.gradientAccumulation": {"type": "Integer", "low": 1, "high": 4, "log": False},
        },
        "trials": [
            {"state": "Complete", "parameters": parameters, "metric": 0.5},
            {"state": "Failed", "parameters": parameters},
            {"state": "Running", "parameters": parameters},
            {"state": "Failed", "parameters": parameters},
        ],
        "startup_trials": 5,
    }


def test_recorded_values_are_read_as_they_were_chosen() -> None:
    chosen = search_space.decode(
        sweep(),
        {
            "training.learningRate": 2e-4,
            "method.lora.rank": 2,
            "method.lora.dropout": 0.25,
            "training.scheduler": '"Cosine"',
            "training.gradientAccumulation": 3,
        },
    )
    assert chosen == VALUES
    assert search_space.read_values(sweep(), record(1, chosen, "Pending")) == VALUES


def test_parts_of_the_spec_are_choices() -> None:
    methods = [{"type": "Full"}, {"type": "LoRA", "lora": {"rank": 8}}]
    of_methods = sweep({"field": "method", "values": methods})
    trial = record(1, {"method": methods[1]}, "Pending")
    assert search_space.read_values(of_methods, trial) == {"method": methods[1]}


def test_corners_are_the_ends_of_ranges_and_all_values() -> None:
    corners = search_space.list_corners(sweep(PARAMETERS[1], PARAMETERS[3]))
    assert [tuple(corner.values()) for corner in corners] == [
        (8, "Linear"),
        (8, "Cosine"),
        (64, "Linear"),
        (64, "Cosine"),
    ]
    # Not all combinations of many fields, but each value.
    seeds = {"field": "training.seed", "values": list(range(100))}
    many = search_space.list_corners(sweep(seeds, PARAMETERS[1]))
    assert len(many) == 102
    assert {(corner["training.seed"], corner["method.lora.rank"]) for corner in many} == {
        *((seed, 8) for seed in range(100)),
        (0, 64),
        (99, 64),
    }


def suggested(trials: list[Trial], numbers: list[int]) -> list[values.Values]:
    answer = suggest(search_space.build_request(sweep(), trials, numbers))
    return [search_space.decode(sweep(), answer[str(number)]) for number in numbers]


def test_suggestions_follow_from_the_trials_and_differ_from_number_to_number() -> None:
    first = suggested([], [1, 2, 3])
    assert first == suggested([], [1, 2, 3])
    assert len({str(item) for item in first}) == 3
    running = [record(number, item, "Training") for number, item in enumerate(first, start=1)]
    (fourth,) = suggested(running, [4])
    assert fourth not in first


def test_tpe_finds_what_the_losses_favor() -> None:
    """A loss with its minimum at 1e-4: of the last 20 of 40 trials, more than at random are near it."""
    space = sweep(PARAMETERS[0], trials=40)
    trials: list[Trial] = []
    for number in range(1, 41):
        answer = suggest(search_space.build_request(space, trials, [number]))
        chosen = search_space.decode(space, answer[str(number)])
        distance = abs(math.log10(chosen["training.learningRate"] / 1e-4))
        trials.append(record(number, chosen, "Succeeded", distance))
    # At random, a quarter is so near.
    near = [trial for trial in trials[20:] if trial.metric is not None and trial.metric < 0.25]
    assert len(near) > 10
