"""Tags that Unity Catalog takes."""

from __future__ import annotations

import pytest

from finetune_operator.policy.unity_catalog import find_wrong_tags

CASES: dict[str, tuple[dict[str, str], list[str]]] = {
    "tags that it takes": ({"team": "", "cost_center": "a b, c", "Über 1": "x=y"}, []),
    "keys that it refuses, in order": (
        dict.fromkeys(["team", "e=f", "c-d", " g", "a.b", "h,", "i/j", "k:l", "m "], "x"),
        [
            "Unity Catalog does not allow . , - = / : in the key of a tag, or a space at its start or end: rename ' g', 'a.b', 'c-d', 'e=f', "
            "'h,', 'i/j', 'k:l', 'm ' in spec.tags"
        ],
    ),
    "values that it refuses": (
        {"team": " a", "use": "b ", "owner": "c"},
        [
            "Unity Catalog does not allow spaces at the ends of the value of a tag: remove them from 'team', 'use' in spec.tags"
        ],
    ),
}


@pytest.mark.parametrize(("tags", "messages"), CASES.values(), ids=CASES)
def test_tags_that_unity_catalog_refuses_are_named(tags: dict[str, str], messages: list[str]) -> None:
    assert [*find_wrong_tags(tags, "spec.tags")] == messages
