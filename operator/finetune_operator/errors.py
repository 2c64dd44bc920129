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

PROTOCOL_CODES = frozenset(
    {
        "BAD_REQUEST",
        "CUSTOMER_UNAUTHORIZED",
        "ENDPOINT_NOT_FOUND",
        "FEATURE_DISABLED",
        "INTERNAL_ERROR",
        "INVALID_PARAMETER_VALUE",
        "INVALID_STATE",
        "NOT_FOUND",
        "NOT_IMPLEMENTED",
        "PERMISSION_DENIED",
        "REQUEST_LIMIT_EXCEEDED",
        "RESOURCE_ALREADY_EXISTS",
        "RESOURCE_CONFLICT",
        "RESOURCE_DOES_NOT_EXIST",
        "RESOURCE_EXHAUSTED",
        "RESOURCE_LIMIT_EXCEEDED",
        "TEMPORARILY_UNAVAILABLE",
        "UNAUTHENTICATED",
    }
)
"""Error codes of mlflow/protos/databricks.proto, with which MLflow and Databricks answer.

NB: conditions show no other text in their place, since users name the servers.
"""


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
