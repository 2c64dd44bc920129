"""A plugin of pytest that keeps the name of the test that runs in a file, for the probes, and notes how long tests take.

What a fixture of a module or a session does counts for all tests that use the fixture.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from long.mutants.probes import CURRENT_TEST

FOLDER = "MUTANTS_RECORDING"
"""The variable with the folder of the recording."""
FIXTURE = "fixture "
"""What the name of a fixture begins with, where a test's could be."""
IMPORT = "import"
"""The name for what runs while tests are collected."""


class Recording:
    """The state of the recording in one process of pytest."""

    def __init__(self, folder: Path, *, is_worker: bool) -> None:
        self.folder = folder
        self.is_worker = is_worker
        self.current = folder / "current" / str(os.getpid())
        self.item = ""
        self.users: defaultdict[str, set[str]] = defaultdict(set)
        self.tests: dict[str, dict[str, Any]] = {}
        os.environ[CURRENT_TEST] = str(self.current)
        self.set_current(IMPORT)

    def set_current(self, name: str) -> None:
        """Name what runs now."""
        unfinished = self.current.with_suffix(".new")
        unfinished.write_text(name, encoding="utf-8")
        unfinished.replace(self.current)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Note which tests use which fixtures."""
        for item in items:
            for fixtures in getattr(item, "_fixtureinfo").name2fixturedefs.values():  # noqa: B009 - not public
                for fixture in fixtures:
                    if fixture.scope != "function":
                        self.users[_name(fixture)].add(item.nodeid)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """A test runs."""
        self.item = item.nodeid
        self.set_current(self.item)
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        """A fixture is set up."""
        if fixturedef.scope == "function":
            return (yield)
        before = self.current.read_text(encoding="utf-8")
        self.users[_name(fixturedef)].add(self.item)
        self.set_current(_name(fixturedef))
        try:
            return (yield)
        finally:
            self.set_current(before)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up the seconds of a test."""
        test = self.tests.setdefault(report.nodeid, {"seconds": 0.0, "outcome": "passed"})
        test["seconds"] = round(test["seconds"] + report.duration, 3)
        if report.outcome != "passed":
            test["outcome"] = report.outcome

    def pytest_sessionfinish(self) -> None:
        """Write the users of fixtures; where all reports arrive, write the tests too."""
        name = f"{os.getpid()}.json"
        users = {fixture: sorted(tests) for fixture, tests in self.users.items()}
        (self.folder / "fixtures" / name).write_text(json.dumps(users), encoding="utf-8")
        if not self.is_worker:
            (self.folder / "tests" / name).write_text(json.dumps(self.tests), encoding="utf-8")


def _name(fixture: Any) -> str:
    return f"{FIXTURE}{fixture.baseid}::{fixture.argname}"


def pytest_configure(config: pytest.Config) -> None:
    """Begin the recording."""
    folder = Path(os.environ[FOLDER])
    config.pluginmanager.register(Recording(folder, is_worker=hasattr(config, "workerinput")))
