"""The page of families is the table that the tests of the trainer use."""

from __future__ import annotations

from pathlib import Path

from support import families

PAGE = Path(__file__).parents[3] / "docs" / "finetunejob" / "families.md"


def test_the_page_has_the_table_of_the_tests() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.endswith("\n\n" + families.table())
    assert f"tiny models of {len(families.FAMILIES)} families" in text
