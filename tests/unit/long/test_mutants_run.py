"""Mutants of a small product run against its tests, in a copy of its tree."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

import long.mutants
from long.mutants.__main__ import report_lost
from long.mutants.coverage import read_coverage, record
from long.mutants.listing import KILLED, LIVED, NOT_COVERED, Listing, Mutant, load, save
from long.mutants.run import Runner
from long.mutants.tree import copy_tree
from support import scheduling

SIZES = """\
def total(sizes):
    if len(sizes) > 1:
        return sum(sizes)
    return 0


def unused():
    return 1


def forever(count):
    while count > 0:
        count -= 1
    return count + 1
"""
TESTS = """\
import subprocess
import sys

import pytest

from finetune_operator.sizes import forever

CODE = "import sys; from finetune_operator.sizes import total; sys.exit(total([2, 3]))"


@pytest.fixture(scope="module")
def status():
    return subprocess.run([sys.executable, "-c", CODE], env={}).returncode


def test_the_total_is_a_status(status):
    assert status == 5


def test_forever():
    assert forever(2) == 1
"""
FILES = {
    "crds/finetune_crds/__init__.py": "",
    "operator/finetune_operator/__init__.py": "",
    "operator/finetune_operator/sizes.py": SIZES,
    "trainer_image/finetune_trainer/__init__.py": "",
    "tests/unit/test_sizes.py": TESTS,
    "pyproject.toml": "[tool.pytest.ini_options]\npythonpath = ['tests']\n",
}
TOTAL, FOREVER = (
    "tests/unit/test_sizes.py::test_the_total_is_a_status",
    "tests/unit/test_sizes.py::test_forever",
)
MUTANTS = (
    Mutant("m001", "finetune_operator.sizes:total", "drop-return-value", "return sum(sizes)"),
    Mutant("m002", "finetune_operator.sizes:total", "move-boundary", "len(sizes) > 1"),
    Mutant("m003", "finetune_operator.sizes:unused", "drop-return-value", "return 1"),
    Mutant("m004", "finetune_operator.sizes:forever", "add-one", "1", occurrence=1),
)


def test_tests_kill_the_mutants_that_they_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Most of the time of each pytest would go into plugins that these tests do not use.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")
    source, runs = tmp_path / "source", tmp_path / "runs"
    _write_product(source)
    runs.mkdir()
    tree = copy_tree(source, tmp_path / "tree")
    record(
        copy_tree(source, tmp_path / "recorded"),
        MUTANTS,
        tmp_path / "recording",
        ["--numprocesses=0"],
        ["tests/unit"],
    )
    coverage = read_coverage(tmp_path / "recording", MUTANTS)
    assert coverage.tests == {
        "m001": frozenset({TOTAL}),
        "m002": frozenset({TOTAL}),
        "m003": frozenset(),
        "m004": frozenset({FOREVER}),
    }
    runner = Runner(tree, runs)
    assert [runner.measure(mutant, coverage) for mutant in MUTANTS] == [
        replace(MUTANTS[0], result=KILLED, by=TOTAL),
        replace(MUTANTS[1], result=LIVED),
        replace(MUTANTS[2], result=NOT_COVERED),
        replace(MUTANTS[3], result=KILLED, by=FOREVER),
    ]
    assert runner.unreliable_tests([TOTAL, FOREVER], coverage) == set()
    with tree.replace_source("finetune_operator.sizes", SIZES.replace("count + 1", "count")):
        assert runner.unreliable_tests([TOTAL, FOREVER], coverage) == {FOREVER}


@pytest.mark.parametrize(
    ("before", "after", "status"),
    [
        (KILLED, LIVED, 1),
        (KILLED, NOT_COVERED, 1),
        (KILLED, KILLED, 0),
        (LIVED, LIVED, 0),
        (LIVED, KILLED, 0),
    ],
)
def test_a_mutant_that_is_not_killed_any_more_is_a_failure(before: str, after: str, status: int) -> None:
    mutant = replace(MUTANTS[0], result=before)
    assert report_lost([mutant, MUTANTS[1]], {"m001": replace(mutant, result=after)}) == status


def test_a_list_is_read_as_it_was_written(tmp_path: Path) -> None:
    mutants = [
        replace(MUTANTS[0], result=KILLED, by=TOTAL),
        replace(MUTANTS[1], result=LIVED, reason="it is 1 < 2"),
    ]
    listing = Listing(mutants, {"commit": "4e7283c", "seconds": {"recording": 3}})
    save(tmp_path / "mutants.yaml", listing)
    assert load(tmp_path / "mutants.yaml") == listing


def _write_product(root: Path) -> None:
    for name, content in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content, encoding="utf-8")
    package = Path(long.mutants.__file__).parent
    shutil.copytree(
        package, root / "tests" / "long" / "mutants", ignore=shutil.ignore_patterns("__pycache__")
    )
    (root / "tests" / "support").mkdir()
    shutil.copy2(scheduling.__file__, root / "tests" / "support")
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
