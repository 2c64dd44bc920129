"""Suggests values for the next trials of a sweep by Optuna: `python -m finetune_operator.finetunejob.sweep.sampler`.

A process of its own, since Optuna takes 40 MiB of memory and half a second of CPU time to import. It reads a JSON document from stdin:

- `distributions`: by field, its type (Float, Integer or Choice) and its bounds or choices
- `trials`: the trials that have started: their state (Complete, Running or Failed), parameters, and the metric of complete ones
- `startup_trials`: how many trials are drawn at random before the sampler uses results
- `seeds`: by number, the seed of each trial to suggest

It writes the values of each trial to suggest, by number and field, to stdout.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import TrialState, create_trial

_STATES = {"Complete": TrialState.COMPLETE, "Running": TrialState.RUNNING, "Failed": TrialState.FAIL}


def suggest(request: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Suggest the values of trials, by number and field."""
    distributions = {field: _build_distribution(item) for field, item in request["distributions"].items()}
    study = optuna.create_study(study_name="sweep", direction="minimize")
    for trial in request["trials"]:
        study.add_trial(
            create_trial(
                state=_STATES[trial["state"]],
                params=trial["parameters"],
                distributions=distributions,
                value=trial.get("metric"),
            )
        )
    suggestions: dict[str, dict[str, Any]] = {}
    for number, seed in request["seeds"].items():
        # NB: the study is rebuilt for each request. With the same seed for all trials, it would suggest the same values again.
        study.sampler = _build_sampler(seed, request["startup_trials"])
        # The study keeps this trial as a running one, which the next suggestion stays away from.
        suggestions[number] = study.ask(distributions).params
    return suggestions


def _build_sampler(seed: int, startup_trials: int) -> optuna.samplers.TPESampler:
    """Build the sampler of a suggestion. It takes running trials for bad ones, so that parallel trials differ (constant liar)."""
    with warnings.catch_warnings():
        # Optuna calls the argument experimental.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup_trials, constant_liar=True)


def _build_distribution(item: dict[str, Any]) -> BaseDistribution:
    if item["type"] == "Choice":
        return CategoricalDistribution(item["choices"])
    if item["type"] == "Integer":
        return IntDistribution(item["low"], item["high"], log=item["log"])
    return FloatDistribution(item["low"], item["high"], log=item["log"])


def main() -> None:
    """Answer the request on stdin."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    json.dump(suggest(json.load(sys.stdin)), sys.stdout)


if __name__ == "__main__":
    main()
