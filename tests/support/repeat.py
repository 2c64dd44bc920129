"""A pytest plugin that writes what a target of make needs to run the failed tests again, and runs tests by their ids.

A target appends PYTEST to the folder of its tests. A test or a file that PYTEST names takes the place of the folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

_MAX_IDS = 10
# NB: make and the shell read the id; a parameter that they could change is left out, so that all its cases run.
_SAFE_ID = re.compile(r"[\w./:\[\], =+-]+")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the file."""
    parser.addoption("--failed-tests", type=Path, metavar="FILE", help="where to write PYTEST=... on failure")


def pytest_configure(config: pytest.Config) -> None:
    """Leave out folders of which PYTEST names tests or files."""
    config.args = narrow(config.args)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write the failed tests; xdist reports those of all workers to this process."""
    file = config.getoption("failed_tests")
    reports = [report for kind in ("failed", "error") for report in terminalreporter.getreports(kind)]
    if file is not None and reports:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(select(report.nodeid for report in reports), encoding="utf-8")


def narrow(arguments: Sequence[str]) -> list[str]:
    """Drop each argument that contains another one."""
    paths = [Path(argument.partition("::")[0]).resolve() for argument in arguments]
    return [
        argument
        for argument, path in zip(arguments, paths, strict=True)
        if not any(path in other_path.parents for other_path in paths)
    ]


def select(node_ids: Iterable[str]) -> str:
    """Return the variable of make that selects tests: by id, or by file, or none where there are too many."""
    ids = [node_id if _SAFE_ID.fullmatch(node_id) else node_id.partition("[")[0] for node_id in node_ids]
    for names in (ids, [node_id.partition("::")[0] for node_id in ids]):
        distinct = list(dict.fromkeys(names))
        if len(distinct) <= _MAX_IDS:
            return ' PYTEST="' + " ".join(f"'{name}'" for name in distinct) + '"'
    return ""
