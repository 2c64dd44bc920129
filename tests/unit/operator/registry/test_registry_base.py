"""What is known of a version, from its own tags and from its run."""

from __future__ import annotations

import pytest

from finetune_crds.contract import TAG_EVAL_DATA, TAG_EVALUATION_DATA
from finetune_operator.registry.base import ModelVersion, find_comparison_tag, find_eval_digest, is_same_name

NOTED: dict[str, tuple[dict[str, str], dict[str, str], str | None]] = {
    "nowhere": ({}, {"other": "d1"}, None),
    "by the run": ({}, {TAG_EVAL_DATA: "d1"}, "d1"),
    "on the version": ({TAG_EVAL_DATA: "d2"}, {}, "d2"),
    "in both places": ({TAG_EVAL_DATA: "d2"}, {TAG_EVAL_DATA: "d1"}, "d2"),
    "with an empty tag": ({TAG_EVAL_DATA: ""}, {TAG_EVAL_DATA: "d1"}, "d1"),
    "with nothing but an empty tag": ({TAG_EVAL_DATA: ""}, {}, None),
}


@pytest.mark.parametrize(("tags", "run_tags", "expected"), NOTED.values(), ids=NOTED)
def test_where_the_data_are_noted(
    tags: dict[str, str], run_tags: dict[str, str], expected: str | None
) -> None:
    assert find_eval_digest(tags, run_tags) == expected


TRAINED, JUDGED = (TAG_EVAL_DATA, "d1"), (TAG_EVALUATION_DATA, "e1")
NUMBERS: dict[str, tuple[dict[str, str], str, tuple[str, str | None]]] = {
    "of a version without an evaluation": ({"eval_f1": "1"}, "eval_f1", TRAINED),
    "of the evaluation": ({TAG_EVALUATION_DATA: "e1", "eval_f1": "1"}, "eval_f1", JUDGED),
    "of the training": ({TAG_EVALUATION_DATA: "e1", "eval_loss": "1"}, "eval_loss", TRAINED),
    "of the run alone": ({TAG_EVALUATION_DATA: "e1"}, "eval_f1", TRAINED),
    "with an empty tag": ({TAG_EVALUATION_DATA: "", "eval_f1": "1"}, "eval_f1", TRAINED),
}


@pytest.mark.parametrize(("tags", "number", "expected"), NUMBERS.values(), ids=NUMBERS)
def test_on_what_a_number_is_comparable(
    tags: dict[str, str], number: str, expected: tuple[str, str | None]
) -> None:
    version = ModelVersion("1", tags=tags, metrics={number: 1.0}, evaluated_on="d1")
    assert find_comparison_tag(version, number) == expected


SPELLINGS: dict[str, tuple[str, str, bool]] = {
    "another case in Unity Catalog": ("databricks-uc", "Main.LLM.Support", True),
    "another case in MLflow": ("http://mlflow:5000", "Main.LLM.Support", False),
    "another name in Unity Catalog": ("databricks-uc", "main.llm.sales", False),
    "the same name in MLflow": ("http://mlflow:5000", "main.llm.support", True),
}


@pytest.mark.parametrize(("registry", "name", "expected"), SPELLINGS.values(), ids=SPELLINGS)
def test_unity_catalog_ignores_the_case_of_names(registry: str, name: str, expected: bool) -> None:
    assert is_same_name(registry, "main.llm.support", name) is expected
