"""One contender on a control plane of its own: fleets, an idle minute, a restart."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.operator.contenders import OURS, Contender, JobSet, Ours, find_crds
from bench.operator.figures import Fleet, Restart, Visit
from bench.operator.fleet import start_fleet
from bench.operator.plane import Plane, start_plane
from bench.operator.requests import count_access, count_audit, list_mlflow_writes, list_writes
from bench.operator.usage import cpu_seconds, memory_mib
from bench.promotions.world import stay
from bench.promotions.writes import Tail
from support.mlflow_server import Mlflow
from support.waiting import wait_for

# NB: longer than the goal, so that what misses it is measured too.
_SECONDS_TO_RESTART = 600.0
# The operator lists all objects again 30 seconds after its watches began.
_SECONDS_AFTER_RESTART = 35.0
_SECONDS_TO_REST = 5.0
# The operator says that pods cannot start when they have not started for ten seconds.
_SECONDS_OF_QUIET = 12.0
_SECONDS_TO_GET_QUIET = 180.0


@dataclass
class Stage:
    """A contender that runs, with its servers."""

    plane: Plane
    mlflow: Mlflow
    contender: Contender
    access: Tail

    @property
    def pid(self) -> int:
        """The contender's process."""
        pid = self.contender.process.pid
        if pid is None:
            raise RuntimeError(f"{self.contender.name} ended:\n{self.contender.process.tail()}")
        return pid


@contextmanager
def open_stage(name: str, mlflow: Mlflow, folder: Path) -> Iterator[Stage]:
    """A new control plane, on which one contender runs and nothing else."""
    with start_plane(folder, name, find_crds(name)) as plane:
        contender: Contender = Ours.on(plane, mlflow, folder) if name == OURS else JobSet.on(plane, folder)
        try:
            contender.start()
            stay(_SECONDS_TO_REST, contender.process)
            yield Stage(plane, mlflow, contender, Tail(mlflow.log))
        finally:
            contender.process.stop()


def start_fleets(
    stage: Stage, visit: Visit, sizes: Sequence[int], report: Callable[[str, Fleet], None]
) -> list[str]:
    """Start fleets one after another, then measure the memory; the namespaces.

    Args:
        report: called with the contender's name and each fleet.
    """
    namespaces = []
    for jobs in sizes:
        namespace, fleet = start_fleet(stage.plane, stage.contender, jobs, stage.mlflow)
        visit.fleets.append(fleet)
        namespaces.append(namespace)
        report(visit.contender, fleet)
    _wait_for_quiet(stage)
    visit.memory_mib, visit.peak_mib = memory_mib(stage.pid)
    return namespaces


def _wait_for_quiet(stage: Stage) -> None:
    """Wait until the contender has not written to the API server for some time: what it has to say of its fleets is said."""
    end = time.monotonic() + _SECONDS_TO_GET_QUIET
    tail = stage.plane.tail()
    stay(_SECONDS_OF_QUIET, stage.contender.process)
    while list_writes(count_audit(tail.lines())) and time.monotonic() < end:
        stay(_SECONDS_OF_QUIET, stage.contender.process)


def measure_idle(stage: Stage, seconds: float) -> float:
    """The CPU time a minute of a contender while nothing happens."""
    before, began = cpu_seconds(stage.pid), time.monotonic()
    stay(seconds, stage.contender.process)
    return 60 * (cpu_seconds(stage.pid) - before) / (time.monotonic() - began)


def measure_restart(stage: Stage, jobs: int) -> Restart:
    """Stop the contender, start it again, and count what it does until a resync is over."""
    contender = stage.contender
    contender.process.stop()
    audit = stage.plane.tail()
    stage.access.lines()
    began = time.monotonic()
    contender.start()
    seconds = None
    if isinstance(contender, Ours):
        operator = contender
        wait_for(
            "every job is reconciled",
            lambda: operator.passes() >= jobs and operator.waiting() == 0,
            _SECONDS_TO_RESTART,
            operator.process,
        )
        seconds = time.monotonic() - began
    stay(_SECONDS_AFTER_RESTART, contender.process)
    memory, peak = memory_mib(stage.pid)
    writes: Counter[str] = list_writes(count_audit(audit.lines()))
    writes += list_mlflow_writes(count_access(stage.access.lines()))
    return Restart(jobs, seconds, memory, peak, cpu_seconds(stage.pid), writes)
