"""The command that repeats failed tests, with several workers too."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support.repeat import narrow, select

ARGUMENTS: dict[str, tuple[list[str], list[str]]] = {
    "a folder": (["tests/unit"], ["tests/unit"]),
    "a test of the folder": (["tests/unit", "tests/unit/a.py::b[c/d]"], ["tests/unit/a.py::b[c/d]"]),
    "a folder of the folder": (
        ["tests/unit", "tests/unit/a", "tests/unit/b.py"],
        ["tests/unit/a", "tests/unit/b.py"],
    ),
    "another folder": (["tests/unit", "tests/unit_b/a.py"], ["tests/unit", "tests/unit_b/a.py"]),
}


@pytest.mark.parametrize(("arguments", "expected"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_tests_take_the_place_of_their_folder(arguments: list[str], expected: list[str]) -> None:
    assert narrow(arguments) == expected


SELECTIONS: dict[str, tuple[list[str], str]] = {
    "an id": (["a.py::b[c d]"], """ PYTEST="'a.py::b[c d]'\""""),
    "an error in a test and in its teardown": (["a.py::b", "a.py::b"], """ PYTEST="'a.py::b'\""""),
    "what the shell or make would change": (["a.py::b['$c']"], """ PYTEST="'a.py::b'\""""),
    "many of a file": ([f"a.py::b[{number}]" for number in range(11)], """ PYTEST="'a.py'\""""),
    "too many": ([f"{number}.py::b" for number in range(11)], ""),
}


@pytest.mark.parametrize(("node_ids", "expected"), SELECTIONS.values(), ids=SELECTIONS)
def test_failed_tests_are_selected(node_ids: list[str], expected: str) -> None:
    assert select(node_ids) == expected


TESTS = """
import pytest

@pytest.fixture
def broken():
    raise ValueError

def test_error(broken):
    pass

@pytest.mark.parametrize("value", ["a b", "c"])
def test_failure(value):
    assert value == "c"
"""


def run_tests(folder: Path, *arguments: str) -> list[str]:
    """Run the tests of a folder on two workers, and return the last words of the output and the failed tests."""
    options = ["-p", "support.repeat", "--failed-tests", "build/failed", "--numprocesses", "2", "-q"]
    completed = subprocess.run(
        [sys.executable, "-m", "pytest", "tests", *options, *arguments],
        cwd=folder, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin"},
    )  # fmt: skip
    summary = completed.stdout.splitlines()[-1].partition(" in ")[0]
    return [summary, *shlex.split((folder / "build/failed").read_text("utf-8"))]


def test_failed_tests_of_all_workers_are_run_again(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / "tests" / name).write_text(TESTS, encoding="utf-8")
    summary, selection = run_tests(tmp_path)
    variable, _, selected = selection.partition("=")
    node_ids = shlex.split(selected)
    assert (summary, variable, sorted(node_ids)) == (
        "2 failed, 2 passed, 2 errors",
        "PYTEST",
        [
            "tests/test_a.py::test_error",
            "tests/test_a.py::test_failure[a b]",
            "tests/test_b.py::test_error",
            "tests/test_b.py::test_failure[a b]",
        ],
    )
    assert run_tests(tmp_path, *node_ids)[0] == "2 failed, 2 errors"
