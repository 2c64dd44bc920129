"""What the schema says of spec.sweep."""

from __future__ import annotations

from typing import Any

import pytest

from fixtures.operator_processes.jobs import job
from integration.schema import dry_run
from integration.schema.jobs import prepared
from support.api import Api
from support.refusals import refused

Json = dict[str, Any]
RATES: Json = {"field": "training.learningRate", "values": [1e-4, 1e-3]}
RANGE: Json = {"min": 1e-5, "max": 1e-3, "scale": "Log", "step": 10}


def sweep(*parameters: Json, name: str = "tune", spec: Json | None = None, **fields: Any) -> Json:
    body = {"algorithm": "Grid", "parameters": list(parameters or (RATES,)), **fields}
    return job(name, sweep={key: value for key, value in body.items() if value is not None}, **(spec or {}))


def with_range(**interval: Any) -> Json:
    return {"field": "training.learningRate", "range": RANGE | interval}


def asha(*parameters: Json, rungs: tuple[int, ...] = (100, 300), spec: Json | None = None) -> Json:
    return sweep(*parameters, algorithm="ASHA", trials=9, rungs=[*rungs], spec=spec or EVALUATED)


def with_splits(**splits: Any) -> Json:
    columns = {"type": "PromptResponse", "prompt": "prompt", "response": "response"}
    tracking = {"uri": "databricks", "experiment": "/Shared/tune", "secretRef": {"name": "databricks"}}
    return sweep(
        spec={"data": {"splits": splits, "columns": columns}, "tracking": tracking, "register": None}
    )


