"""Patterns of names in the files of an installation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Annotated

from pydantic import Field

Pattern = Annotated[str, Field(min_length=1, max_length=512)]
"""A name in which each `*` stands for any characters."""


def matches(name: str, patterns: Iterable[str], *, ignore_case: bool = False) -> bool:
    """Whether a name fits one of the patterns. `ignore_case`: for names of Unity Catalog, which does not distinguish it."""
    text = name.casefold() if ignore_case else name
    return any(
        _compile(pattern.casefold() if ignore_case else pattern).fullmatch(text) is not None
        for pattern in patterns
    )


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part) for part in pattern.split("*")), re.DOTALL)
