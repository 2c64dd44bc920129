"""A plugin of pytest that runs some tests in a given order, and notes the first that fails."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

SELECTION = "MUTANTS_SELECTION"
"""The variable with the path of a JSON list of tests."""
RESULT = "MUTANTS_RESULT"
"""The variable with the path of the file to write the name of the first test that failed to."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose and order the tests."""
    names = json.loads(Path(os.environ[SELECTION]).read_text(encoding="utf-8"))
    order = {name: index for index, name in enumerate(names)}
    deselected = [item for item in items if item.nodeid not in order]
    items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])
    config.hook.pytest_deselected(items=deselected)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a test that failed."""
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a file that cannot be collected."""
    _note(report)


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    path = Path(os.environ[RESULT])
    if report.failed and not path.exists():
        path.write_text(report.nodeid, encoding="utf-8")
