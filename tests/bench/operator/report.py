"""What the measurements amount to: medians, goals, JSON and tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.operator.contenders import JOBSET, OURS, PODS
from bench.operator.figures import Fleet, Running, Visit

SCHEMA = "finetune-bench-operator/1"
_TABLE_HEAD = (
    "| | jobs x pods | jobs/s, pods created | jobs/s, status written | CPU a job, ms | of the control plane | of MLflow "
    "| jobs/s that this CPU time allows | requests a job: API server, MLflow |",
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
)


@dataclass(frozen=True)
class Goal:
    """A figure, and the limit that it should keep.

    Attributes:
        least: whether the limit is the lowest good figure; otherwise it is the highest.
    """

    what: str
    limit: float
    figure: float | None
    unit: str = ""
    least: bool = False

    def verdict(self) -> str:
        """Whether the goal is reached."""
        if self.figure is None:
            return "not measured"
        is_reached = self.figure >= self.limit if self.least else self.figure <= self.limit
        return "reached" if is_reached else "missed"


@dataclass
class Result:
    """All that a run of the benchmark has measured.

    Attributes:
        visits: of both contenders, in turns.
        large: our operator with many jobs.
        running: these jobs while they run.
        broken_parts: the parts that could not be measured, with the error.
    """

    visits: list[Visit] = field(default_factory=list)
    large: Visit | None = None
    running: Running | None = None
    broken_parts: list[str] = field(default_factory=list)

    def fleets(self, contender: str, jobs: int) -> list[Fleet]:
        """The fleets of one size, over all rounds."""
        return [
            fleet
            for visit in self.visits
            if visit.contender == contender
            for fleet in visit.fleets
            if fleet.jobs == jobs
        ]

    def sizes(self) -> list[int]:
        """The sizes of fleets, in the order in which they were started."""
        return list(dict.fromkeys(fleet.jobs for visit in self.visits for fleet in visit.fleets))

    def ratio(self, jobs: int) -> float | None:
        """Our jobs by the second, by JobSet's."""
        ours, jobset = (
            median_of(self.fleets(name, jobs), lambda fleet: fleet.jobs_per_second) for name in (OURS, JOBSET)
        )
        return ours / jobset if ours and jobset else None

    def goals(self) -> list[Goal]:
        """The goals of this kind of run, each with its figure."""
        sizes, visits = self.sizes(), [visit for visit in self.visits if visit.contender == OURS]
        total, restarts = sum(sizes), [visit.restart for visit in visits if visit.restart]
        goals = [
            Goal(f"{jobs} x {PODS} pods: jobs/s, of JobSet's", 1.0, self.ratio(jobs), "x", True)
            for jobs in sizes
        ]
        goals += [
            Goal(
                f"{jobs} x {PODS} pods: CPU time a job",
                10,
                median_of(self.fleets(OURS, jobs), lambda fleet: fleet.cpu_milliseconds_per_job),
                " ms",
            )
            for jobs in sizes
        ]
        idle = [visit.idle_seconds for visit in visits if visit.idle_seconds is not None]
        memory = [visit.memory_mib for visit in visits if visit.memory_mib is not None]
        goals += [
            Goal(f"memory after {total} jobs", 150, median_of(memory, float), " MiB"),
            Goal(
                f"memory after a restart with {total} jobs",
                150,
                median_of(restarts, lambda restart: restart.memory_mib),
                " MiB",
            ),
            Goal(f"CPU time a minute, idle with {total} jobs", 1, median_of(idle, float), " s"),
        ]
        # Without visits, no goal has a number of jobs.
        return [*(goals if sizes else ()), *self._large_goals()]

    def failures(self) -> Iterator[str]:
        """What must not happen at all, each in a sentence."""
        yield from self.broken_parts
        visits = [*self.visits, *([self.large] if self.large else [])]
        for restart in [visit.restart for visit in visits if visit.contender == OURS and visit.restart]:
            for write, number in sorted(restart.writes.items()):
                yield f"a restart with {restart.jobs} jobs made {number} needless writes: {write}"

    def _large_goals(self) -> Iterator[Goal]:
        large = self.large
        if large is None:
            return
        jobs = sum(fleet.jobs for fleet in large.fleets)
        yield Goal(f"memory after {jobs} jobs", 250, large.memory_mib, " MiB")
        if large.restart:
            restart = large.restart
            yield Goal(f"memory after a restart with {jobs} jobs", 250, restart.memory_mib, " MiB")
            yield Goal(f"seconds until a restart has reconciled {jobs} jobs", 10, restart.seconds, " s")
            yield Goal(f"writes after a restart with {jobs} jobs", 0, float(restart.writes.total()))
        if self.running:
            running = self.running
            figure = running.mlflow_requests.total() / running.seconds
            yield Goal(f"requests/s to MLflow with {running.jobs} running jobs", 5, figure)