NO_VERSION = "sweep requires a version of data.splits"
DPO: Json = {"objective": {"type": "DPO"}, "data": prepared(columns={"type": "Preference"})}
NO_ACCURACY = "sweep.metric eval_reward_accuracy requires objective.type DPO, "
EVALUATED: Json = {"training": {"evalEverySteps": 100}}
NOT_EVALUATED = "each of sweep.rungs must be a multiple of training.evalEverySteps and below training.maxSteps, which trials must not change"
REFUSED: dict[str, tuple[Json, str]] = {
    "a field twice": (sweep(RATES, RATES), "the fields of parameters must differ"),
    "a part of another field": (
        sweep(
            {"field": "method", "values": [{"type": "Full"}]}, {"field": "method.lora.rank", "values": [8]}
        ),
        "no field may be part of another one",
    ),
    "a field of data": (sweep({"field": "data.prepare.limit", "values": [1]}), "should match"),
    "an algorithm that is not there": (sweep(algorithm="Bayes"), "Unsupported value"),
    "ASHA without rungs": (
        sweep(algorithm="ASHA", trials=9, spec=EVALUATED),
        "trials is required unless algorithm is Grid, and rungs is required when algorithm is ASHA: set neither of them otherwise",
    ),
    "rungs without ASHA": (
        sweep(rungs=[100], spec=EVALUATED),
        "trials is required unless algorithm is Grid, and rungs is required when algorithm is ASHA: set neither of them otherwise",
    ),
    "a rung twice": (asha(rungs=(100, 100)), "Duplicate value"),
    "a rung between two evaluations": (asha(rungs=(100, 150)), NOT_EVALUATED),
    "rungs without evaluations": (asha(spec={"training": {}}), NOT_EVALUATED),
    "a rung at the last step": (
        asha(spec={"training": {"evalEverySteps": 100, "maxSteps": 300}}),
        NOT_EVALUATED,
    ),
    "accuracies of checkpoints that differ among the trials": (
        sweep(
            {"field": "training.select", "values": ["Last", "Best"]}, metric="eval_reward_accuracy", spec=DPO
        ),
        NO_ACCURACY,
    ),
    "evaluations that differ among the trials": (
        asha({"field": "training.evalEverySteps", "values": [50, 100]}),
        NOT_EVALUATED,
    ),
    "a metric that is not compared": (sweep(metric="eval_accuracy"), "Unsupported value"),
    "the accuracy of pairs without pairs": (sweep(metric="eval_reward_accuracy"), NO_ACCURACY),
    "the accuracy of a checkpoint with the lowest loss": (
        sweep(
            metric="eval_reward_accuracy",
            spec={**DPO, "training": {"select": "Best", "evalEverySteps": 10}},
        ),
        NO_ACCURACY,
    ),
    "random trials without a number": (
        sweep(algorithm="Random"),
        "trials is required unless algorithm is Grid",
    ),
    "a number of combinations": (sweep(trials=2), "trials is required unless algorithm is Grid"),
    "101 trials": (sweep(algorithm="Random", trials=101), "less than or equal to 100"),
    "a grid of any number": (
        sweep({"field": "training.learningRate", "range": {"min": 0.1, "max": 0.2}}),
        "each range requires a step when algorithm is Grid",
    ),
    "an empty range": (sweep(with_range(max=1e-5)), "min must be below max"),
    "the logarithm of zero": (
        sweep(with_range(min=0)),
        "when scale is Log, min must be above 0, and step, which is a factor, above 1",
    ),
    "a factor of one": (
        sweep(with_range(step=1)),
        "when scale is Log, min must be above 0, and step, which is a factor, above 1",
    ),
    "a command": (
        sweep(spec={"trainer": {"command": ["mine"]}, "checkpoint": None}),
        "sweep must not be set when trainer.command is set",
    ),
    "a run to carry on": (
        sweep(spec={"checkpoint": {"uri": "/c", "resumeFrom": {"type": "Job", "name": "first"}}}),
        "checkpoint.resumeFrom must not be set when sweep is set",
    ),
    "the newest version of the splits": (with_splits(type="Delta", path="/data/splits"), NO_VERSION),
    "the newest version of a table of splits": (
        with_splits(type="Tables", train="main.corpus.train@v3", validation="main.corpus.validation"),
        NO_VERSION,
    ),
    "a long name": (sweep(name="a" * 36), "at most 35 characters when sweep is set"),
}
# The metric has a goal.
UNKNOWN: dict[str, Json] = {"goal": sweep(goal="Minimize")}
# Not by a rule: CEL does not know lists of any JSON type.
EITHER: dict[str, Json] = {
    "neither values nor a range": {"field": "training.seed"},
    "both": {"field": "training.seed", "values": [1], "range": {"min": 1, "max": 2, "step": 1}},
}
ACCEPTED: dict[str, Json] = {
    "a grid": sweep(name="a" * 35),
    "a grid of a range": sweep(with_range()),
    "ASHA": asha(),
    "a version of the splits": with_splits(type="Delta", path="/data/splits", version=3),
    "versions of tables of splits": with_splits(
        type="Tables", train="main.corpus.train@v3", validation="main.corpus.validation@v3"
    ),
    "files of splits": with_splits(type="Parquet", train="/data/train", validation="/data/validation"),
    "the accuracy of pairs": sweep(
        metric="eval_reward_accuracy",
        spec={**DPO, "training": {"select": "Best", "evalEverySteps": 10, "monitor": "Accuracy"}},
    ),
    "random trials": sweep(
        {"field": "training.learningRate", "range": {"min": 1e-5, "max": 1e-3}},
        algorithm="Random",
        trials=100,
        parallel=10,
        seed=0,
        maxFailedTrials=0,
    ),
    "values of any type": sweep(
        {"field": "method", "values": [{"type": "Full"}, {"type": "LoRA", "lora": {"targetModules": ["q"]}}]},
        {"field": "training.packing", "values": [True, False]},
        {"field": "training.scheduler", "values": ["Linear"]},
        {"field": "distributed.nodes", "values": [1, 2]},
        {"field": "objective.labelSmoothing", "values": [0.0, 0.1]},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_schema_refuses(api: Api, case: str) -> None:
    body, sentence = REFUSED[case]
    with refused(sentence):
        dry_run.create(api, body, strict=True)


@pytest.mark.parametrize("field", UNKNOWN)
def test_a_field_that_is_not_there_is_refused(api: Api, field: str) -> None:
    with refused(f'unknown field "spec.sweep.{field}"'):
        dry_run.create(api, UNKNOWN[field], strict=True)


@pytest.mark.parametrize("case", EITHER)
def test_a_parameter_has_either_values_or_a_range(api: Api, case: str) -> None:
    with refused("must validate one and only one schema (oneOf)"):
        dry_run.create(api, sweep(EITHER[case]), strict=True)


@pytest.mark.parametrize("case", ACCEPTED)
def test_the_schema_accepts(api: Api, case: str) -> None:
    created = dry_run.create(api, ACCEPTED[case], strict=True)["spec"]["sweep"]
    assert created["parameters"] == ACCEPTED[case]["spec"]["sweep"]["parameters"]


CHANGES: dict[str, Json] = {
    "a value": {"parameters": [RATES | {"values": [1e-4, 2e-3]}]},
    "the order of the values": {"parameters": [RATES | {"values": [1e-3, 1e-4]}]},
    "the number at a time": {"parallel": 7},
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_sweep_cannot_change(api: Api, case: str) -> None:
    with refused("spec.sweep cannot change once the job exists"):
        dry_run.change(api, sweep(), {"sweep": CHANGES[case]})
    with refused("spec.sweep cannot change once the job exists"):
        dry_run.change(api, sweep(), {"sweep": None})
