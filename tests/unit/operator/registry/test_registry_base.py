"""What is known of a version, from its own tags and from its run."""

from __future__ import annotations

import pytest

from finetune_crds.contract import TAG_EVAL_DATA
from finetune_operator.registry.base import evaluated_on

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
    assert evaluated_on(tags, run_tags) == expected
