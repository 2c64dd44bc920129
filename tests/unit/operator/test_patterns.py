"""Which names a pattern fits."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from finetune_operator.patterns import matches


class Case(NamedTuple):
    """A name, patterns, and whether the name fits one of them."""

    name: str
    patterns: list[str]
    ignore_case: bool
    fits: bool


CASES = {
    "the same name": Case("team.llm", ["team.llm"], False, True),
    "a dot stands for itself": Case("team-llm", ["team.llm"], False, False),
    "a star stands for nothing": Case("team.", ["team.*"], False, True),
    "a star stands for lines": Case("team.a\nb", ["team.*"], False, True),
    "stars": Case("a-team-b", ["*team*"], False, True),
    "the whole name": Case("my-team", ["team"], False, False),
    "one of several": Case("b", ["a", "b"], False, True),
    "no pattern": Case("b", [], False, False),
    "another case": Case("Team", ["team"], False, False),
    "case is ignored": Case("Team", ["tEam"], True, True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_name_fits_one_of_the_patterns(case: Case) -> None:
    assert matches(case.name, case.patterns, ignore_case=case.ignore_case) == case.fits
