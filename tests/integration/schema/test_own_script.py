"""What the API server refuses and accepts of a job whose command brings its own model and data."""

from __future__ import annotations

from typing import Any

import pytest

from fixtures.operator_processes.jobs import job
from integration.schema import dry_run
from support.api import Api
from support.refusals import refused

Json = dict[str, Any]

PARAMETERS: Json = {
    "learning_rate": 2e-5,
    "max_steps": 100,
    "packed": False,
    "nothing": None,
    "layers": [1, "q_proj", [0.5]],
    "optimizer": {"betas": [0.9, 0.95]},
}


def script(**spec: Any) -> Json:
    """A job with a command, and with neither model nor data."""
    trainer = {"command": ["torchrun", "train.py"], "parameters": PARAMETERS}
    return job(**({"model": None, "data": None, "register": None, "trainer": trainer} | spec))


EVALUATED: Json = {"register": {"model": "m"}, "evaluation": {"command": ["judge"]}}
SPLITS: Json = {"splits": {"type": "JSONLines", "train": "/x"}}
FOLDER: list[Json] = [{"name": "CODE_SOURCE_PATH", "value": "/x"}]
WITH_CODE: Json = {"command": ["t"], "parameters": PARAMETERS, "code": {"configMapRef": {"name": "code"}}}
REFUSED: dict[str, tuple[Json, str]] = {
    "no model and no command": (job(model=None), "model and data are required unless trainer.command is set"),
    "no data and no command": (
        job(data=None),
        "model and data are required unless trainer.command is set",
    ),
    "a source without a model": (
        script(data=job()["spec"]["data"]),
        "data.source requires model, whose tokenizer counts the tokens of each example",
    ),
    "an evaluation without a model": (
        script(data=SPLITS, **EVALUATED),
        "evaluation requires model, data and register: set all three",
    ),
    "an evaluation without data": (
        script(model={"base": "/m"}, **EVALUATED),
        "evaluation requires model, data and register: set all three",
    ),
    "parameters without a command": (
        job(trainer={"parameters": {"a": 1}}),
        "trainer.parameters can be set only when trainer.command is set",
    ),
    "parameters that are a list": (
        script(trainer={"command": ["t"], "parameters": ["a"]}),
        "must be of type object",
    ),
    "too many parameters": (
        script(trainer={"command": ["t"], "parameters": {str(number): number for number in range(65)}}),
        "must have at most 64 items",
    ),
    "the recipe in the environment": (
        script(pods={"all": {"env": [{"name": "FINETUNE_RECIPE", "value": "/x"}]}}),
        "the operator sets FINETUNE_RECIPE: remove it",
    ),
    "the folder of the code in the environment": (
        script(trainer=WITH_CODE, pods={"all": {"env": FOLDER}}),
        "the operator sets CODE_SOURCE_PATH to the folder of trainer.code: remove it from pods.all.env and pods.train.env",
    ),
    "the folder of the code in the environment of training": (
        script(trainer=WITH_CODE, pods={"train": {"env": FOLDER}}),
        "the operator sets CODE_SOURCE_PATH to the folder of trainer.code: remove it from pods.all.env and pods.train.env",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_schema_refuses(api: Api, case: str) -> None:
    body, sentence = REFUSED[case]
    with refused(sentence):
        dry_run.create(api, body)


ACCEPTED: dict[str, Json] = {
    "neither model nor data": script(),
    "a model alone": script(model={"base": "org/base"}),
    "splits alone": script(data=SPLITS),
    "code in the image, whose folder you name": script(
        pods={"all": {"env": FOLDER}, "train": {"env": FOLDER}},
        trainer={"command": ["t"], "parameters": PARAMETERS},
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_the_schema_accepts(api: Api, case: str) -> None:
    assert dry_run.create(api, ACCEPTED[case])["spec"]["trainer"]["parameters"] == PARAMETERS


CHANGES: dict[str, tuple[Json, str | None]] = {
    "a number": ({"trainer": {"parameters": {"max_steps": 99}}}, "spec.trainer cannot change"),
    "a number in a list": (
        {"trainer": {"parameters": {"layers": [1, "q_proj", [0.25]]}}},
        "spec.trainer cannot change",
    ),
    "one more": ({"trainer": {"parameters": {"more": 1}}}, "spec.trainer cannot change"),
    "one less": ({"trainer": {"parameters": {"packed": None}}}, "spec.trainer cannot change"),
    "none": ({"trainer": {"parameters": None}}, "spec.trainer cannot change"),
    "a model": ({"model": {"base": "/m"}}, "spec.model cannot change"),
    "data": ({"data": SPLITS}, "spec.data cannot change"),
    "the image": ({"pods": {"train": {"image": "me/mine:2"}}}, None),
}


@pytest.mark.parametrize("case", CHANGES)
def test_only_what_the_next_attempt_can_take_up_changes(api: Api, case: str) -> None:
    change, sentence = CHANGES[case]
    if sentence is None:
        assert dry_run.change(api, script(), change)
        return
    with refused(sentence):
        dry_run.change(api, script(), change)
