"""Measures the tests' power. The steps are choose, record, run; `measure` records and runs."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue

from long.mutants.coverage import Coverage, RecordingError, read_coverage, record
from long.mutants.listing import EQUIVALENT, KILLED, LIVED, NOT_COVERED, Listing, Mutant, load, save
from long.mutants.repair import MissingMutantsError, check, repair
from long.mutants.run import RunError, Runner
from long.mutants.sample import QUOTAS, choose, find_part
from long.mutants.tree import copy_tree

_ROOT = Path(__file__).parents[3]
LIST = Path(__file__).with_name("mutants.yaml")
BUILD = _ROOT / "build" / "mutants"
_RECORDED = BUILD / "recording" / "commit"
"""The file with the checkout and the commit that were recorded."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a step; return the exit status.

    1: a mutant that was killed lives now. 2: mutants are missing, or tests fail without a fault.
    """
    options = _parse(arguments)
    listing = load(LIST)
    try:
        match options.step:
            case "choose":
                save(LIST, Listing(choose(options.root, listing.mutants), listing.measured))
            case "repair":
                repaired = repair(options.root, listing.mutants)
                save(LIST, Listing(repaired, listing.measured))
                check(options.root, repaired)
            case "record":
                _record(listing.mutants, options)
                return _report_failed(read_coverage(BUILD / "recording", listing.mutants))
            case _:
                return _measure(listing, options)
    except (MissingMutantsError, RecordingError, RunError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m long.mutants", description=__doc__)
    parser.add_argument("step", choices=["choose", "repair", "record", "run", "measure"])
    parser.add_argument("--only", choices=[LIVED, KILLED, NOT_COVERED], help="only mutants with this result")
    parser.add_argument("--part", default="", help="only mutants of modules whose name begins so")
    parser.add_argument("--id", nargs="*", default=[], help="only these mutants")
    parser.add_argument(
        "--root", type=Path, default=_ROOT, help="the checkout to measure (default: this one)"
    )
    parser.add_argument(
        "--tests", nargs="*", default=[], help="record only these files or folders, in addition"
    )
    parser.add_argument("--jobs", type=int, default=2, help="how many mutants run at a time (default: 2)")
    parser.add_argument(
        "--prefix", type=shlex.split, default=[], help="a command that starts each pytest of a mutant"
    )
    parser.add_argument("--pytest", type=shlex.split, default=[], help="options of pytest for the recording")
    return parser.parse_args(arguments)


def _record(mutants: Sequence[Mutant], options: argparse.Namespace) -> None:
    check(options.root, mutants)
    tree = copy_tree(options.root, BUILD / "recorded")
    record(tree, mutants, BUILD / "recording", options.pytest, options.tests)
    _RECORDED.write_text(_describe_checkout(options.root), encoding="utf-8")


def _report_failed(coverage: Coverage) -> int:
    for test in sorted(coverage.failed):
        print(f"FAILED without a fault: {test}")
    return 2 if coverage.failed else 0


def _measure(listing: Listing, options: argparse.Namespace) -> int:
    check(options.root, listing.mutants)
    began = time.monotonic()
    if options.step == "measure":
        _record(listing.mutants, options)
    elif not _RECORDED.exists() or _RECORDED.read_text(encoding="utf-8") != _describe_checkout(options.root):
        raise RecordingError(
            f"the tests of {_describe_checkout(options.root)} were not recorded: record them first"
        )
    recorded = time.monotonic()
    selected = [mutant for mutant in listing.mutants if _is_selected(mutant, options)]
    coverage = read_coverage(BUILD / "recording", listing.mutants)
    if _report_failed(coverage) and options.step == "measure":
        print("nothing is measured by tests that fail: record them again (record --tests), then run")
        return 2
    results = _run(selected, coverage, options)
    mutants = [results.get(mutant.id, mutant) for mutant in listing.mutants]
    measured = listing.measured
    unmeasured = [mutant for mutant in selected if mutant.id not in results]
    if len(results) == sum(mutant.result != EQUIVALENT for mutant in listing.mutants):
        measured = {
            "commit": _git_head(options.root),
            "date": datetime.now(UTC).date().isoformat(),
            "tests": len(coverage.seconds),
            "seconds": {"recording": round(recorded - began), "running": round(time.monotonic() - recorded)},
        }
    save(LIST, Listing(mutants, measured))
    print(summarize(mutants))
    for mutant in unmeasured:
        print(
            f"NOT MEASURED: {mutant.id} {mutant.function}: its killer fails without the fault, too; run it again"
        )
    return 2 if unmeasured else report_lost(listing.mutants, results)


def _is_selected(mutant: Mutant, options: argparse.Namespace) -> bool:
    return (
        mutant.result != EQUIVALENT
        and (options.only is None or mutant.result == options.only)
        and mutant.module.startswith(options.part)
        and (not options.id or mutant.id in options.id)
    )


def _run(mutants: Sequence[Mutant], coverage: Coverage, options: argparse.Namespace) -> dict[str, Mutant]:
    """Run mutants, some at a time, each on a tree of its own; then the tests that killed them, without a fault.

    Returns:
        The results by mutant. Mutants whose killer fails without a fault too have none.
    """
    runs = BUILD / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    free: SimpleQueue[Runner] = SimpleQueue()
    for number in range(options.jobs):
        free.put(Runner(copy_tree(options.root, BUILD / f"tree-{number}"), runs, options.prefix))

    def run(mutant: Mutant) -> Mutant:
        runner, began = free.get(), time.monotonic()
        try:
            result = runner.measure(mutant, coverage)
        finally:
            free.put(runner)
        seconds = time.monotonic() - began
        line = f"{result.id} {result.function} {result.operator} `{result.fragment}`: {result.result} {result.by}"
        print(f"{line} ({seconds:.0f} s)", flush=True)
        return result

    with ThreadPoolExecutor(options.jobs) as pool:
        results = {result.id: result for result in pool.map(run, mutants)}
    killers = {result.by for result in results.values()} & coverage.seconds.keys()
    unreliable = free.get().unreliable_tests(killers, coverage)
    return {name: result for name, result in results.items() if result.by not in unreliable}


def summarize(mutants: Sequence[Mutant]) -> str:
    """A table of the results, by part of the product."""
    columns = (KILLED, LIVED, NOT_COVERED, EQUIVALENT)
    counts = Counter((find_part(mutant.module), mutant.result) for mutant in mutants)
    rows = [(part, [counts[part, column] for column in columns]) for part in QUOTAS]
    rows.append(("all", [sum(numbers) for numbers in zip(*(row[1] for row in rows), strict=True)]))
    lines = [f"{'':26}" + "".join(f"{column:>13}" for column in columns)]
    lines += [f"{part:26}" + "".join(f"{number:>13}" for number in numbers) for part, numbers in rows]
    return "\n".join(lines)


def report_lost(before: Sequence[Mutant], results: Mapping[str, Mutant]) -> int:
    """Print the mutants that tests killed before and do not kill now; 1 if there are any."""
    if not any(mutant.result in (KILLED, LIVED, NOT_COVERED) for mutant in before):
        print("there are no earlier results to compare with")
    lost = [
        results[mutant.id]
        for mutant in before
        if mutant.result == KILLED and mutant.id in results and results[mutant.id].result != KILLED
    ]
    for mutant in lost:
        print(
            f"LOST: {mutant.id} {mutant.function} {mutant.operator} `{mutant.fragment}` is {mutant.result} now"
        )
    return 1 if lost else 0


def _describe_checkout(root: Path) -> str:
    return f"{root.resolve()} at {_git_head(root)}"


def _git_head(root: Path) -> str:
    command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
