"""`python -m bench.promotions`: many promotions on one registry, and an operator that is started again."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

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
        world(Path(folder)) as found,
    ):
        _say(f"registering {result.models} models, creating {result.promotions} promotions")
        fill(found, result.promotions)
        first(found, result)
        for number in range(options.rounds):
            result.restarts.append(restart(found, result))
            _say(f"restart {number + 1}: {result.restarts[-1].seconds:.1f} s")
    whole = report.as_json(described, date, result)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    _say(f"\n{report.as_markdown(described, date, result)}\n\nwritten to {options.output}")
    failings = list(result.failings())
    for sentence in failings:
        print(f"FAILED: {sentence}", file=sys.stderr)
    return int(bool(failings))


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


def first(found: World, result: Result) -> None:
    """Start the operator with unreconciled promotions, and wait until every alias is in place."""
    audit, access = found.tails()
    began = time.monotonic()
    found.operator.start()
    wait_for("every alias in place", lambda: _settled(found), _SECONDS_TO_FILL, found.operator)
    result.first_seconds = time.monotonic() - began
    # The last statuses and tags are on their way.
    wait_for("an empty queue", lambda: found.waiting() == 0, _SECONDS_TO_FILL, found.operator)
    stay(RESYNC_SECONDS, found.operator)
    asked = count(audit.lines(), access.lines())
    result.first_api_writes, result.first_mlflow_writes = asked.api_writes, asked.mlflow_writes
    _say(f"every alias is in place after {result.first_seconds:.1f} s")


def restart(found: World, result: Result) -> Restart:
    """Stop the operator, start it, and count until all promotions were reconciled and a resync is over."""
    found.operator.stop()
    audit, access = found.tails()
    began = time.monotonic()
    found.operator.start()
    asked = Requests()
    # NB: longer than the goal, so that what misses it is measured too.
    wait_for(
        "every promotion", lambda: _seen(found, result, access, asked), 10 * GOAL_SECONDS, found.operator
    )
    seconds, passes, memory = time.monotonic() - began, found.passes(), found.memory_mib()
    reads = asked.mlflow_reads
    stay(RESYNC_SECONDS + 5, found.operator)
    count(audit.lines(), access.lines(), asked)
    return Restart(
        seconds=seconds,
        passes=int(passes),
        mlflow_reads=reads,
        memory_mib=memory,
        api_writes=asked.api_writes,
        mlflow_writes=asked.mlflow_writes,
        failures=int(found.failures()),
    )


def _seen(found: World, result: Result, access: Tail, asked: Requests) -> bool:
    """Whether there was a pass for each promotion, MLflow was asked about each model, and nothing waits."""
    passes = found.passes()
    count([], access.lines(), asked)
    return passes >= result.promotions and len(asked.models) >= result.models and found.waiting() == 0


def _settled(found: World) -> bool:
    time.sleep(2)
    return settled(found.promotions())


def machine() -> dict[str, Any]:
    """What the figures are taken on."""
    return {
        "cpu": processor(Path("/proc/cpuinfo").read_text(encoding="utf-8")),
        "cores": len(os.sched_getaffinity(0)),
        "memoryGiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
