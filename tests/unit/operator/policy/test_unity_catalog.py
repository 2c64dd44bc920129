"""Keys of tags that Unity Catalog takes."""

from __future__ import annotations

from finetune_operator.policy.unity_catalog import find_wrong_tags


def test_keys_that_unity_catalog_takes() -> None:
    assert [*find_wrong_tags(["team", "cost_center", "Über 1"], "spec.tags")] == []


def test_keys_that_it_refuses_are_named_in_order() -> None:
    keys = ["team", "e=f", "c-d", " g", "a.b", "h,", "i/j", "k:l", "m "]
    assert [*find_wrong_tags(keys, "spec.tags")] == [
        "Unity Catalog does not allow . , - = / : in the key of a tag: rename  g, a.b, c-d, e=f, h,, i/j, k:l, m  in spec.tags"
    ]
