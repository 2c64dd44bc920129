"""What a model was made from; losses of evaluation are compared where they measure the same, and nowhere else."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from finetune_crds.data import Splits
from finetune_crds.recipe import Recipe
from finetune_trainer.train.data.dataset import Split
from finetune_trainer.train.delivery.lineage import (
    build_method_params,
    build_preparation_tags,
    build_source_tags,
    identify_eval_data,
)

if TYPE_CHECKING:
    from support.pods import Pod

Json = dict[str, Any]
DPO: Json = {"type": "DPO"}
KTO: Json = {"type": "KTO"}
IPO: Json = {"type": "DPO", "dpo": {"loss": "IPO"}}
ORPO: Json = {"type": "ORPO"}
SIMPO: Json = {"type": "SimPO"}
REWARDS: Json = {"type": "RewardModel"}
TAUGHT: Json = {"type": "Distillation", "distillation": {"teacher": "/models/teacher"}}
ALIKE: dict[str, tuple[Json, Json]] = {
    "the same objective": (TAUGHT, TAUGHT),
    "a default, written out": (DPO, DPO | {"dpo": {"beta": 0.1}}),
    "a default weight, written out": (KTO, KTO | {"kto": {"undesirableWeight": 1.0}}),
    "a loss, written out": (DPO, DPO | {"dpo": {"loss": "Sigmoid"}}),
    "a weight of the odds, written out": (ORPO, ORPO | {"orpo": {"weight": 0.1}}),
    "a default margin, written out": (SIMPO, SIMPO | {"simpo": {"gamma": 0.5}}),
    "pairs that are smoothed in training alone": (DPO, DPO | {"dpo": {"labelSmoothing": 0.2}}),
    "rewards that are centered in training alone": (
        REWARDS,
        REWARDS | {"rewardModel": {"centerRewardsCoefficient": 0.01}},
    ),
    "targets that are smoothed in training alone": ({"type": "SFT"}, {"type": "SFT", "labelSmoothing": 0.2}),
    "what changes the labels alone": ({"type": "SFT"}, {"type": "SFT", "lossOn": "All"}),
}
OTHERWISE: dict[str, tuple[Json, Json]] = {
    "a teacher or none": ({"type": "SFT"}, TAUGHT),
    "another beta": (DPO, DPO | {"dpo": {"beta": 0.3}}),
    "another objective against the same reference": (DPO, KTO),
    "another loss against the same reference": (DPO, IPO),
    "another objective without a reference": (ORPO, SIMPO),
    "rewards and probabilities": (REWARDS, SIMPO),
    "another weight of the odds": (ORPO, ORPO | {"orpo": {"weight": 0.2}}),
    "another margin": (SIMPO, SIMPO | {"simpo": {"gamma": 1}}),
    "another weight": (KTO, KTO | {"kto": {"desirableWeight": 2.0}}),
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
    return identify_eval_data(recipe, Split(empty, empty, np.zeros(1, np.int64), digest=digest))


@pytest.mark.parametrize(("first", "second"), ALIKE.values(), ids=ALIKE)
def test_what_measures_the_same(pod: Pod, first: Json, second: Json) -> None:
    assert on(pod, first) == on(pod, second)


@pytest.mark.parametrize(("first", "second"), OTHERWISE.values(), ids=OTHERWISE)
def test_what_measures_otherwise(pod: Pod, first: Json, second: Json) -> None:
    assert on(pod, first) != on(pod, second)


def test_identifiers_of_other_releases_stay(pod: Pod) -> None:
    # A field that is newer than versions which are compared must not change what they were evaluated on.
    preferences = json.dumps(["/models/base", None, '{"beta":0.3}'])
    digest = hashlib.blake2b(preferences.encode(), digest_size=8).hexdigest()
    assert on(pod, DPO | {"dpo": {"beta": 0.3}}) == f"d1-DPO-{digest}"
    identifiers = (
        '{"type":"Distillation","lossOn":null,"dpo":null,"distillation":'
        '{"teacher":"/models/teacher","temperature":1.0,"weight":0.5}}'
    )
    digest = hashlib.blake2b(json.dumps([identifiers]).encode(), digest_size=8).hexdigest()
    assert on(pod, TAUGHT) == f"d1-Distillation-{digest}"


@pytest.mark.parametrize(
    ("objective", "same"),
    [
        *((each, True) for each in ({"type": "SFT"}, ORPO, SIMPO, REWARDS, TAUGHT)),
        *((each, False) for each in (DPO, IPO, KTO)),
    ],
)
def test_the_base_model_counts_where_it_is_the_reference(pod: Pod, objective: Json, same: bool) -> None:
    assert (on(pod, objective) == on(pod, objective, base="/models/tuned")) is same


@pytest.mark.parametrize("objective", [{"type": "SFT"}, DPO, KTO, ORPO, SIMPO, REWARDS, TAUGHT])
def test_the_split_counts_always(pod: Pod, objective: Json) -> None:
    assert on(pod, objective) != on(pod, objective, digest="d2")


@pytest.mark.parametrize(("objective", "same"), [(DPO, True), (KTO, False)])
def test_the_rows_of_a_pass_count_where_the_loss_depends_on_them(
    pod: Pod, objective: Json, same: bool
) -> None:
    larger = pod.but({"training.perDeviceEvalBatchSize": 16})
    two_ranks = pod.but({"distributed.processesPerNode": 2})
    identifiers = {on(each, objective) for each in (pod, larger, two_ranks)}
    assert len(identifiers) == (1 if same else 3)


def test_without_validation_there_is_nothing_to_compare(pod: Pod) -> None:
    assert identify_eval_data(Recipe.model_validate(pod.recipe), None) is None


PREPARED: Json = {
    "path": "/data/splits",
    "version": 0,
    "digest": "c0ffee",
    "rows": {"train": 90, "validation": 10},
    "tokens": {"train": 900, "validation": 100},
    "dropped": [{"step": "notNull", "rows": 0}, {"step": "dedupe", "rows": 7}],
}
MIX = [
    {"name": "faq", "type": "Delta", "path": "s3://lake/faq"},
    {"name": "chats", "type": "Hub", "dataset": "org/chats"},
    {"name": "notes", "type": "CSV", "path": "/data/notes"},
]
ORIGINS: dict[str, tuple[Json, Json, dict[str, str]]] = {
    "a table": (
        {"type": "Delta", "table": "main.llm.raw"},
        {"sourceVersion": 0},
        {"finetune_source": "main.llm.raw", "finetune_source_version": "0"},
    ),
    "a data set of the Hub": (
        {"type": "Hub", "dataset": "org/chats"},
        {"sourceRevision": "a1b2"},
        {"finetune_source": "org/chats", "finetune_source_version": "a1b2"},
    ),
    "files": ({"type": "CSV", "path": "/data/notes"}, {}, {"finetune_source": "/data/notes"}),
    "an inference table": (
        {
            "type": "InferenceTable",
            "table": "main.llm.logged",
            "feedback": {"path": "s3://lake/thumbs", "requestIdColumn": "id", "ratingColumn": "up"},
        },
        {"sourceVersion": 7, "feedbackVersion": 2},
        {"finetune_source": "main.llm.logged, s3://lake/thumbs", "finetune_source_version": "7, 2"},
    ),
    "a mix": (
        {"type": "Mix", "sources": MIX},
        {
            "sources": [
                {"name": "chats", "rows": 20, "revision": "a1b2"},
                {"name": "faq", "rows": 70, "version": 3},
                {"name": "notes", "rows": 10},
            ]
        },
        {
            "finetune_source": "s3://lake/faq, org/chats, /data/notes",
            "finetune_source_version": "3, a1b2, -",
        },
    ),
}


@pytest.mark.parametrize(("source", "read", "expected"), ORIGINS.values(), ids=ORIGINS)
def test_the_source_and_its_version_are_on_run_and_version(
    pod: Pod, source: Json, read: Json, expected: dict[str, str]
) -> None:
    data = {"source": source, "prepare": {"output": "/data/splits"}, "splits": pod.recipe["data"]["splits"]}
    recipe = Recipe.model_validate(pod.recipe | {"data": data, "prepared": PREPARED | read})
    assert recipe.data.splits
    tags = build_source_tags(recipe, recipe.data.splits, None)
    assert {name: value for name, value in tags.items() if "source" in name} == expected
    assert tags["finetune_data_digest"] == "c0ffee"


@pytest.mark.parametrize(
    ("base", "resumed_from", "expected"),
    [
        ("models:/ml.prod.chat/7", "", "7"),
        ("models:/ml.prod.chat/7", "s3://lake/checkpoints", None),
        ("models:/ml.prod.other/7", "", None),
        ("models:/ml.prod.chat/7/adapter", "", None),
        ("org/chat", "", None),
    ],
)
def test_the_version_that_the_training_started_from(
    pod: Pod, base: str, resumed_from: str, expected: str | None
) -> None:
    recipe = Recipe.model_validate(
        pod.recipe | {"model": {"base": base}, "register": {"model": "ml.prod.chat"}}
    )
    assert recipe.data.splits
    tags = build_source_tags(recipe, recipe.data.splits, None, resumed_from)
    assert tags.get("finetune_base_version") == expected


SPLITS: dict[str, tuple[Json, dict[str, str]]] = {
    "a table": (
        {"type": "Delta", "path": "/data/splits", "version": 3},
        {"finetune_data_path": "/data/splits", "finetune_data_version": "3"},
    ),
    "a table for each split": (
        {"type": "Tables", "train": "a.b.train@v7", "test": "a.b.test@v0"},
        {"finetune_data_path": "a.b.train", "finetune_data_version": "train=7,test=0"},
    ),
    "files": (
        {"type": "Parquet", "train": "abfss://c@v.example.com/a"},
        {"finetune_data_path": "abfss://c@v.example.com/a"},
    ),
}


@pytest.mark.parametrize(("splits", "expected"), SPLITS.values(), ids=SPLITS)
def test_the_splits_and_their_versions_are_on_run_and_version(
    pod: Pod, splits: Json, expected: dict[str, str]
) -> None:
    recipe = Recipe.model_validate(pod.recipe)
    tags = build_source_tags(recipe, Splits.model_validate(splits), None)
    assert {name: value for name, value in tags.items() if name.startswith("finetune_data")} == expected


def test_the_sources_of_a_large_mix_fit_into_a_tag(pod: Pod) -> None:
    sources = [{"name": f"s{n}", "type": "CSV", "path": f"/data/{n:090}"} for n in range(16)]
    data = {"source": {"type": "Mix", "sources": sources}, "prepare": {"output": "/out"}}
    recipe = Recipe.model_validate(
        pod.recipe | {"data": data | {"splits": pod.recipe["data"]["splits"]}, "prepared": PREPARED}
    )
    assert recipe.data.splits
    tag = build_source_tags(recipe, recipe.data.splits, None)["finetune_source"]
    assert (len(tag), tag[:10], tag[-3:]) == (1000, "/data/0000", "...")


def test_the_result_of_the_preparation_is_on_the_run(pod: Pod) -> None:
    recipe = Recipe.model_validate(pod.recipe | {"prepared": PREPARED})
    assert {name: json.loads(value) for name, value in build_preparation_tags(recipe).items()} == {
        "finetune_data_rows": {"train": 90, "validation": 10, "test": 0},
        "finetune_data_tokens": {"train": 900, "validation": 100, "test": 0},
        "finetune_data_dropped": {"notNull": 0, "dedupe": 7},
    }
    assert build_preparation_tags(Recipe.model_validate(pod.recipe)) == {}


PARAMETERS: dict[str, tuple[Json, Json]] = {
    "SFT": ({"type": "SFT"}, {}),
    "smoothed SFT": ({"type": "SFT", "labelSmoothing": 0.1}, {"label_smoothing": 0.1}),
    "DPO": (DPO, {"beta": 0.1}),
    "smoothed DPO": (DPO | {"dpo": {"labelSmoothing": 0.2}}, {"beta": 0.1, "label_smoothing": 0.2}),
    "IPO": (IPO, {"beta": 0.1, "dpo_loss": "IPO"}),
    "ORPO": (ORPO, {"odds_ratio_weight": 0.1}),
    "SimPO": (SIMPO, {"beta": 2.0, "gamma": 0.5}),
}


@pytest.mark.parametrize(("objective", "expected"), PARAMETERS.values(), ids=PARAMETERS)
def test_the_parameters_of_an_objective(pod: Pod, objective: Json, expected: Json) -> None:
    assert build_method_params(Recipe.model_validate(pod.recipe | {"objective": objective})) == expected


def test_the_noise_is_a_parameter(pod: Pod) -> None:
    noisy = pod.but({"training.neftuneAlpha": 5})
    assert build_method_params(Recipe.model_validate(noisy.recipe)) == {"neftune_alpha": 5.0}
