"""Translates served versions into entities of Databricks' Model Serving API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune_crds.serving import DatabricksServing, ProvisionedThroughput
from finetune_operator.serving.model import ServedVersion

if TYPE_CHECKING:
    from databricks.sdk.service import serving as api


@dataclass(frozen=True)
class Workload:
    """The machines of each served version of an endpoint without provisioned throughput.

    Attributes:
        size: Databricks' name of a range of concurrent requests; None if `concurrency` is set.
        kind: Databricks' name of the workload type.
        scale_to_zero: whether machines stop while there are no requests.
        concurrency: the smallest and the largest number of concurrent requests.
    """

    size: str | None = "Small"
    kind: str = "CPU"
    scale_to_zero: bool = True
    concurrency: tuple[int, int] | None = None


_WORKLOAD_TYPES = {
    "CPU": "CPU",
    "CPUMedium": "CPU_MEDIUM",
    "CPULarge": "CPU_LARGE",
    "GPUSmall": "GPU_SMALL",
    "GPUMedium": "GPU_MEDIUM",
    "GPULarge": "GPU_LARGE",
    "GPUXLarge": "GPU_XLARGE",
    "GPUXLarge8": "GPU_XLARGE_8",
    "MultiGPUMedium": "MULTIGPU_MEDIUM",
}
"""Databricks' name of each workload type."""


def resolve_workload(options: DatabricksServing) -> Workload:
    """The machines of a spec. What the spec leaves out has the default of the field in `Workload`."""
    concurrency = (options.concurrency.min, options.concurrency.max) if options.concurrency else None
    default_size = None if concurrency else Workload.size
    return Workload(
        size=options.workload_size or default_size,
        kind=_WORKLOAD_TYPES[options.workload_type or Workload.kind],
        scale_to_zero=Workload.scale_to_zero if options.scale_to_zero is None else options.scale_to_zero,
        concurrency=concurrency,
    )


def build_entity_name(version: str) -> str:
    """The name of a version's served entity, which routes refer to."""
    return f"version-{version}"


def build_entity(options: DatabricksServing, item: ServedVersion) -> api.ServedEntityInput:
    """The served entity of a version, for an endpoint without provisioned throughput."""
    from databricks.sdk.service import serving as api

    machines = resolve_workload(options)
    min_concurrency, max_concurrency = machines.concurrency or (None, None)
    return api.ServedEntityInput(
        name=build_entity_name(item.version),
        entity_name=item.model,
        entity_version=item.version,
        workload_size=machines.size,
        min_provisioned_concurrency=min_concurrency,
        max_provisioned_concurrency=max_concurrency,
        workload_type=api.ServingModelWorkloadType(machines.kind),
        scale_to_zero_enabled=machines.scale_to_zero,
        environment_vars=dict(options.environment) or None,
    )


def build_provisioned_entity(throughput: ProvisionedThroughput, item: ServedVersion) -> api.PtServedModel:
    """The served entity of a version, for an endpoint with provisioned throughput."""
    from databricks.sdk.service import serving as api

    return api.PtServedModel(
        name=build_entity_name(item.version),
        entity_name=item.model,
        entity_version=item.version,
        provisioned_model_units=throughput.model_units,
        burst_scaling_enabled=throughput.burst_scaling,
    )
