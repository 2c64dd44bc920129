"""MLflow as a job that trains finds it, for the tests of what is read from it."""

from __future__ import annotations

from typing import Any

from finetune_crds.conditions import ConditionReason
from finetune_crds.status import FineTuneJobStatus, MlflowStatus
from finetune_operator.errors import Problem
from finetune_operator.finetunejob.model import Mlflow
from fixtures.operator_in_memory.decisions import (
    SETTINGS,
    child,
    conclude,
    ftj,
    later,
    observed,
    pod,
    running,
)

AWAY = Mlflow(problem=Problem(ConditionReason.MLFLOW_UNREACHABLE, "MLflow at http://m cannot be reached: no"))
KNOWN = MlflowStatus(experiment_id="e1", run_id="r1", url="http://mlflow:5000/#/experiments/e1/runs/r1")


def follow(mlflow: Mlflow | None, before: FineTuneJobStatus | None = None, **parts: Any) -> Any:
    """The decision about a job that trains."""
    observation = observed(
        child("tune-train-1"), pods=[pod("tune-train-1", 0), pod("tune-train-1", 1)], mlflow=mlflow
    )
    return conclude(ftj(before or running(), **parts), observation, at=later(30), settings=SETTINGS)
