"""What a recording says: which tests run the function of each mutant, and how long they take."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from long.mutants.listing import Mutant
from long.mutants.probes import insert_probes
from long.mutants.product import source_path
from long.mutants.recording import FIXTURE, FOLDER, IMPORT
from long.mutants.tree import Tree

TIERS = ("tests/unit", "tests/trainer")

_TESTS_OF = {
    "finetune_crds": "tests/unit/crds/",
    "finetune_operator": "tests/unit/operator/",
    "finetune_trainer": "tests/unit/trainer/",
}
"""Where the tests of what runs at import are."""
# All tests passed, or some failed.
_RAN = (0, 1)
_FOLDERS = ("current", "hits", "fixtures", "tests")


class RecordingError(Exception):
    """There is no whole recording of the tests."""


@dataclass(frozen=True)
class Coverage:
    """Which tests cover a mutant, and the seconds of all tests that passed."""

    tests: dict[str, frozenset[str]]
    seconds: dict[str, float]
    failed: frozenset[str]


def record(
    tree: Tree, mutants: Iterable[Mutant], folder: Path, options: Sequence[str], tests: Sequence[str] = ()
) -> None:
    """Run the tiers on a tree, with a probe in the function of each mutant.

    Args:
        options: options of pytest.
        tests: files or folders that run in place of the tiers; what they record is added to what is in the folder.

    Raises:
        RecordingError: pytest did not run to its end.
    """
    if not tests:
        shutil.rmtree(folder, ignore_errors=True)
    for name in _FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    names: dict[str, dict[str, str]] = {}
    for mutant in mutants:
        names.setdefault(mutant.module, {})[mutant.id] = mutant.name
    for module, of_module in names.items():
        source = source_path(tree.root, module).read_text(encoding="utf-8")
        tree.write(module, insert_probes(source, of_module, str(folder)))
    plugins = ("-p", "long.mutants.recording", "-p", "support.scheduling", "--dist", "loadfile")
    for paths in [list(tests)] if tests else [[tier] for tier in TIERS]:
        began = time.monotonic()
        command = [str(tree.python), "-m", "pytest", *paths, *plugins, "--numprocesses", "2", "-q", *options]
        environment = tree.environment | {FOLDER: str(folder)}
        done = subprocess.run(command, cwd=tree.root, env=environment, check=False)
        seconds = time.monotonic() - began
        print(f"== {' '.join(paths)} with probes: {seconds:.0f} s, exit status {done.returncode}", flush=True)
        if done.returncode not in _RAN:
            raise RecordingError(f"{' '.join(paths)} ended with exit status {done.returncode}: see above")


def read_coverage(folder: Path, mutants: Iterable[Mutant]) -> Coverage:
    """Read a recording. Tests that failed in it cover nothing: they would fail without a fault too."""
    users: dict[str, set[str]] = {}
    for path in (folder / "fixtures").iterdir():
        for fixture, tests in json.loads(path.read_text(encoding="utf-8")).items():
            users.setdefault(fixture, set()).update(tests)
    results: dict[str, dict[str, Any]] = {}
    for path in sorted((folder / "tests").iterdir(), key=lambda path: path.stat().st_mtime_ns):
        results |= json.loads(path.read_text(encoding="utf-8"))
    passed = {test: result["seconds"] for test, result in results.items() if result["outcome"] == "passed"}
    covering = {}
    for mutant in mutants:
        path = folder / "hits" / mutant.id
        names = set(path.read_text(encoding="utf-8").splitlines()) if path.exists() else set()
        tests = names.union(*(users.get(name, set()) for name in names if name.startswith(FIXTURE)))
        if IMPORT in names:
            tests |= {test for test in passed if test.startswith(_TESTS_OF[mutant.module.partition(".")[0]])}
        covering[mutant.id] = frozenset(tests & passed.keys())
    failed = frozenset(test for test, result in results.items() if result["outcome"] == "failed")
    return Coverage(covering, passed, failed)


def order_tests(mutant: Mutant, tests: Iterable[str], seconds: dict[str, float]) -> list[str]:
    """The tests of a mutant in the order in which they run.

    The test that killed it before is the first, then those of the module's own files, then the shortest.
    """
    return sorted(
        tests, key=lambda test: (test != mutant.by, not is_mirror(test, mutant.module), seconds[test], test)
    )


def is_mirror(test: str, module: str) -> bool:
    """Whether a test is in a file that is named after the module."""
    stem = os.path.basename(test.partition("::")[0]).removeprefix("test_").removesuffix(".py")  # noqa: PTH119
    name = module.rpartition(".")[2].strip("_")
    return stem == name or stem.endswith(f"_{name}") or stem.startswith(f"{name}_")


def limit_tests(tests: Sequence[str], seconds: dict[str, float], limit: float) -> list[str]:
    """The tests, in their order, that take no longer than a limit together; those that would exceed it are left out."""
    selected, total = [], 0.0
    for test in tests:
        if total + seconds[test] <= limit:
            selected.append(test)
            total += seconds[test]
    return selected
