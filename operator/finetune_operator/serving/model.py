"""The state of a serving endpoint, and the actions on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from finetune_crds.serving import DatabricksServing, InferenceTable
from finetune_operator.errors import Problem


@dataclass(frozen=True)
class Workload:
    """The machines behind each version, where no throughput is reserved.

    Attributes:
        size: Databricks' name of a range of concurrent requests; None where `concurrency` is set.
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


def resolve_workload(spec: DatabricksServing) -> Workload:
    """The machines in a spec, with defaults."""
    concurrency = (spec.concurrency.min, spec.concurrency.max) if spec.concurrency else None
    return Workload(
        spec.workload_size or (None if concurrency else Workload.size),
        _WORKLOAD_TYPES[spec.workload_type or Workload.kind],
        Workload.scale_to_zero if spec.scale_to_zero is None else spec.scale_to_zero,
        concurrency,
    )


@dataclass(frozen=True)
class ServedVersion:
    """A version that the endpoint serves, and its share of the traffic in percent.

    `model` is empty for an entity that is not a registered model, such as another provider's.
    """

    model: str
    version: str
    percent: int = 0


@dataclass(frozen=True)
class Endpoint:
    """A serving endpoint as Databricks last reported it. When `problem` is set, nothing else is known.

    Attributes:
        exists: whether the endpoint exists.
        ready: whether it answers requests.
        updating: whether a change of its configuration is in progress, by this operator or by others.
        failed: whether the last change failed or was cancelled; `message` then says why.
        message: why the last change failed, or why an endpoint that is configured does not answer.
        served: the configuration in force.
        pending: the configuration that it is changing to, or failed to change to; empty when Databricks reports none.
        matches_spec: whether the configuration in force has the size, machine type and environment of the spec.
        logged_to: the table that requests are logged to; None when they are not logged.
        traffic: numbers of each served version in the last minute, by version; empty when the endpoint exports none.
        revision: changes with every requested change, also of the logging.
        url: where requests go.
    """

    exists: bool = False
    ready: bool = False
    updating: bool = False
    failed: bool = False
    message: str = ""
    served: tuple[ServedVersion, ...] = ()
    pending: tuple[ServedVersion, ...] = ()
    matches_spec: bool = True
    logged_to: InferenceTable | None = None
    traffic: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    revision: str | None = None
    url: str | None = None
    problem: Problem | None = None


@dataclass(frozen=True)
class ConfigureEndpoint:
    """Create the endpoint, or change it, so that it serves these versions with these shares, and no others."""

    spec: DatabricksServing
    served: tuple[ServedVersion, ...]
    create: bool


@dataclass(frozen=True)
class LogRequests:
    """Configure the AI gateway to log the endpoint's requests as in the spec. Nothing may be logged to another table."""

    spec: DatabricksServing


@dataclass(frozen=True)
class StopLogging:
    """Configure the AI gateway to log no more requests of the endpoint."""

    spec: DatabricksServing


EndpointAction = ConfigureEndpoint | LogRequests | StopLogging


class Serving(Protocol):
    """A workspace with serving endpoints. Every method blocks, and raises ExternalError."""

    def endpoint(self, spec: DatabricksServing) -> Endpoint:
        """The current state of the endpoint."""

    def act(self, action: EndpointAction) -> None:
        """Request a change, without waiting until it is complete."""
