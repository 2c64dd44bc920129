"""docs/operations/settings.md names every setting with its default and chart value."""

from __future__ import annotations

import re
from pathlib import Path

from finetune_operator.defaults import Defaults
from finetune_operator.settings import Settings

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "operations" / "settings.md").read_text(encoding="utf-8")
DEPLOYMENT = ROOT / "charts" / "finetune-operator" / "templates" / "deployment.yaml"


def rows(heading: str) -> list[list[str]]:
    """The rows of the table of a chapter, without backticks."""
    chapter = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    found = [line for line in chapter.splitlines() if line.startswith("| `")]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in found]


def shown(value: object) -> str:
    """A default, as the table has it."""
    if isinstance(value, Defaults):
        return "" if value == Defaults() else repr(value)
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value or "")


def test_settings() -> None:
    known = {f"FINETUNE_{name.upper()}": shown(value) for name, value in vars(Settings()).items()}
    assert {name: default for name, default, *_ in rows("Settings")} == known


def test_settings_that_the_chart_sets() -> None:
    in_chart = re.findall(r"- name: (FINETUNE_\w+)", DEPLOYMENT.read_text(encoding="utf-8"))
    assert {name for name, _, value, _ in rows("Settings") if value} == {*in_chart}
