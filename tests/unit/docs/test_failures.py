"""Every line about a failure in docs/operations/failures.md names tests that exist and that a tier of CI runs."""

from __future__ import annotations

import ast
import re

import pytest

from support.documents import ROOT

PAGE = (ROOT / "docs/operations/failures.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| When ")]
TIERS = ("unit", "trainer", "integration", "e2e")


def find_problems(row: str) -> list[str]:
    """What is wrong with the tests of a row."""
    comment = re.search(r"<!-- (.+?) -->", row)
    if comment is None:
        return ["no test"]
    problems = []
    for reference in comment[1].split():
        path, _, name = reference.partition("::")
        file = ROOT / path
        if path.split("/")[:1] != ["tests"] or path.split("/")[1] not in TIERS or not file.is_file():
            problems.append(f"{path} is not a file of tests")
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        functions = {
            node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        if name not in functions:
            problems.append(f"{path} has no test {name}")
    return problems


def test_there_are_rows() -> None:
    assert len(ROWS) > 10


@pytest.mark.parametrize("row", ROWS, ids=[row.split("|")[1].strip() for row in ROWS])
def test_a_row_names_its_tests(row: str) -> None:
    assert find_problems(row) == []