def median_of(items: Sequence[Any], figure: Callable[[Any], float]) -> float | None:
    """The median of a figure; None without items."""
    return float(statistics.median(figure(item) for item in items)) if items else None


def as_json(machine: Mapping[str, Any], date: str, result: Result) -> dict[str, Any]:
    """The whole run, as it is kept."""
    return {
        "schema": SCHEMA,
        "date": date,
        "machine": dict(machine),
        "visits": [_visit_as_json(visit) for visit in result.visits],
        "large": _visit_as_json(result.large) if result.large else None,
        "running": _running_as_json(result.running) if result.running else None,
        "goals": [
            {
                "what": goal.what,
                "limit": goal.limit,
                "figure": _rounded(goal.figure),
                "verdict": goal.verdict(),
            }
            for goal in result.goals()
        ],
        "failures": list(result.failures()),
    }


def _visit_as_json(visit: Visit) -> dict[str, Any]:
    restart = visit.restart
    return {
        "contender": visit.contender,
        "fleets": [_fleet_as_json(fleet) for fleet in visit.fleets],
        "memoryMiB": _rounded(visit.memory_mib),
        "peakMiB": _rounded(visit.peak_mib),
        "idleCpuSecondsPerMinute": _rounded(visit.idle_seconds),
        "restart": restart
        and {
            "jobs": restart.jobs,
            "seconds": _rounded(restart.seconds),
            "memoryMiB": _rounded(restart.memory_mib),
            "peakMiB": _rounded(restart.peak_mib),
            "cpuSeconds": _rounded(restart.cpu_seconds),
            "writes": dict(restart.writes),
        },
    }


def _fleet_as_json(fleet: Fleet) -> dict[str, Any]:
    return {
        "jobs": fleet.jobs,
        "podsSeconds": _rounded(fleet.pods_seconds),
        "statusSeconds": _rounded(fleet.status_seconds),
        "jobsPerSecond": _rounded(fleet.jobs_per_second),
        "cpuSeconds": _rounded(fleet.cpu_seconds),
        "controlPlaneCpuSeconds": _rounded(fleet.plane_cpu_seconds),
        "mlflowCpuSeconds": _rounded(fleet.mlflow_cpu_seconds),
        "apiRequests": dict(fleet.api_requests.most_common()),
        "mlflowRequests": dict(fleet.mlflow_requests.most_common()),
    }


def _running_as_json(running: Running) -> dict[str, Any]:
    return {
        "jobs": running.jobs,
        "seconds": _rounded(running.seconds),
        "cpuSeconds": _rounded(running.cpu_seconds),
        "memoryMiB": _rounded(running.memory_mib),
        "peakMiB": _rounded(running.peak_mib),
        "apiRequests": dict(running.api_requests.most_common()),
        "mlflowRequests": dict(running.mlflow_requests.most_common()),
        "currentShare": _rounded(running.current_share),
        "reports": running.reports,
        "lostReports": running.lost_reports,
        "missedFailures": running.missed,
        "reactionSeconds": [
            [_rounded(reaction.job_failed), _rounded(reaction.next_attempt)] for reaction in running.reactions
        ],
    }


def _rounded(figure: float | None) -> float | None:
    return None if figure is None else round(figure, 2)


def as_markdown(machine: Mapping[str, Any], date: str, result: Result) -> str:
    """The tables for docs/design/speed.md."""
    return "\n".join(_lines(machine, date, result))


