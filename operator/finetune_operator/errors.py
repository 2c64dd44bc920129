"""The error for systems outside the cluster: MLflow, Databricks, Git servers and Prometheus."""

from __future__ import annotations

from dataclasses import dataclass

from finetune_crds.conditions import ConditionReason

UNREACHABLE = (
    ConditionReason.MLFLOW_UNREACHABLE,
    ConditionReason.DATABRICKS_UNREACHABLE,
    ConditionReason.GIT_UNREACHABLE,
    ConditionReason.PROMETHEUS_UNREACHABLE,
)
"""Reasons of problems in which the server did not respond."""

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
"""Error codes in answers of MLflow and Databricks, from mlflow/protos/databricks.proto.

NB: users choose the servers, and any text can be in an answer. So conditions show these codes and no other part of an answer.
"""


@dataclass(frozen=True)
class Problem:
    """The reason why a system outside the cluster cannot be used, and a message with the remedy."""

    reason: ConditionReason
    message: str


class ExternalError(Exception):
    """A system outside the cluster refused a request, or cannot be reached."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class NotSentError(ExternalError):
    """A request that writes was not sent, because this replica does not hold the Lease of the operator. It says nothing about the server."""
