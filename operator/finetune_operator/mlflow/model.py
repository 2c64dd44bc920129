"""An MLflow run, as the operator reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Run:
    """An MLflow run.

    Attributes:
        metrics: the newest value of each metric, by its name.
        steps: the step of the newest value of each metric, by its name.
        is_deleted: whether the run was deleted, which people can undo in MLflow.
        planned_steps: the parameter max_steps; None if it is not set or not above 0.
    """

    run_id: str
    experiment_id: str
    status: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)
    planned_steps: int | None = None
    is_deleted: bool = False
