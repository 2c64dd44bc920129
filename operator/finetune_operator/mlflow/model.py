"""An MLflow run, as the operator reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Run:
    """An MLflow run, with the newest value of each metric, and its tags."""

    run_id: str
    experiment_id: str
    status: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
