"""Losses of evaluation are compared where they measure the same, and nowhere else."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from finetune_crds.recipe import Recipe
from finetune_trainer.train.data.dataset import Split
from finetune_trainer.train.delivery.lineage import eval_data

if TYPE_CHECKING:
    from support.pods import Pod

Json = dict[str, Any]
DPO: Json = {"type": "DPO"}
TAUGHT: Json = {"type": "Distillation", "distillation": {"teacher": "/models/teacher"}}
ALIKE: dict[str, tuple[Json, Json]] = {
    "the same objective": (TAUGHT, TAUGHT),
    "a default, written out": (DPO, DPO | {"dpo": {"beta": 0.1}}),
    "what changes the labels alone": ({"type": "SFT"}, {"type": "SFT", "lossOn": "All"}),
}
OTHERWISE: dict[str, tuple[Json, Json]] = {
    "a teacher or none": ({"type": "SFT"}, TAUGHT),
    "another beta": (DPO, DPO | {"dpo": {"beta": 0.3}}),
    "another revision of the teacher": (
        TAUGHT,
        {"type": "Distillation", "distillation": {"teacher": "/models/teacher", "teacherRevision": "v2"}},
    ),
    "another teacher": (TAUGHT, {"type": "Distillation", "distillation": {"teacher": "/models/other"}}),
}


def on(pod: Pod, objective: Json, base: str = "/models/base", digest: str = "d1") -> str | None:
    recipe = Recipe.model_validate(
        pod.recipe | {"objective": objective, "model": pod.recipe["model"] | {"base": base}}
    )
    empty = np.zeros(0)
    return eval_data(recipe, Split(empty, empty, np.zeros(1, np.int64), digest=digest))


@pytest.mark.parametrize(("one", "other"), ALIKE.values(), ids=ALIKE)
def test_what_measures_the_same(pod: Pod, one: Json, other: Json) -> None:
    assert on(pod, one) == on(pod, other)


@pytest.mark.parametrize(("one", "other"), OTHERWISE.values(), ids=OTHERWISE)
def test_what_measures_otherwise(pod: Pod, one: Json, other: Json) -> None:
    assert on(pod, one) != on(pod, other)


def test_identifiers_of_other_releases_stay(pod: Pod) -> None:
    # A field that is newer than versions which are compared must not change what they were evaluated on.
    told = (
        '{"type":"Distillation","lossOn":null,"dpo":null,"distillation":'
        '{"teacher":"/models/teacher","temperature":1.0,"weight":0.5}}'
    )
    digest = hashlib.blake2b(json.dumps([told]).encode(), digest_size=8).hexdigest()
    assert on(pod, TAUGHT) == f"d1-Distillation-{digest}"


@pytest.mark.parametrize(("objective", "same"), [({"type": "SFT"}, True), (DPO, False), (TAUGHT, True)])
def test_the_base_model_counts_where_it_is_the_reference(pod: Pod, objective: Json, same: bool) -> None:
    assert (on(pod, objective) == on(pod, objective, base="/models/tuned")) is same


@pytest.mark.parametrize("objective", [{"type": "SFT"}, DPO, TAUGHT])
def test_the_split_counts_always(pod: Pod, objective: Json) -> None:
    assert on(pod, objective) != on(pod, objective, digest="d2")


def test_without_validation_there_is_nothing_to_compare(pod: Pod) -> None:
    assert eval_data(Recipe.model_validate(pod.recipe), None) is None