def _lines(machine: Mapping[str, Any], date: str, result: Result) -> Iterator[str]:
    yield f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']}, {date}"
    yield ""
    yield from _TABLE_HEAD
    for jobs in result.sizes():
        for name in (OURS, JOBSET):
            if result.fleets(name, jobs):
                yield _fleet_row(name, jobs, result.fleets(name, jobs), machine["cores"])
    if result.large:
        for fleet in result.large.fleets:
            yield _fleet_row(OURS, fleet.jobs, [fleet], machine["cores"])
    yield ""
    yield "| | jobs | memory, MiB | peak | idle CPU a minute, s | after a restart, MiB | peak | seconds | CPU, s | writes |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    for visit in [*result.visits, *([result.large] if result.large else [])]:
        yield _memory_row(visit)
    if result.running:
        yield ""
        yield from _running_table(result.running)
    yield ""
    yield "| goal | limit | measured | |"
    yield "|---|---:|---:|---|"
    for goal in result.goals():
        limit = f"{'at least' if goal.least else 'at most'} {goal.limit:g}{goal.unit}"
        figure = "-" if goal.figure is None else f"{goal.figure:.2f}{goal.unit}"
        yield f"| {goal.what} | {limit} | {figure} | {goal.verdict()} |"


def _running_table(running: Running) -> Iterator[str]:
    yield (
        "| running jobs | minutes | requests/s to the API server | to MLflow | CPU a minute, s | memory, MiB | peak "
        "| status is current | reports, lost | pods failed | next attempt: median, p99, s | Job failed: median, p99, s |"
    )
    yield "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    minutes = running.seconds / 60
    rates = [
        requests.total() / running.seconds for requests in (running.api_requests, running.mlflow_requests)
    ]
    next_attempts = [reaction.next_attempt for reaction in running.reactions]
    failed_jobs = [reaction.job_failed for reaction in running.reactions]
    missed = f" ({running.missed} without a next attempt)" if running.missed else ""
    yield (
        f"| {running.jobs} | {minutes:.1f} | {rates[0]:.1f} | {rates[1]:.1f} | {running.cpu_seconds / minutes:.1f} "
        f"| {running.memory_mib:.0f} | {running.peak_mib:.0f} | {running.current_share:.0%} "
        f"| {running.reports}, {running.lost_reports} | {len(running.reactions) + running.missed}{missed} "
        f"| {_spread(next_attempts)} | {_spread(failed_jobs)} |"
    )


def _spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.1f}, {percentile(seconds, 99):.1f}" if seconds else "-"


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest of some values that `percent` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


def _fleet_row(name: str, jobs: int, fleets: Sequence[Fleet], cores: int) -> str:
    speeds = sorted(fleet.jobs_per_second for fleet in fleets)
    reported = median_of(fleets, lambda fleet: fleet.jobs / fleet.status_seconds)
    cpu = median_of(fleets, lambda fleet: fleet.cpu_milliseconds_per_job)
    plane_cpu = median_of(fleets, lambda fleet: 1000 * fleet.plane_cpu_seconds / jobs)
    mlflow_cpu = median_of(fleets, lambda fleet: 1000 * fleet.mlflow_cpu_seconds / jobs)
    affordable = median_of(fleets, lambda fleet: fleet.affordable_jobs_per_second(cores))
    requests_per_job = (
        median_of(fleets, lambda fleet: fleet.api_requests.total() / jobs),
        median_of(fleets, lambda fleet: fleet.mlflow_requests.total() / jobs),
    )
    spread = f" ({speeds[0]:.1f} to {speeds[-1]:.1f})" if len(speeds) > 1 else ""
    return (
        f"| {name} | {jobs} x {PODS} | {statistics.median(speeds):.1f}{spread} | {reported:.1f} | {cpu:.1f} | {plane_cpu:.0f} | {mlflow_cpu:.0f} | {affordable:.1f} "
        f"| {requests_per_job[0]:.1f}, {requests_per_job[1]:.1f} |"
    )


def _memory_row(visit: Visit) -> str:
    jobs, restart = sum(fleet.jobs for fleet in visit.fleets), visit.restart
    cells = [f"{visit.memory_mib:.0f}", f"{visit.peak_mib:.0f}"] if visit.memory_mib else ["-", "-"]
    cells.append("-" if visit.idle_seconds is None else f"{visit.idle_seconds:.2f}")
    if restart is None:
        cells += ["-"] * 5
    else:
        cells += [f"{restart.memory_mib:.0f}", f"{restart.peak_mib:.0f}"]
        cells += ["-" if restart.seconds is None else f"{restart.seconds:.1f}"]
        cells += [f"{restart.cpu_seconds:.1f}", str(restart.writes.total())]
    return f"| {visit.contender} | {jobs} | {' | '.join(cells)} |"
