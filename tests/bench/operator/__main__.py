"""`python -m bench.operator`: measure, print the tables, and leave a JSON file."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.console import positive, publish, report_failures, say
from bench.operator import report
from bench.operator.contenders import NAMES, OURS
from bench.operator.figures import Fleet, Visit
from bench.operator.report import Result
from bench.operator.running import measure_running
from bench.operator.visit import measure_idle, measure_restart, open_stage, start_fleets
from bench.trainer.machine import processor
from cluster import binaries
from support.mlflow_server import Mlflow
from support.process import running

_OUTPUT = "build/bench-operator.json"
FLEETS, IDLE, RESTART, LARGE, RUNNING = PARTS = ("fleets", "idle", "restart", "large", "running")


def main(arguments: list[str]) -> int:
    """Measure; 1 where a part failed or a restart wrote what needed no writing, 0 otherwise, also when a goal is missed."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda received, _frame: sys.exit(128 + received))
    binaries.ensure("kube", "kubectl", "jobset")
    described, date = describe_machine(), datetime.now(UTC).strftime("%Y-%m-%d")
    result = Result()
    with (
        tempfile.TemporaryDirectory(prefix="bench-operator-", dir=options.work) as folder,
        running(Mlflow(Path(folder) / "mlflow")) as mlflow,
    ):
        measure(options, result, mlflow, Path(folder))
    document, markdown = report.as_json(described, date, result), report.as_markdown(described, date, result)
    publish(document, markdown, options.output)
    return report_failures(result.failures())


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench.operator",
        description="Compare the operator with JobSet on a control plane without kubelets, in one run.",
    )
    parser.add_argument(
        "--jobs",
        nargs="+",
        type=positive,
        default=[100, 500],
        help="sizes of fleets, one after another (default: 100 500)",
    )
    parser.add_argument(
        "--large", type=positive, default=2000, help="jobs of the large fleet (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=positive, default=3, help="rounds (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), help="these contenders")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="these measurements")
    parser.add_argument(
        "--idle-seconds", type=positive, default=60, help="length of the idle time (default: %(default)s)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        help="how long the large fleet runs and reports progress (default: %(default)s)",
    )
    parser.add_argument(
        "--failures",
        type=positive,
        default=200,
        help="pods of it that fail afterwards (default: %(default)s)",
    )
    parser.add_argument("--work", type=Path, help="folder to work in (default: TMPDIR)")
    parser.add_argument("--output", type=Path, default=Path(_OUTPUT), help="JSON file (default: %(default)s)")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace, result: Result, mlflow: Mlflow, folder: Path) -> None:
    """Round after round of all contenders, each round beginning with another; then the large fleet."""
    for number in range(options.rounds if {FLEETS, IDLE, RESTART} & {*options.parts} else 0):
        first = number % len(options.only)
        for name in options.only[first:] + options.only[:first]:
            visit = Visit(name)
            result.visits.append(visit)
            with (
                _recording_failures(result, f"round {number + 1}, {name}"),
                open_stage(name, mlflow, folder / f"{number}-{name}") as stage,
            ):
                start_fleets(stage, visit, options.jobs, _say_fleet)
                if number == 0 and IDLE in options.parts:
                    visit.idle_seconds = measure_idle(stage, options.idle_seconds)
                if number == 0 and RESTART in options.parts:
                    visit.restart = measure_restart(stage, sum(options.jobs))
    if OURS in options.only and {LARGE, RUNNING} & {*options.parts}:
        with _recording_failures(result, f"{options.large} jobs"):
            measure_large(options, result, mlflow, folder / LARGE)


def measure_large(options: argparse.Namespace, result: Result, mlflow: Mlflow, folder: Path) -> None:
    """One large fleet of ours: a restart, then its jobs run."""
    result.large = Visit(OURS)
    with open_stage(OURS, mlflow, folder) as stage:
        (namespace,) = start_fleets(stage, result.large, [options.large], _say_fleet)
        if LARGE in options.parts:
            result.large.restart = measure_restart(stage, options.large)
            say(f"restart with {options.large} jobs: {result.large.restart.seconds:.1f} s")
        if RUNNING in options.parts:
            result.running = measure_running(stage, namespace, options.minutes * 60, options.failures)


@contextmanager
def _recording_failures(result: Result, part: str) -> Iterator[None]:
    """Let the other parts of the benchmark go on where one fails."""
    try:
        yield
    # NB: of what a wait, a request and a controller that ended raise.
    except (RuntimeError, OSError) as error:
        result.broken_parts.append(f"{part}: {error}")
        say(f"FAILED: {part}: {error}")


def describe_machine() -> dict[str, Any]:
    """What the figures are taken on."""
    return {
        "cpu": processor(Path("/proc/cpuinfo").read_text(encoding="utf-8")),
        "cores": len(os.sched_getaffinity(0)),
        "memoryGiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def _say_fleet(contender: str, fleet: Fleet) -> None:
    say(
        f"{contender}: {fleet.jobs} jobs: {fleet.jobs_per_second:.1f} jobs/s, "
        f"{fleet.cpu_milliseconds_per_job:.1f} ms of CPU a job"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
