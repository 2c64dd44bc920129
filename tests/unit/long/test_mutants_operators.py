"""Which faults can be put into a function."""

from __future__ import annotations

import ast
from textwrap import indent

import pytest

from long.mutants.operators import Candidate, list_candidates, list_functions

FAULTS = {
    "if a and b: pass": [
        ("negate-condition", "a and b", "if (not (a and b)): pass"),
        ("swap-and-or", "a and b", "if (a or b): pass"),
    ],
    "while a < b < 3: a += 1": [
        ("swap-comparison", "a < b < 3", "while (a >= b < 3): a += 1"),
        ("swap-comparison", "a < b < 3", "while (a < b >= 3): a += 1"),
        ("move-boundary", "a < b < 3", "while (a <= b < 3): a += 1"),
        ("move-boundary", "a < b < 3", "while (a < b <= 3): a += 1"),
        ("add-one", "3", "while a < b < (4): a += 1"),
        ("delete-statement", "a += 1", "while a < b < 3: pass"),
        ("add-one", "1", "while a < b < 3: a += (2)"),
    ],
    "return [é for é in b if é is not None]": [
        ("drop-return-value", "return [é for é in b if é is not None]", "return None"),
        ("swap-comparison", "é is not None", "return [é for é in b if (é is None)]"),
    ],
    "return not a": [
        ("drop-return-value", "return not a", "return None"),
        ("drop-not", "not a", "return (a)"),
    ],
    "x = min(a, b) + len(a) if a else ~b": [
        ("negate-condition", "a", "x = min(a, b) + len(a) if (not a) else ~b"),
        ("swap-arithmetic", "min(a, b) + len(a)", "x = (min(a, b) - len(a)) if a else ~b"),
        ("swap-function", "min(a, b)", "x = (max(a, b)) + len(a) if a else ~b"),
        ("drop-invert", "~b", "x = min(a, b) + len(a) if a else (b)"),
    ],
    "f(a, deep=True)": [
        ("delete-statement", "f(a, deep=True)", "pass"),
        ("drop-keyword", "f(..., deep=True)", "(f(a))"),
        ("flip-boolean", "True", "f(a, deep=(False))"),
    ],
    "raise ValueError(f'{a + 1} is too many', 2)": [
        ("delete-statement", "raise ValueError(f'{a + 1} is too many', 2)", "pass"),
    ],
    "a[0] = b": [("delete-statement", "a[0] = b", "pass"), ("add-one", "0", "a[(1)] = b")],
    "x: dict[int, Literal[1]] = a or b": [
        ("swap-and-or", "a or b", "x: dict[int, Literal[1]] = (a and b)"),
    ],
}
NOTHING = (
    "'''Documentation, with 1 number.'''",
    "log.info('%d rows', a + 1)",
    "print(a + 1)",
    "assert a == 1",
    "x = f'{a + 1}'",
    "x = a + 'text'",
    "x = [*a] + b",
    "x = a / b",
    "return None",
    "return {}",
    "def inner(): return a + b",
    "x = zip(a, b, strict=True)",
    "x = {" + "'a long text', " * 12 + "}",
)


@pytest.mark.parametrize("body", FAULTS)
def test_faults(body: str) -> None:
    source = f"def f(a, b):\n    {body}\n\n\nAFTER = 1\n"
    assert [
        (candidate.operator, candidate.fragment, _body(candidate.apply(source)))
        for candidate in _candidates(source)
    ] == FAULTS[body]


@pytest.mark.parametrize("body", NOTHING)
def test_no_faults_in_words_types_and_assertions(body: str) -> None:
    assert _candidates(f"def f(a, b=1 + 1):\n    {body}\n") == []


def test_equal_fragments_are_counted() -> None:
    source = "def f(a):\n    x = 1\n    y = 1\n    return None\n"
    candidates = _candidates(source)
    assert [(candidate.fragment, candidate.occurrence) for candidate in candidates] == [("1", 0), ("1", 1)]
    assert candidates[1].apply(source) == source.replace("y = 1", "y = (2)")


def test_a_fault_replaces_all_lines_of_its_expression() -> None:
    source = "def f(a):\n    x = (\n        a  # a comment\n        or 2\n    )\n    return x\n"
    candidate = next(one for one in _candidates(source) if one.operator == "swap-and-or")
    assert candidate.apply(source) == "def f(a):\n    x = (\n        (a and 2)\n    )\n    return x\n"


def test_functions_have_qualified_names() -> None:
    source = "def f():\n    if x:\n        def g(): pass\n\nclass C:\n    async def f(self): pass\n"
    assert list(list_functions(ast.parse(source))) == ["f", "f.g", "C.f"]


def test_the_shape_of_a_fragment_has_no_names() -> None:
    fragments = ("found is not None and found.size > 3", "gang is not None and gang.count > 3")
    first, second = (_candidates(f"def f(a):\n{indent(f'x = {text}', '    ')}\n")[0] for text in fragments)
    assert first.shape == second.shape == "_ is not None and _._ > 3"


def _candidates(source: str) -> list[Candidate]:
    return list_candidates(list_functions(ast.parse(source))["f"])


def _body(source: str) -> str:
    lines = source.splitlines()
    assert (lines[0], lines[2:]) == ("def f(a, b):", ["", "", "AFTER = 1"])
    return lines[1].strip()
