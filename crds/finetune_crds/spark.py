"""`spec.data.prepare.spark`: where and how Spark runs."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from finetune_crds import spark_conf
from finetune_crds.base import (
    ApiModel,
    Positive,
    Quantity,
    Rule,
    StringMap,
    replaced,
    rules,
)
from finetune_crds.databricks import Databricks
from finetune_crds.env import NAMES_SECRET, NO_SCOPE_IN_PODS
from finetune_crds.pods import build_moved_fields

_HAS_EXECUTORS = "self.mode in ['Kubernetes', 'SparkApplication']"


class Spark(ApiModel):
    """How Spark runs."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                f"{_HAS_EXECUTORS} || (!has(self.executors) && !has(self.executorCores) && !has(self.executorMemory))",
                "executors, executorCores and executorMemory can be set only when mode is Kubernetes or SparkApplication",
            ),
            (
                "(self.mode == 'Databricks') == has(self.databricks)",
                "databricks is required when mode is Databricks, and forbidden otherwise",
                ".databricks",
            ),
            # The API server fills in driverMemory, so its default is allowed.
            (
                "self.mode != 'Databricks' || self.driverMemory == '2Gi'",
                "driverMemory must not be set when mode is Databricks, which has no prep pod",
                ".driverMemory",
            ),
            (
                "self.mode != 'Databricks' || !has(self.conf) || size(self.conf) == 0 || !has(self.databricks) || "
                "(has(self.databricks.compute) && self.databricks.compute.type == 'NewCluster')",
                "conf requires databricks.compute.type NewCluster when mode is Databricks",
                ".conf",
            ),
            Rule(
                f"self.mode == 'Databricks' || !has(self.conf) || !self.conf.exists(name, self.conf[name].{NAMES_SECRET})",
                NO_SCOPE_IN_PODS,
                ".conf",
                at_creation=True,
            ),
            spark_conf.rule(),
        )
        | replaced(
            **build_moved_fields("serviceAccountName", prefix="data.prepare.spark.", settings="prepare")
        )
    )

    mode: Literal["Local", "Kubernetes", "SparkApplication", "Databricks"] = "Local"
    """Where Spark runs: in the prep pod (Local), in executor pods (Kubernetes), in pods of the spark-operator
    (SparkApplication), or at Databricks (Databricks)."""
    executors: Positive | None = None
    """Number of executor pods. Default: 2."""
    executor_cores: Positive | None = None
    """Cores of each executor. Default: 1."""
    executor_memory: Quantity | None = None
    """Heap of each executor, such as 4Gi. Its pod gets 40% more, for Python. Default: 2Gi."""
    driver_memory: Quantity = "2Gi"
    """Heap of the driver, such as 2Gi."""
    conf: StringMap = Field(default_factory=dict)
    """Other settings of Spark, except those that load code or move the driver."""
    databricks: Databricks | None = None
    """The Databricks run."""

    @property
    def executor_pods(self) -> int:
        """The number of executor pods; 0 if the mode creates none."""
        return (self.executors or 2) if self.mode in ("Kubernetes", "SparkApplication") else 0

    @property
    def cores_of_executor(self) -> int:
        """The cores of each executor."""
        return self.executor_cores or 1

    @property
    def memory_of_executor(self) -> str:
        """The heap of each executor, as a quantity."""
        return self.executor_memory or "2Gi"

    @property
    def has_catalog(self) -> bool:
        """Whether Spark can look up tables by name without `catalog`."""
        return self.mode == "Databricks"

    @property
    def is_dynamic(self) -> bool:
        """Whether Spark chooses the number of executors, up to `executor_pods`."""
        return self.conf.get("spark.dynamicAllocation.enabled", "").lower() == "true"
