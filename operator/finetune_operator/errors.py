"""The error for systems outside the cluster: MLflow, Databricks and servers of Git."""

from __future__ import annotations

from dataclasses import dataclass

from finetune_crds.conditions import ConditionReason

UNREACHABLE = (
    ConditionReason.MLFLOW_UNREACHABLE,
    ConditionReason.DATABRICKS_UNREACHABLE,
    ConditionReason.GIT_UNREACHABLE,
)
"""Reasons of problems that mean that no response came."""


@dataclass(frozen=True)
class Problem:
    """Why a system outside the cluster cannot be used: a reason, and a sentence that says what to do."""

    reason: ConditionReason
    message: str


class ExternalError(Exception):
    """A system outside the cluster refused a request, or cannot be reached."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem
