"""What is kept of JSON that is nested deeply."""

from __future__ import annotations

import json
from typing import Any

import pytest

from finetune_operator.shallow_json import MAX_LEVELS, REPLACEMENT, parse


def nest(levels: int, leaf: str = "1") -> str:
    """Objects in each other: the leaf is in the innermost."""
    return '{"a": ' * levels + leaf + "}" * levels


def nest_lists(levels: int, leaf: str = "1") -> str:
    return "[" * levels + leaf + "]" * levels


CUT = json.dumps(REPLACEMENT)
ESCAPED = r'"{[\"]}\\"'
# Text, levels above the object, and a text with the value that is expected.
CASES: dict[str, tuple[str, int, str]] = {
    "a number": ("1", 0, "1"),
    "as deep as possible": (nest(MAX_LEVELS), 0, nest(MAX_LEVELS)),
    "one level more": (nest(MAX_LEVELS + 1), 0, nest(MAX_LEVELS, CUT)),
    "in a list of objects": (nest(MAX_LEVELS + 3), 2, nest(MAX_LEVELS + 2, CUT)),
    "lists": (nest_lists(MAX_LEVELS + 1), 0, nest_lists(MAX_LEVELS, CUT)),
    "too deep for Python": (nest(9_000), 0, nest(MAX_LEVELS, CUT)),
    "lists too deep for Python": (nest_lists(9_000), 0, nest_lists(MAX_LEVELS, CUT)),
    "brackets in strings": (
        f'{{"x": {ESCAPED}, "deep": {nest(9_000)}, "y": [{ESCAPED}]}}',
        0,
        f'{{"x": {ESCAPED}, "deep": {nest(MAX_LEVELS - 1, CUT)}, "y": [{ESCAPED}]}}',
    ),
    "strings among what is cut": (
        nest(9_000, f'{{"x": {ESCAPED}}}'),
        0,
        nest(MAX_LEVELS, CUT),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_nested_too_deeply_is_replaced(case: tuple[str, int, str]) -> None:
    text, levels_above, expected = case
    values: list[Any] = [parse(given, levels_above=levels_above) for given in (text, text.encode())]
    assert values == [json.loads(expected)] * 2


@pytest.mark.parametrize("text", ["<html>", nest(9_000) + "}", '{"a": ' * 9_000])
def test_what_is_not_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse(text)
