"""What the runs amount to: medians, goals, JSON and a Markdown row."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SCHEMA = "finetune-bench-promotions/1"
GOAL_SECONDS = 60.0


@dataclass(frozen=True)
class Restart:
    """The operator, stopped and started again among promotions that are where they should be.

    Attributes:
        seconds: from its start until every promotion was reconciled.
        passes: over promotions until then.
        mlflow_reads: questions to MLflow until then.
        memory_mib: resident memory of the operator at that time.
        api_writes, mlflow_writes: until one resync later. None is needed.
        failures: passes that failed.
    """

    seconds: float
    passes: int
    mlflow_reads: int
    memory_mib: float
    api_writes: Mapping[str, int] = field(default_factory=Counter)
    mlflow_writes: Mapping[str, int] = field(default_factory=Counter)
    failures: int = 0


@dataclass
class Result:
    """All of a run.

    Attributes:
        promotions: how many there are.
        models: of how many registered models.
        first_seconds: until all aliases were in place, from nothing.
        first_api_writes, first_mlflow_writes: what that took.
    """

    promotions: int
    models: int
    first_seconds: float = 0.0
    first_api_writes: Mapping[str, int] = field(default_factory=Counter)
    first_mlflow_writes: Mapping[str, int] = field(default_factory=Counter)
    restarts: list[Restart] = field(default_factory=list)

    def median(self, name: str) -> float:
        """The median of a figure over the restarts."""
        return float(statistics.median(getattr(restart, name) for restart in self.restarts))

    def failings(self, goal_seconds: float = GOAL_SECONDS) -> Iterator[str]:
        """What was not reached, each in a sentence."""
        for number, restart in enumerate(self.restarts, start=1):
            where = f"restart {number}"
            if restart.seconds > goal_seconds:
                yield f"{where}: not settled after {goal_seconds:.0f} s, but after {restart.seconds:.1f} s"
            for server, writes in (
                ("the API server", restart.api_writes),
                ("MLflow", restart.mlflow_writes),
            ):
                for what, count in sorted(writes.items()):
                    yield f"{where}: {count} needless writes to {server}: {what}"
            if restart.failures:
                yield f"{where}: {restart.failures} passes failed"


def as_json(machine: Mapping[str, Any], date: str, result: Result) -> dict[str, Any]:
    """The whole run, as it is kept."""
    return {
        "schema": SCHEMA,
        "date": date,
        "machine": dict(machine),
        "promotions": result.promotions,
        "models": result.models,
        "first": {
            "seconds": round(result.first_seconds, 2),
            "apiWrites": dict(result.first_api_writes),
            "mlflowWrites": dict(result.first_mlflow_writes),
        },
        "restarts": [
            {
                "seconds": round(restart.seconds, 2),
                "passes": restart.passes,
                "mlflowReads": restart.mlflow_reads,
                "memoryMiB": round(restart.memory_mib, 1),
                "apiWrites": dict(restart.api_writes),
                "mlflowWrites": dict(restart.mlflow_writes),
                "failures": restart.failures,
            }
            for restart in result.restarts
        ],
        "failings": list(result.failings()),
    }


def as_markdown(machine: Mapping[str, Any], date: str, result: Result) -> str:
    """The table for docs/design/speed.md."""
    restarts: Sequence[Restart] = result.restarts
    seconds = [restart.seconds for restart in restarts]
    needless = [
        sum(sum(getattr(restart, name).values()) for restart in restarts)
        for name in ("api_writes", "mlflow_writes")
    ]
    first = [sum(each.values()) for each in (result.first_api_writes, result.first_mlflow_writes)]
    return "\n".join(
        [
            "| machine, date | promotions, models | settled after a restart (goal 60 s) | needless writes: API server, MLflow "
            "| questions to MLflow | memory, MiB | from nothing, s | writes for that: API server, MLflow |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
            f"| {machine['cpu']}, {machine['cores']} cores, {date} | {result.promotions}, {result.models} "
            f"| {statistics.median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f}) "
            f"| {needless[0]}, {needless[1]} | {result.median('mlflow_reads'):,.0f} "
            f"| {result.median('memory_mib'):.0f} | {result.first_seconds:.1f} | {first[0]:,}, {first[1]:,} |",
        ]
    )
