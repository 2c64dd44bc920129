"""`python -m bench.promotions`: many promotions on one registry, and an operator that is started again."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.console import publish, report_failures, say
from bench.promotions import report
from bench.promotions.report import GOAL_SECONDS, Restart, Result
from bench.promotions.world import ALIASES, RESYNC_SECONDS, World, fill, settled, stay, world
from bench.promotions.writes import Requests, Tail, count
from bench.trainer.machine import processor
from support.waiting import wait_for

_OUTPUT = "build/bench-promotions.json"
# Not what is measured: it only has to come to an end.
_SECONDS_TO_FILL = 900.0


def main(arguments: list[str]) -> int:
    """Measure; 1 where it took too long after a restart, or something was written that needed no writing."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda received, _frame: sys.exit(128 + received))
    described, date = machine(), datetime.now(UTC).strftime("%Y-%m-%d")
    result = Result(options.promotions, -(-options.promotions // len(ALIASES)))
    with (
        tempfile.TemporaryDirectory(prefix="bench-promotions-", dir=options.work) as folder,
        world(Path(folder)) as bench_world,
    ):
        say(f"registering {result.models} models, creating {result.promotions} promotions")
        fill(bench_world, result.promotions)
        first(bench_world, result)
        for number in range(options.rounds):
            result.restarts.append(restart(bench_world, result))
            say(f"restart {number + 1}: {result.restarts[-1].seconds:.1f} s")
    document, markdown = report.as_json(described, date, result), report.as_markdown(described, date, result)
    publish(document, markdown, options.output)
    return report_failures(result.failings())


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench.promotions",
        description="Measure how long a restarted operator takes to reconcile every promotion, and what it writes.",
    )
    parser.add_argument(
        "--promotions", type=int, default=500, help="how many there are (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="restarts to measure (default: %(default)s)")
    parser.add_argument("--work", type=Path, help="folder to work in (default: TMPDIR)")
    parser.add_argument("--output", type=Path, default=Path(_OUTPUT), help="JSON file (default: %(default)s)")
    return parser.parse_args(arguments)


def first(bench_world: World, result: Result) -> None:
    """Start the operator with unreconciled promotions, and wait until every alias is in place."""
    audit, access = bench_world.tails()
    began = time.monotonic()
    bench_world.operator.start()
    wait_for("every alias in place", lambda: _settled(bench_world), _SECONDS_TO_FILL, bench_world.operator)
    result.first_seconds = time.monotonic() - began
    # The last statuses and tags are on their way.
    wait_for("an empty queue", lambda: bench_world.waiting() == 0, _SECONDS_TO_FILL, bench_world.operator)
    stay(RESYNC_SECONDS, bench_world.operator)
    requests = count(audit.lines(), access.lines())
    result.first_api_writes, result.first_mlflow_writes = requests.api_writes, requests.mlflow_writes
    say(f"every alias is in place after {result.first_seconds:.1f} s")


def restart(bench_world: World, result: Result) -> Restart:
    """Stop the operator, start it, and count until all promotions were reconciled and a resync is over."""
    bench_world.operator.stop()
    audit, access = bench_world.tails()
    began = time.monotonic()
    bench_world.operator.start()
    requests = Requests()
    # NB: longer than the goal, so that what misses it is measured too.
    wait_for(
        "every promotion",
        lambda: _seen(bench_world, result, access, requests),
        10 * GOAL_SECONDS,
        bench_world.operator,
    )
    seconds, passes, memory = time.monotonic() - began, bench_world.passes(), bench_world.memory_mib()
    reads = requests.mlflow_reads
    stay(RESYNC_SECONDS + 5, bench_world.operator)
    count(audit.lines(), access.lines(), requests)
    return Restart(
        seconds=seconds,
        passes=int(passes),
        mlflow_reads=reads,
        memory_mib=memory,
        api_writes=requests.api_writes,
        mlflow_writes=requests.mlflow_writes,
        failures=int(bench_world.failures()),
    )


def _seen(bench_world: World, result: Result, access: Tail, requests: Requests) -> bool:
    """Whether there was a pass for each promotion, MLflow was asked about each model, and nothing waits."""
    passes = bench_world.passes()
    count([], access.lines(), requests)
    return (
        passes >= result.promotions and len(requests.models) >= result.models and bench_world.waiting() == 0
    )


def _settled(bench_world: World) -> bool:
    time.sleep(2)
    return settled(bench_world.promotions())


def machine() -> dict[str, Any]:
    """What the figures are taken on."""
    return {
        "cpu": processor(Path("/proc/cpuinfo").read_text(encoding="utf-8")),
        "cores": len(os.sched_getaffinity(0)),
        "memoryGiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
