"""The page about the parameters of other tools: its fields and values are in the schema, its names in the tools that are installed."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.documents import Page
from support.manifests import SCHEMAS

Json = dict[str, Any]

PAGE = Page("docs/finetunejob/parameters.md")
SPEC: Json = SCHEMAS["FineTuneJob"]["properties"]["spec"]
NO_FIELD = ("always", "never", "not needed")
FORMER = "(transformers 4)"
# The modules and classes whose parameters a chapter names.
TRAINING_ARGUMENTS = [("transformers", "training_args.py", "TrainingArguments")]
TOOLS = {
    "TrainingArguments": TRAINING_ARGUMENTS,
    "TRL": [
        *TRAINING_ARGUMENTS,
        *(
            ("trl", f"trainer/{name.lower()}_config.py", f"{name}Config")
            for name in ("SFT", "DPO", "KTO", "Reward")
        ),
        *(
            ("trl", f"experimental/{name.lower()}/{name.lower()}_config.py", f"{name}Config")
            for name in ("ORPO", "CPO")
        ),
    ],
    "peft": [
        ("peft", "tuners/lora/config.py", "LoraConfig"),
        ("peft", "config.py", "PeftConfig"),
        ("peft", "config.py", "PeftConfigMixin"),
    ],
}
# Chapters whose tools take the parameters of another chapter too.
INHERITED = {"TRL": "TrainingArguments"}


class Row(NamedTuple):
    """A row of a table: its chapter, its line, and its cells."""

    chapter: str
    line: int
    there: str
    here: str

    def __str__(self) -> str:
        return f"{self.chapter}:{self.line}"


def rows(text: str) -> Iterator[Row]:
    """The rows of the tables of two columns."""
    chapter = ""
    for number, line in enumerate(text.splitlines(), start=1):
        chapter = line.removeprefix("## ") if line.startswith("## ") else chapter
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 2 and line.startswith(("| `", "| another `")):
            yield Row(chapter, number, *cells)


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def field(path: str) -> Json | None:
    """The schema of a field of a spec, by its path; lists are passed through."""
    found: Json | None = SPEC
    for name in path.split("."):
        found = found and found.get("items", found).get("properties", {}).get(name)
    return found


def problem(code: str) -> str | None:
    """What is wrong with a field, or with a field and its value."""
    path, has_value, value = code.partition(": ")
    schema = field(path)
    if schema is None:
        return f"{path} is no field of a FineTuneJob"
    if has_value and not _takes(schema, value):
        return f"{path} does not take {value}"
    return None


def _takes(schema: Json, value: str) -> bool:
    return (
        value in schema["enum"]
        if "enum" in schema
        else value.isdigit() and schema["type"] in ("integer", "number")
    )


def wrong(row: Row) -> list[str]:
    """What is wrong with the column Here of a row."""
    here = codes(row.here)
    lacking = [] if here or row.here.startswith(NO_FIELD) else ["names no field"]
    alone = row.here.startswith("not supported") and "nearest: `" not in row.here
    return [*lacking, *(["names no nearest field"] if alone else []), *filter(None, map(problem, here))]


ROWS = [*rows(PAGE.prose)]


def test_there_is_a_table_for_each_tool() -> None:
    counts = {
        chapter: sum(row.chapter == chapter for row in ROWS) for chapter in (row.chapter for row in ROWS)
    }
    assert [*counts] == ["TrainingArguments", "TRL", "peft", "Axolotl", "LLaMA-Factory"]
    assert min(counts.values()) > 5


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_row_leads_to_fields_that_exist(row: Row) -> None:
    assert wrong(row) == []


@cache
def parameters(package: str, module: str, name: str) -> frozenset[str]:
    """The parameters of a dataclass without those of its bases, and without importing it."""
    spec = importlib.util.find_spec(package)
    path = Path((spec and spec.origin) or "").parent / module
    body = ast.parse(path.read_text(encoding="utf-8")).body
    (found,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
    fields = (statement.target for statement in found.body if isinstance(statement, ast.AnnAssign))
    return frozenset(target.id for target in fields if isinstance(target, ast.Name))


def missing(chapter: str, tool: tuple[str, str, str], table: list[Row]) -> set[str]:
    """The parameters of a tool that neither its chapter names nor the one that it inherits."""
    chapters = (chapter, INHERITED.get(chapter))
    named = {code.partition(": ")[0] for row in table if row.chapter in chapters for code in codes(row.there)}
    return {*parameters(*tool)} - named


@pytest.mark.parametrize(
    ("chapter", "tool"),
    [(chapter, tool) for chapter, tools in TOOLS.items() for tool in tools],
    ids=lambda value: value if isinstance(value, str) else value[-1],
)
def test_each_parameter_of_a_tool_has_a_row(chapter: str, tool: tuple[str, str, str]) -> None:
    assert missing(chapter, tool, ROWS) == set()


def unknown(row: Row) -> list[str]:
    """The parameters of the column There that the tool does not have."""
    known = {name for tool in TOOLS[row.chapter] for name in parameters(*tool)}
    return [code for code in codes(row.there) if code.partition(": ")[0] not in known]


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.chapter in TOOLS and FORMER not in row.there], ids=str
)
def test_the_tool_has_the_parameters(row: Row) -> None:
    assert unknown(row) == []


# A row that is wrong, and what is said of it.
BROKEN = {
    "| `a` | `training.learnRate` |": ["training.learnRate is no field of a FineTuneJob"],
    "| `a` | `learningRate` |": ["learningRate is no field of a FineTuneJob"],
    "| `a` | `training.scheduler: Sine` |": ["training.scheduler does not take Sine"],
    "| `a` | `training.epochs: many` |": ["training.epochs does not take many"],
    "| `a` | in the training |": ["names no field"],
    "| `a` | not supported |": ["names no field", "names no nearest field"],
    "| another `a` | not supported, see `training.seed` |": ["names no nearest field"],
    "| `a` | `data.source.sources.weights` |": ["data.source.sources.weights is no field of a FineTuneJob"],
}


@pytest.mark.parametrize(("row", "said"), BROKEN.items(), ids=BROKEN)
def test_what_is_wrong_is_found(row: str, said: list[str]) -> None:
    assert [wrong(found) for found in rows(row)] == [said]


def test_a_parameter_that_a_tool_does_not_have_is_found() -> None:
    (row,) = rows("## TRL\n\n| `beta`, `adam_beta1`, `gamma: 1` | `training.seed` |")
    assert unknown(row) == ["gamma: 1"]


def test_a_parameter_without_a_row_is_found() -> None:
    tool = ("trl", "trainer/sft_config.py", "SFTConfig")
    shorter = [row for row in ROWS if "`packing`" not in row.there or row.chapter != "TRL"]
    assert missing("TRL", tool, shorter) - missing("TRL", tool, ROWS) == {"packing"}
