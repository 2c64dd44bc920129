"""Runs a mutant: puts its fault into a tree, and runs the tests that cover it until one fails."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from long.mutants.coverage import TIERS, Coverage, is_mirror, limit_tests, order_tests
from long.mutants.listing import KILLED, LIVED, NOT_COVERED, Mutant
from long.mutants.product import read_module
from long.mutants.repair import find_candidate
from long.mutants.selection import RESULT, SELECTION
from long.mutants.tree import Tree

LIMIT_SECONDS = 300.0
"""What the tests that run for a mutant took together, when they were recorded, at most."""
TIME_LIMIT = "time limit"
"""What kills a mutant whose tests do not end."""
EXIT_STATUS = "exit status"
"""What kills a mutant whose tests crash pytest."""

_FIRST_OTHERS = 40
"""So many tests of other files run before the rest: collecting many files takes longer than these tests."""
_TIMED_OUT = 124
_NO_TESTS = 5


class RunError(Exception):
    """The tests of a mutant cannot be run."""


@dataclass(frozen=True)
class Runner:
    """Runs tests on a tree.

    Attributes:
        folder: where to write the logs.
        prefix: a command that starts each pytest, as `nice`.
    """

    tree: Tree
    folder: Path
    prefix: Sequence[str] = ()

    def measure(self, mutant: Mutant, coverage: Coverage) -> Mutant:
        """Put the fault of a mutant into the tree, and run its tests; return the mutant with its result.

        Raises:
            RunError: pytest fails in the same way without the fault, and no test does.
        """
        covering = order_tests(mutant, coverage.tests[mutant.id], coverage.seconds)
        tests = limit_tests(covering, coverage.seconds, LIMIT_SECONDS)
        unmeasured = replace(mutant, by="", left_out=0)
        if not tests:
            return replace(unmeasured, result=NOT_COVERED, left_out=len(covering))
        module = read_module(self.tree.root, mutant.module)
        fault = find_candidate(module, mutant).apply(module.source)
        for index, batch in enumerate(_batches(tests, mutant)):
            with self.tree.replace_source(mutant.module, fault):
                killer = self.first_failure(f"{mutant.id}-{index}", batch, coverage)
            if killer is not None:
                self._check_killer(killer, f"{mutant.id}-{index}-without-fault", batch, coverage)
                return replace(unmeasured, result=KILLED, by=killer)
        return replace(unmeasured, result=LIVED, left_out=len(covering) - len(tests))

    def _check_killer(self, killer: str, name: str, batch: Sequence[str], coverage: Coverage) -> None:
        """Check that what is no test, such as a time limit, kills only with the fault; tests are checked together later."""
        if killer not in coverage.seconds and self.first_failure(name, batch, coverage) == killer:
            raise RunError(f"{killer} without the fault, too: see {self.folder / name}.log")

    def unreliable_tests(self, tests: Iterable[str], coverage: Coverage) -> set[str]:
        """Run tests on the tree as it is, and return those that fail: what they killed may live."""
        remaining, unreliable = sorted(tests), set[str]()
        while remaining and (failure := self.first_failure("without-fault", remaining, coverage)):
            # NB: a time limit or a crash is the fault of no single test.
            unreliable |= {failure} & set(remaining) or set(remaining)
            remaining = [test for test in remaining if test not in unreliable]
        return unreliable

    def first_failure(self, name: str, tests: Sequence[str], coverage: Coverage) -> str | None:
        """Run some tests until one fails, and return its name.

        Raises:
            RunError: pytest collected none of them.
        """
        # NB: pytest cannot collect two files of one name, which tiers may have.
        for tier in TIERS:
            of_tier = [test for test in tests if test.startswith(f"{tier}/")]
            failure = self._run(f"{name}-{Path(tier).name}", of_tier, coverage) if of_tier else None
            if failure is not None:
                return failure
        return None

    def _run(self, name: str, tests: Sequence[str], coverage: Coverage) -> str | None:
        selection, result = self.folder / f"{name}.json", self.folder / f"{name}.failed"
        selection.write_text(json.dumps(tests), encoding="utf-8")
        result.unlink(missing_ok=True)
        limit = 180 + 4 * sum(coverage.seconds[test] for test in tests)
        timeout = ("timeout", "--kill-after=10", f"{limit:.0f}")
        pytest = (str(self.tree.python), "-m", "pytest", "-x", "-q", "-p", "long.mutants.selection")
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        with (self.folder / f"{name}.log").open("wb") as log:
            done = subprocess.run(
                [*self.prefix, *timeout, *pytest, *files],
                cwd=self.tree.root,
                env=self.tree.environment | {SELECTION: str(selection), RESULT: str(result)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if done.returncode == 0:
            return None
        if done.returncode == _NO_TESTS:
            raise RunError(f"pytest collects none of {len(tests)} tests, such as {tests[0]}: see {log.name}")
        if result.exists():
            return result.read_text(encoding="utf-8")
        return TIME_LIMIT if done.returncode == _TIMED_OUT else f"{EXIT_STATUS} {done.returncode}"


def _batches(tests: list[str], mutant: Mutant) -> list[list[str]]:
    before = [test for test in tests if test == mutant.by]
    mirror_tests = [test for test in tests if test != mutant.by and is_mirror(test, mutant.module)]
    other_tests = tests[len(before) + len(mirror_tests) :]
    return [
        batch
        for batch in (before, mirror_tests, other_tests[:_FIRST_OTHERS], other_tests[_FIRST_OTHERS:])
        if batch
    ]
