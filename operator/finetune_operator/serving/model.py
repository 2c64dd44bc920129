"""The state of a serving endpoint, and the actions on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from finetune_crds.serving import DatabricksServing
from finetune_operator.errors import Problem


@dataclass(frozen=True)
class Workload:
    """The machines behind each version, where no throughput is reserved."""

    size: str = "Small"
    kind: str = "CPU"
    scale_to_zero: bool = True


_KINDS = {
    "CPU": "CPU",
    "GPUSmall": "GPU_SMALL",
    "GPUMedium": "GPU_MEDIUM",
    "GPULarge": "GPU_LARGE",
    "MultiGPUMedium": "MULTIGPU_MEDIUM",
}
"""Databricks' name of each workload type."""


def workload(spec: DatabricksServing) -> Workload:
    """The machines in a spec, with defaults."""
    return Workload(
        spec.workload_size or Workload.size,
        _KINDS[spec.workload_type or Workload.kind],
        Workload.scale_to_zero if spec.scale_to_zero is None else spec.scale_to_zero,
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
        served: the configuration in force.
        pending: the configuration that it is changing to, or failed to change to; empty when Databricks reports none.
        matches_spec: whether the configuration in force has the size, machine type and environment of the spec.
        inference_table: whether requests are logged as in the spec.
        revision: changes with every requested change.
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
    inference_table: bool = True
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
    """Configure the AI gateway to log the endpoint's requests as in the spec."""

    spec: DatabricksServing


EndpointAction = ConfigureEndpoint | LogRequests


class Serving(Protocol):
    """A workspace with serving endpoints. Every method blocks, and raises ExternalError."""

    def endpoint(self, wanted: DatabricksServing) -> Endpoint:
        """The current state of the endpoint."""

    def act(self, action: EndpointAction) -> None:
        """Request a change, without waiting until it is complete."""
